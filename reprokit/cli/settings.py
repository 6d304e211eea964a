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
    tools = content.get("tool")
    tables = tools.get("reprokit") if isinstance(tools, dict) else None
    return tables if isinstance(tables, dict) else None


def _options(group: click.Group, name: str, table: Any, path: Path) -> dict[str, Any]:
    command = group.commands.get(name)
    if command is None or not isinstance(table, dict):
        raise UsageError(f"`{path}` has settings for `{name}`, which is not a command", hint="see `reprokit --help`")
    by_option = {option: param for param in command.params for option in param.opts if param.name}
    unknown = [key for key in table if f"--{key}" not in by_option]
    if unknown:
        raise UsageError(
            f"`{path}` sets `{unknown[0]}`, which `{name}` does not have", hint=f"see `reprokit {name} --help`"
        )
    params = {key: by_option[f"--{key}"] for key in table}
    for key, param in params.items():
        if wanted := _wanted_instead(param, table[key]):
            raise UsageError(f"`{path}` sets `{key}` of `{name}` to {table[key]!r}", hint=f"it takes {wanted}")
    return {str(param.name): _default(param, table[key]) for key, param in params.items()}


def _wanted_instead(param: click.Parameter, value: Any) -> str:
    """What a setting takes, if the file gives it something of another kind; whether the value fits is for click."""
    if isinstance(param, click.Option) and param.is_flag:
        return "" if isinstance(value, bool) else "true or false"
    if param.multiple:
        return "" if isinstance(value, list) and all(isinstance(item, str) for item in value) else "a list of words"
    return "a word or a number" if isinstance(value, (bool, list, dict)) else ""


def _default(param: click.Parameter, value: Any) -> Any:
    """The value as click takes it: of a switch that stands for a word, such as ``quiet = true``, the word."""
    stands_for_word = isinstance(param, click.Option) and param.is_flag and not param.is_bool_flag
    if stands_for_word:
        return param.flag_value if value is True else None  # type: ignore[attr-defined]
    return value if isinstance(value, (bool, list)) else str(value)
