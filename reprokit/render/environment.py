"""The Jinja environment and where the templates are: in the installed package, else beside the repository's root."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from reprokit.errors import UsageError
from reprokit.snapshot.redact import redact_text
from reprokit.visible import visible_line


@functools.cache
def template_folder() -> Path:
    """The folder with the templates; raises `UsageError` when the installation has none."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "templates", package.parent / "templates"):
        if folder.is_dir():
            return folder
    raise UsageError(
        "the templates are missing from this installation", hint="pip install --force-reinstall torch-reprokit"
    )


@functools.cache
def jinja_environment(folder: Path | None = None) -> jinja2.Environment:
    """An environment for the templates in ``folder`` and the tool's own; HTML is escaped, a missing name an error.

    What is in ``folder`` is somebody else's, and runs in a sandbox.
    """
    kind = jinja2.Environment if folder is None else jinja2.sandbox.ImmutableSandboxedEnvironment
    environment = kind(
        loader=jinja2.FileSystemLoader([folder, template_folder()] if folder is not None else [template_folder()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=jinja2.select_autoescape(("html", "html.j2")),
    )
    environment.filters["redact"] = redact_text
    environment.filters["in_comment"] = lambda text: visible_line(str(text)).replace("--", "- -").replace(">", "\u203a")
    return environment


def render_template(name: str, folder: Path | None = None, /, **context: Any) -> str:
    """The text of a template."""
    return jinja_environment(folder).get_template(name).render(**context)
