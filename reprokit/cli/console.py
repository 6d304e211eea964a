"""What the commands say: lines on stderr that begin with the tool's name, and JSON on stdout."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click

from reprokit.errors import OutputError, ReprokitError, UsageError
from reprokit.visible import print_line, visible

Plan = TypeVar("Plan")


class FilePath(click.Path):
    """The path of a file or folder. An empty word, such as a variable of the shell that is not set, is none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("an empty word names no file", param, ctx)
        return super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A time to spend."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The seconds; infinitely many are no limit."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds


class Verbosity(Enum):
    """How much a command prints on stderr. Errors are always printed."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


def common_options(command: Callable[..., Plan]) -> Callable[..., Plan]:
    """``-q``, ``-v`` and ``--json``, which every command has; the function gets ``verbosity`` and ``json``."""

    @functools.wraps(command)
    def with_verbosity(verbosity: str | None, **options: Any) -> Plan:
        return command(verbosity=Verbosity(verbosity or "normal"), **options)

    quiet = click.option("-q", "--quiet", "verbosity", flag_value="quiet", help="Say nothing but errors.")
    verbose = click.option("-v", "--verbose", "verbosity", flag_value="verbose", help="Say more.")
    json_option = click.option("--json", is_flag=True, help="Print the result as JSON on stdout.")
    return quiet(verbose(json_option(with_verbosity)))


def gone(name: str, instead: str, *, is_flag: bool = False) -> Callable[[Any], Any]:
    """An option that was removed: an error that names what to use instead."""

    def refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            raise UsageError(f"`{name}` was removed", hint=instead)

    return click.option(name, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


def say(text: str, verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """One line of the tool on stderr."""
    if verbosity is not Verbosity.QUIET:
        print_line(text)


def say_error(error: ReprokitError) -> None:
    """An error with its hint and note, in cargo's manner."""
    print(f"reprokit: error: {visible(error.message)}", file=sys.stderr)
    for label, text in (("hint", error.hint), ("note", error.note)):
        if text:
            print(f"{label}: {visible(text)}", file=sys.stderr)
    sys.stderr.flush()


def print_text(text: str) -> None:
    """Text on stdout, with escapes for what that cannot say; raises `OutputError`, after which it takes anything."""
    encoding = _encoding()
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # its buffer would be written at the end again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = (error.strerror or str(error)).lower()
        raise OutputError(f"cannot write the output: {reason}", hint="look at where it goes, or use -o") from None


def print_json(result: Mapping[str, Any]) -> None:
    """A result as one line of JSON on stdout, with JSON's own escapes for what that cannot say."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=True)
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        text = json.dumps(result, allow_nan=True)
    print_text(f"{text}\n")


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def shown_command(*words: str) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(words)
