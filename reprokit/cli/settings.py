"""Defaults for options from ``[tool.reprokit.<command>]`` in the nearest ``pyproject.toml``.

A setting has the name of the long option: ``max-time = 60`` under ``[tool.reprokit.shrink]``. The environment
(``REPROKIT_SHRINK_MAX_TIME``) beats the file, and the command line beats both.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from reprokit.errors import UsageError


def read_settings(group: click.Group, folder: Path) -> dict[str, dict[str, Any]]:
    """Click's ``default_map`` for ``group``; raises `UsageError` for a name that no option has."""
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        tables = _read_tables(path) if path.is_file() else None
        if tables is not None:
            return {name: _options(group, name, table, path) for name, table in tables.items()}
    return {}


def _read_tables(path: Path) -> dict[str, Any] | None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # the file belongs to the user's project; another tool will complain about it
    tables = content.get("tool", {}).get("reprokit")
    return tables if isinstance(tables, dict) else None


def _options(group: click.Group, name: str, table: Any, path: Path) -> dict[str, Any]:
    command = group.commands.get(name)
    if command is None or not isinstance(table, dict):
        raise UsageError(f"`{path}` has settings for `{name}`, which is not a command", hint="see `reprokit --help`")
    by_option = {option: param.name for param in command.params for option in param.opts if param.name}
    unknown = [key for key in table if f"--{key}" not in by_option]
    if unknown:
        raise UsageError(
            f"`{path}` sets `{unknown[0]}`, which `{name}` does not have", hint=f"see `reprokit {name} --help`"
        )
    return {by_option[f"--{key}"]: value for key, value in table.items()}
