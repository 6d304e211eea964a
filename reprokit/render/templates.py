"""Templates: the Jinja environment, the issue templates that come with the tool, and a user's own Jinja file or folder.

The tool's own are in the installed package, else beside the repository's root. An error in a user's template is one
`UsageError` that names the file and the line. A user's template runs in Jinja's sandbox and may include the tool's
own parts."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from reprokit.errors import UsageError
from reprokit.render import wording
from reprokit.snapshot.redact import redact_text
from reprokit.words import told, visible_line


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
        finalize=told,  # a text may quote code between marks, which are none of a page
    )
    environment.filters["redact"] = redact_text
    environment.filters["prose"] = wording.prose
    environment.filters["in_comment"] = lambda text: visible_line(str(text)).replace("--", "- -").replace(">", "\u203a")
    return environment


def render_template(name: str, folder: Path | None = None, /, **context: Any) -> str:
    return jinja_environment(folder).get_template(name).render(**context)


REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "lightning": "Lightning-AI/pytorch-lightning",
}
ENTRY = "issue.md.j2"  # what a folder of templates begins with


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was found and has no syntax errors. ``folder`` is ``None`` for the tool's own."""

    name: str
    file: str
    folder: Path | None = None

    @property
    def repository(self) -> str | None:
        """The repository whose form it follows."""
        return REPOSITORIES.get(self.name) if self.folder is None else None

    def render(self, context: Mapping[str, Any]) -> str:
        """The text; raises `UsageError` for what goes wrong inside a user's template."""
        try:
            template = jinja_environment(self.folder).get_template(self.file)
            text = template.render(fence=fence, **context)
        except Exception as error:
            if self.folder is None:
                raise
            raise _complaint(error, self.folder, self.file) from error
        return text if self.folder is not None else tidied(text)


def template_names() -> list[str]:
    return sorted(path.name.removesuffix(".md.j2") for path in (template_folder() / "issue").glob("[!_]*.md.j2"))


def find_template(wanted: str) -> Template:
    """The template with this name, or the user's at this path; raises `UsageError`, also for an error in its syntax."""
    if wanted in template_names():
        return Template(wanted, f"issue/{wanted}.md.j2")
    path = Path(wanted)
    if not path.exists():
        raise UsageError(
            f"there is no issue template `{wanted}`",
            hint=f"one of {', '.join(template_names())}, or the path of a Jinja file or folder",
        )
    file = _entry(path) if path.is_dir() else path
    found = Template(wanted, file.name, file.resolve().parent)
    try:
        jinja_environment(found.folder).get_template(found.file)
    except Exception as error:
        raise _complaint(error, file.resolve().parent, file.name) from error
    return found


def fence(text: str) -> str:
    """A fence one backtick longer than any inside."""
    return "`" * max(3, wording.longest_run(text) + 1)


def tidied(text: str) -> str:
    """Markdown with one blank line where there are several; fenced code stays as it is."""
    lines: list[str] = []
    closing = ""
    for line in text.strip().split("\n"):
        if closing:
            closing = "" if line == closing else closing
        elif line.startswith("```"):
            closing = "`" * (len(line) - len(line.lstrip("`")))
        elif not line.strip() and lines and not lines[-1]:
            continue
        lines.append(line if closing or line.strip() else "")
    return "\n".join(lines) + "\n"


def _entry(folder: Path) -> Path:
    if (folder / ENTRY).is_file():
        return folder / ENTRY
    files = sorted(path for path in folder.glob("*.j2") if not path.name.startswith("_"))
    if len(files) != 1:
        raise UsageError(
            f"the folder `{folder}` has no `{ENTRY}`", hint=f"name the template `{ENTRY}`, or give its path"
        )
    return files[0]


def _complaint(error: Exception, folder: Path, file: str) -> UsageError:
    """One line for whatever a template did wrong: where, and what."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    name, line = (Path(frames[-1].filename).name, frames[-1].lineno) if frames else (file, None)
    if isinstance(error, jinja2.TemplateSyntaxError):
        name, line = Path(error.filename or file).name, error.lineno
    what = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, jinja2.TemplateNotFound):
        what = f"there is no template `{error.name}`"
    place = f", line {line}" if line is not None else ""
    return UsageError(f"error in the template `{name}`{place}: {what}", hint="nothing was written; see docs/issue.md")
