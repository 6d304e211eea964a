"""What all commands share: options, lines on stderr, JSON on stdout, checks of where results go, deadlines."""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import re
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from reprokit.errors import OutputError, ReprokitError, UsageError
from reprokit.snapshot.source import SOURCES
from reprokit.words import json_line, print_line, visible

Plan = Callable[[], int]  # what a command line asks for; returns the exit code
PATH = click.Path(path_type=Path)
SECONDS = 900.0  # for a step to be run before anything comes of it
GRACE = 2.0  # seconds for Python's own code to end


class ScriptPlan(ABC):
    """A plan that runs a script of the user's, whose exceptions pass through."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> int:
        """Run the script; returns the exit code."""


class Verbosity(StrEnum):
    """How much a command prints on stderr. Errors are always printed."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


def common_options(command: Callable[..., Plan]) -> Callable[..., Plan]:
    """``-q``, ``-v`` and ``--json``, which every command has; the function gets ``verbosity`` and ``json``."""

    @functools.wraps(command)
    def with_verbosity(quiet: bool, verbose: bool, **options: Any) -> Plan:
        level = Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL
        return command(verbosity=level, **options)

    quiet_option = click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
    verbose_option = click.option("-v", "--verbose", is_flag=True, help="Say more.")
    json_option = click.option("--json", is_flag=True, help="Print the result as JSON on stdout.")
    return quiet_option(verbose_option(json_option(with_verbosity)))


def planned(command: Callable[..., int]) -> Callable[..., Plan]:
    """A command that runs, with the common options, after click has parsed all of them."""

    @functools.wraps(command)
    def plan(**options: Any) -> Plan:
        return functools.partial(command, **options)

    return common_options(plan)


no_data_option = click.option("--no-data", is_flag=True, help="Write nothing that holds recorded numbers.")


def output_options(metavar: str, help: str) -> Callable[[Any], Any]:
    """``-o`` and ``-f``, of commands that write where they are told to."""
    output = click.option("-o", "--output", type=PATH, metavar=metavar, help=help)
    force = click.option("-f", "--force", is_flag=True, help="Overwrite what is there.")
    return lambda command: output(force(command))


def source_option(default: str) -> Callable[[Any], Any]:
    text = "How much of your code is kept and shown: the lines that a traceback shows, none, or all that is known."
    return click.option("--source", type=click.Choice(SOURCES), default=default, show_default=True, help=text)


def max_time_option(default: float, help: str = "Give up after S seconds.") -> Callable[[Any], Any]:
    kind = click.FloatRange(min=0, min_open=True)
    return click.option("--max-time", type=kind, default=default, show_default=True, metavar="S", help=help)


def gone(name: str, instead: str, *, is_flag: bool = False) -> Callable[[Any], Any]:
    """An option that was removed: an error that names what to use instead."""

    def refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            raise UsageError(f"`{name}` was removed", hint=instead)

    return click.option(name, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


def read_steps(value: str | None, option: str) -> frozenset[int]:
    """``1,3,7-9,20-100:10`` as a set; the number behind the colon is a stride."""
    found: set[int] = set()
    for word in value.split(",") if value is not None else ():
        given = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", word.strip())
        first, last, stride = (int(part) if part else None for part in given.groups()) if given else (None, 0, 0)
        if first is None or (last is not None and last < first) or stride == 0:
            hint = f"{option} takes numbers such as 1,3 or 7-9 or 0-100:10"
            raise UsageError(f"`{value}` is not a list of steps", hint=hint)
        found.update(range(first, (first if last is None else last) + 1, stride or 1))
    return frozenset(found)


def say(text: str, verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """One line of the tool on stderr."""
    if verbosity is not Verbosity.QUIET:
        print_line(text)


def say_error(error: ReprokitError) -> None:
    """An error with its hint and note, in cargo's manner."""
    lines = (("reprokit: error", error.message), ("hint", error.hint), ("note", error.note))
    print("\n".join(f"{label}: {visible(text)}" for label, text in lines if text), file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Text on stdout, with escapes for what that cannot say; raises `OutputError`, after which it takes anything."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # its buffer would be written at the end again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = (error.strerror or str(error)).lower()
        raise OutputError(f"cannot write the output: {reason}", hint="look at where it goes, or use -o") from None


def print_json(result: Mapping[str, Any]) -> None:
    """A result as one line of JSON on stdout."""
    print_text(f"{json_line(result)}\n")


def check_file(path: Path, *, overwrite: bool, option: str = "-o") -> None:
    """Raise `UsageError` unless a file can be written at ``path``, which the command calls ``option``."""
    with _written_by(path, option):
        if path.is_dir():
            raise UsageError(f"`{path}` is a folder", hint="name the file to write in it")
        if path.exists() and not overwrite:
            raise UsageError(f"`{path}` exists already", hint="choose another name, or overwrite it with -f")
    check_folder(path.parent, option)


def check_folder(folder: Path, option: str = "-o") -> None:
    """Raise `UsageError` unless a file can be made in ``folder``; tries it, as permissions do not tell all."""
    another = f"choose another place with {option}"
    if not folder.exists():
        raise UsageError(f"the folder `{folder}` does not exist", hint="create it first")
    if not folder.is_dir():
        raise UsageError(f"`{folder}` is not a folder", hint=another)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write into `{folder}`: {reason}", hint=another) from None


def make_folder(folder: Path, *, overwrite: bool = False, option: str = "-o", force: str = "-f") -> None:
    """Make a folder for results; raises `UsageError` when it holds something already, unless ``overwrite``.

    ``option`` is what the command calls the folder, ``force`` what lets it be written into, empty if nothing does.
    """
    another = f"choose another one with {option}"
    with _written_by(folder, option):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is not a folder", hint=another)
        if folder.is_dir() and any(folder.iterdir()) and not overwrite:
            hint = f"{another}, or write into it with {force}" if force else another
            raise UsageError(f"the folder `{folder}` is not empty", hint=hint)
    check_folder(next(parent for parent in (folder, *folder.parents) if parent.exists()), option)
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _written_by(path: Path, option: str) -> Iterator[None]:
    """A context in which the system may refuse to look at ``path``, such as a name of 300 letters."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{path}`: {reason}", hint=f"choose another name with {option}") from None


@contextlib.contextmanager
def deadline(seconds: float, hint: str | None = None) -> Iterator[Callable[[], None]]:
    """Raise an error, or end the process with it, unless the block is over in time or calls what it is given.

    While a kernel of torch runs, Python raises nothing; a thread then ends the process.
    """
    error = ReprokitError(
        f"the step takes over {seconds:g} s to run", hint=hint or f"--max-time {2 * seconds:g} waits longer"
    )
    over, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        if over.wait(min(seconds, threading.TIMEOUT_MAX)):
            return
        is_late.set()
        _thread.interrupt_main()
        if not over.wait(GRACE):
            say_error(error)
            os._exit(error.exit_code)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield over.set
    except KeyboardInterrupt:
        if is_late.is_set():
            raise error from None
        raise
    finally:
        over.set()
