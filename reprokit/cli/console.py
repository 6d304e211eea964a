"""What the commands say: lines on stderr that begin with the tool's name, and JSON on stdout."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import click

from reprokit.errors import ReprokitError

Command = TypeVar("Command", bound=Callable[..., Any])


class Verbosity(Enum):
    """How much a command says on stderr. Errors are always told."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


def common_options(command: Command) -> Command:
    """``-q``, ``-v`` and ``--json``, which every command has; the function gets ``verbosity`` and ``json``."""
    options = (
        click.option("-q", "--quiet", "verbosity", flag_value="quiet", help="Say nothing but errors."),
        click.option("-v", "--verbose", "verbosity", flag_value="verbose", help="Say more."),
        click.option("--json", is_flag=True, help="Print the result as JSON on stdout."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def say(text: str, verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """One line of the tool on stderr."""
    if verbosity is not Verbosity.QUIET:
        print(f"reprokit: {text}", file=sys.stderr, flush=True)


def say_error(error: ReprokitError) -> None:
    """An error with its hint and note, in cargo's manner."""
    print(f"reprokit: error: {error.message}", file=sys.stderr)
    for label, text in (("hint", error.hint), ("note", error.note)):
        if text:
            print(f"{label}: {text}", file=sys.stderr)
    sys.stderr.flush()


def print_json(result: Mapping[str, Any]) -> None:
    """A result as one line of JSON on stdout."""
    print(json.dumps(result, ensure_ascii=False, allow_nan=True), flush=True)


def shown_command(*words: str) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(words)
