"""What all commands share: options, lines on stderr, JSON on stdout, checks of where results go, Ctrl-C and deadlines.

While a kernel of torch runs, Python calls no handler of signals; a thread then ends the process.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click

from reprokit.errors import OutputError, ReprokitError, UsageError
from reprokit.snapshot.files import REDUCTION_FILE, RESULTS, unfinished
from reprokit.words import json_line, print_line, visible

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


def max_time_option(
    default: float, help: str = "Give up after S seconds.", name: str = "max_time"
) -> Callable[[Any], Any]:
    """``--max-time``."""
    return click.option("--max-time", name, type=Seconds(), default=default, show_default=True, metavar="S", help=help)


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
    text = json_line(result, is_ascii=False)
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        text = json_line(result)
    print_text(f"{text}\n")


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def shown_command(*words: str) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(words)


def check_file(path: Path, *, overwrite: bool, option: str = "-o") -> None:
    """Raise `UsageError` unless a file can be written at ``path``, which the command calls ``option``."""
    _require_name(path, option)
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


def remove_file(path: Path, option: str) -> None:
    """Take an older file away that is to begin anew; raises `UsageError` for a pipe or a device."""
    if path.exists() and not path.is_file():
        raise UsageError(f"`{path}` is not a file", hint=f"choose another name with {option}")
    path.unlink(missing_ok=True)


def make_folder(folder: Path, *, overwrite: bool = False, option: str = "-o", force: str = "-f") -> None:
    """Make a folder for results; raises `UsageError` when it holds something already, unless ``overwrite``.

    ``option`` is what the command calls the folder, ``force`` what lets it be written into, empty if nothing does.
    """
    another = f"choose another one with {option}"
    _require_name(folder, option)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"`{folder}` is not a folder", hint=another)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        hint = f"{another}, or write into it with {force}" if force else another
        raise UsageError(f"the folder `{folder}` is not empty", hint=hint)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    check_folder(existing, option)
    folder.mkdir(parents=True, exist_ok=True)


def _require_name(path: Path, option: str = "-o") -> None:
    """Raise `UsageError` for what no file can be called, or where it cannot even be asked for."""
    try:
        path.exists()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{path}`: {reason}", hint=f"choose another name with {option}") from None


EXIT_CODE = 130
PATIENCE = 0.3  # seconds for the main thread to answer
_LINE = b"reprokit: error: interrupted\n"
_SHOW_CURSOR = b"\x1b[?25h"
SECONDS = 900.0  # for a step to be run before anything comes of it
GRACE = 2.0  # seconds for Python's own code to end


@contextlib.contextmanager
def stuck(end: Callable[[int], None]) -> Iterator[None]:
    """Call ``end`` in a thread after every Ctrl-C, with their number: the main thread may be inside a kernel."""
    try:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    except (OSError, ValueError):  # not the main thread
        yield
        return

    def watch() -> None:
        count = 0
        with contextlib.suppress(OSError):
            while number := os.read(reader, 1):
                if number[0] == signal.SIGINT:
                    count += 1
                    end(count)
        os.close(reader)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def end_now() -> None:
    """End the process with the line of an interrupt."""
    with contextlib.suppress(OSError):
        os.write(2, _SHOW_CURSOR + _LINE if os.isatty(2) else _LINE)
    os._exit(EXIT_CODE)


def remove_unfinished(target: Path) -> None:
    """Remove temporary files of ``target``, or of results in it, unless another running process writes them."""
    with contextlib.suppress(OSError):
        names = (REDUCTION_FILE, *RESULTS) if target.is_dir() else ()
        for file in [target / name for name in names] or [target]:
            for path in unfinished(file):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def deadline(seconds: float, error: ReprokitError) -> Iterator[Callable[[], None]]:
    """Raise ``error``, or end the process with it, unless the block is over in time or calls what it is given."""
    over, is_late = threading.Event(), threading.Event()
    is_main = threading.current_thread() is threading.main_thread()

    def watch() -> None:
        if over.wait(min(seconds, threading.TIMEOUT_MAX)):
            return
        is_late.set()
        if is_main:
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


def too_long(seconds: float, hint: str | None = None) -> ReprokitError:
    hint = hint or f"--max-time {2 * seconds:g} waits longer"
    return ReprokitError(f"the step takes over {seconds:g} s to run", hint=hint)


def read_steps(value: str | None, option: str) -> frozenset[int] | None:
    """``1,3,7-9`` as a set."""
    if value is None:
        return None
    found: set[int] = set()
    for word in value.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise UsageError(f"`{value}` is not a list of steps", hint=f"{option} takes numbers such as 1,3 or 7-9")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
