"""The errors of reprokit, and exceptions that belong to the user although they come up in its code.

ReprokitError            exit code 1
├── UsageError           2
├── SnapshotError        1
│   ├── NotASnapshot     2
│   ├── TruncatedSnapshot
│   └── NewerFormat
├── NotReproduced        4
│   └── GivenInput
├── NotMatched           2
├── Flaky                5
├── OutputError          1  (also an OSError)
└── Interrupted          130

A signal handler runs between any two instructions, and another thread can raise an exception in this one
(`PyThreadState_SetAsyncExc`). Code that ignores errors calls `pass_on` first. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
from collections.abc import Callable, Iterator
from inspect import CO_VARARGS
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_OWN_FOLDER = str(Path(__file__).resolve().parent) + os.sep
_COMMANDS = os.path.join(_OWN_FOLDER, "cli", "")
_RAISE = dis.opmap["RAISE_VARARGS"]
_WITHOUT_WORDS = (MemoryError, StopIteration, StopAsyncIteration)  # C code raises these without arguments, too
_KNOWN = {"builtins", "torch", "numpy", "reprokit", *sys.stdlib_module_names}


def pass_on(error: BaseException) -> None:
    """Raise ``error``, or the exception that it has replaced, if that one has arrived from outside."""
    for found in chain(error):
        if has_arrived(found) and (found is error or _is_caught_here(found)):
            raise found


@contextlib.contextmanager
def ignored_errors() -> Iterator[None]:
    """A context in which errors are ignored, but not exceptions that arrive from outside."""
    try:
        yield
    except Exception as error:
        pass_on(error)


def attempt(question: Callable[[], T]) -> T | None:
    """The answer to a question, ``None`` where it raises an error."""
    with ignored_errors():
        return question()
    return None


def has_arrived(error: BaseException) -> bool:
    """True if a signal handler or another thread raised an exception, not the code in which it came up."""
    if not isinstance(error, Exception):
        return True
    found = list(tb_entries(error.__traceback__))
    handlers = _handlers()
    for before, entry in pairwise(found):
        frame = entry.tb_frame
        if frame.f_code in handlers:
            return True
        if not is_own(frame) and any(value is before.tb_frame for value in _arguments(frame)):
            return True
    if not found or isinstance(error, _WITHOUT_WORDS):
        return False
    frame = found[-1].tb_frame
    if frame.f_code.co_code[found[-1].tb_lasti] == _RAISE or not _is_known(frame.f_globals.get("__name__")):
        return False
    return not (error.args and _is_known(type(error).__module__))  # C code gives its errors a message


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def tb_entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, outermost first, without those that stand for a line of the user's."""
    while traceback is not None:
        if not is_stand_in(traceback.tb_frame.f_code):
            yield traceback
        traceback = traceback.tb_next


def drop_own_frames(error: BaseException) -> None:
    """Take the frames of a hook off the front of an exception's traceback, before a bare ``raise`` passes it on: code
    of the user's that catches the exception finds the frames of a run that nobody watches.

    Where there are frames of reprokit only and none has performed a call, the exception came up in them: they stay.
    """
    entry, has_performed = error.__traceback__, False
    while entry is not None:
        code = entry.tb_frame.f_code
        if code.co_varnames[:1] == (STAND_IN,):
            has_performed = True
        elif not code.co_filename.startswith(_OWN_FOLDER):
            break
        entry = entry.tb_next
    if entry is not None or has_performed:
        error.__traceback__ = entry


STAND_IN = "reprokit_function"  # the first variable of code that stands for a line of the user's


def is_own(frame: FrameType) -> bool:
    """True for a frame of reprokit's, one that stands for a line of the user's included."""
    return frame.f_code.co_filename.startswith(_OWN_FOLDER) or is_stand_in(frame.f_code)


def is_stand_in(code: CodeType) -> bool:
    """True for code that stands for a line of the user's, as `reprokit.capture.stand_ins` makes it."""
    return code.co_varnames[:1] == (STAND_IN,)


def _is_caught_here(error: BaseException) -> bool:
    """True if reprokit's own code has caught an exception, not the script or what runs the script."""
    first = next(tb_entries(error.__traceback__), None)
    return first is not None and is_own(first.tb_frame) and not first.tb_frame.f_code.co_filename.startswith(_COMMANDS)


def _is_known(module: Any) -> bool:
    """True for a module of Python, torch, NumPy or reprokit."""
    return str(module).partition(".")[0] in _KNOWN


def _handlers() -> set[CodeType]:
    found = (signal.getsignal(number) for number in signal.valid_signals())
    codes = (getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in found)
    return {code for code in codes if code is not None}


def _arguments(frame: FrameType) -> Iterator[Any]:
    """The arguments of a call; a signal handler is given the frame that it interrupts."""
    code, variables = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + bool(code.co_flags & CO_VARARGS)]
    for name in names:
        value = variables.get(name)
        yield from value if type(value) is tuple else (value,)


class ReprokitError(Exception):
    """An error with a hint. ``exit_code`` is what the command line ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, note: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.note = note


class UsageError(ReprokitError):
    """The command was given something that cannot work."""

    exit_code = 2


class SnapshotError(ReprokitError):
    """A file cannot be used as a snapshot."""


class NotASnapshot(SnapshotError):
    """The file is something else, so another one has to be named."""

    exit_code = 2


class TruncatedSnapshot(SnapshotError):
    """The file is cut off or damaged."""


class NewerFormat(SnapshotError):
    """The file was written by a newer reprokit."""


class NotReproduced(ReprokitError):
    """The failure does not happen again."""

    exit_code = 4


class GivenInput(NotReproduced):
    """The bad value was in an input of the step; ``input`` has its name, rows, elements and place."""

    def __init__(self, message: str, input: dict[str, Any], hint: str | None = None, note: str | None = None) -> None:
        super().__init__(message, hint, note)
        self.input = input


class NotMatched(ReprokitError):
    """A script cannot make the step of a snapshot."""

    exit_code = 2


class Flaky(ReprokitError):
    """The failure happens again only sometimes."""

    exit_code = 5


class OutputError(ReprokitError, OSError):
    """What a command prints cannot be written."""


class Interrupted(ReprokitError):
    """The user stopped the work."""

    exit_code = 130
