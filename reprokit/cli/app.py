"""The command ``reprokit``: parse into a plan, execute it, turn an error into text and an exit code.

Defaults come from ``[tool.reprokit.<command>]`` in the nearest ``pyproject.toml``: ``max-time = 60`` under
``[tool.reprokit.shrink]``. The environment (``REPROKIT_SHRINK_MAX_TIME``) beats the file, the command line beats both.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import reprokit
from reprokit.capture.options import current_folder
from reprokit.cli import capture, demo, diff, render, retry, show, shrink, timeline, trace, whatif
from reprokit.cli.children import STARTED_IN
from reprokit.cli.console import Plan, ScriptPlan, say, say_error
from reprokit.errors import Interrupted, ReprokitError, UsageError
from reprokit.words import keep_stderr

_REFUSALS = frozenset((errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS))
ISSUES = "https://github.com/reprokit/reprokit/issues"


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


# A new command is a module with a row here, and a page in `docs/`: the tests read the rows.
COMMANDS = (
    capture.command,
    show.command,
    trace.command,
    timeline.command,
    show.export_command,
    shrink.command,
    whatif.command,
    diff.command,
    render.verify_command,
    retry.command,
    render.command,
    demo.command,
)
for _command in COMMANDS:
    app.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. The exceptions of a script that it runs pass through."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is this command, not a program that calls it
        keep_stderr()
    try:
        if words[:1] == [STARTED_IN]:
            return capture.run_started(Path(words[1]), words[2:])
        plan = _parse(words)
        if plan is None:
            return 0
        return plan() if isinstance(plan, ScriptPlan) else _execute(plan)
    except ReprokitError as error:
        say_error(error)
        return error.exit_code


def _parse(argv: list[str]) -> Plan | None:
    """The plan that a command line asks for; ``None`` when click has answered it already, as for ``--help``."""
    try:
        plan = app.main(argv, prog_name="reprokit", standalone_mode=False, default_map=read_settings(current_folder()))
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
    try:
        return plan()
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
        if _is_out_of_memory(error):
            raise ReprokitError(
                "not enough memory for this step",
                hint="try it on a machine that has more",
                note=(str(error).splitlines() or [""])[0] or None,
            ) from None
        traceback.print_exc()
        say(f"this is an error in reprokit itself; please report the lines above at {ISSUES}")
        return 1


def _is_out_of_memory(error: Exception) -> bool:
    """True for an allocation that Python, or torch on any device, could not make: on the CPU a plain `RuntimeError`."""
    is_of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_of_torch


def read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Click's ``default_map``; raises `UsageError` for a name that no command or option has."""
    for parent in (folder, *folder.parents):
        path, content = parent / "pyproject.toml", {}
        with contextlib.suppress(OSError, ValueError):  # what is wrong with the user's file is for another tool to say
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        tools = content.get("tool")
        tables = tools.get("reprokit") if isinstance(tools, dict) else None
        if isinstance(tables, dict):
            return {name: _defaults(name, table, path) for name, table in tables.items()}
    return {}


def _defaults(name: str, table: Any, path: Path) -> dict[str, Any]:
    command = app.commands.get(name)
    if command is None or not isinstance(table, dict):
        raise UsageError(f"`{path}` has settings for `{name}`, which is not a command", hint="see `reprokit --help`")
    params = {option: param.name for param in command.params for option in param.opts}
    for key in table:
        if f"--{key}" not in params:
            raise UsageError(f"`{path}` sets `{key}`, which `{name}` does not have", hint=f"see `reprokit {name} -h`")
    return {str(params[f"--{key}"]): value for key, value in table.items()}
