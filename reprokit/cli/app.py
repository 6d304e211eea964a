"""The command ``reprokit``: parse into a plan, execute it, turn an error into text and an exit code.

Defaults come from ``[tool.reprokit.<command>]`` in the nearest ``pyproject.toml``: ``max-time = 60`` under
``[tool.reprokit.shrink]``. The environment (``REPROKIT_SHRINK_MAX_TIME``) beats the file, the command line beats both.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import click

import reprokit
from reprokit.capture.options import current_folder
from reprokit.cli import capture, demo, render, show, shrink, timeline, trace, whatif
from reprokit.cli.console import GRACE, PATIENCE, end_now, say, say_error, stuck
from reprokit.errors import Interrupted, ReprokitError, UsageError

_REFUSALS = frozenset((errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS))
ISSUES = "https://github.com/reprokit/reprokit/issues"


class Plan(Protocol):
    """What a command line asks for."""

    def execute(self) -> int:
        """Do it; the exit code."""


@click.group(
    no_args_is_help=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "REPROKIT",
        "max_content_width": 100,
    },
    epilog="Start with: reprokit capture train.py",
)
@click.version_option(reprokit.__version__, prog_name="reprokit")
def app() -> None:
    """From a training script that fails to the smallest standalone program that fails the same way."""


for _command in (
    *(capture.command, show.command, trace.command, timeline.command, show.export_command, shrink.command),
    *(whatif.command, render.verify_command, render.command, demo.command),
):
    app.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. The exceptions of a script that it runs pass through."""
    try:
        plan = _parse(list(sys.argv[1:] if argv is None else argv))
        if plan is None:
            return 0
        return plan.execute() if isinstance(plan, (capture.Capture, trace.TraceScript)) else _execute(plan)
    except ReprokitError as error:
        say_error(error)
        return error.exit_code


def _parse(argv: list[str]) -> Plan | None:
    """The plan that a command line asks for; ``None`` when click has answered it already, as for ``--help``."""
    try:
        settings = read_settings(app, current_folder())
        plan = app.main(argv, prog_name="reprokit", standalone_mode=False, default_map=settings)
    except click.UsageError as error:
        message = error.format_message().rstrip(".").replace("'", "`")
        named = f"reprokit {argv[0]}" if argv and argv[0] in app.commands else "reprokit"
        path = error.ctx.command_path if error.ctx is not None else named
        raise UsageError(message[:1].lower() + message[1:], hint=f"see `{path} --help`") from None
    except (click.Abort, KeyboardInterrupt):
        raise Interrupted("interrupted") from None
    return None if isinstance(plan, int) else plan


def _execute(plan: Plan) -> int:
    """Execute a plan that runs only our own code, where anything unexpected is our fault."""
    is_over = threading.Event()

    def end(number: int) -> None:
        if number == 1 and isinstance(plan, shrink.Shrink):  # it writes the best so far
            return
        if not is_over.wait(2 * GRACE if number == 1 else PATIENCE):  # a deadline interrupts as well, and waits once
            end_now()

    try:
        with stuck(end):
            return plan.execute()
    except ReprokitError:
        raise
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            raise ReprokitError(
                f"the system refuses: {(error.strerror or str(error)).lower()}",
                hint="make room, or choose another place with -o",
                note=f"it was about `{error.filename}`" if error.filename else None,
            ) from None
        traceback.print_exc()
        say(f"this is an error in reprokit itself; please report the lines above at {ISSUES}")
        return 1
    finally:
        is_over.set()


def read_settings(group: click.Group, folder: Path) -> dict[str, dict[str, Any]]:
    """Click's ``default_map`` for ``group``; raises `UsageError` for a name that no option has."""
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        content: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # what is wrong with the user's file is for another tool to say
            content = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        tools = content.get("tool")
        tables = tools.get("reprokit") if isinstance(tools, dict) else None
        if isinstance(tables, dict):
            return {name: _options(group, name, table, path) for name, table in tables.items()}
    return {}


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
