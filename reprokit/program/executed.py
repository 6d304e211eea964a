"""Which lines of edited files have run in this process: an edit in a line that has not run explains nothing.

A trace function of Python's notes the lines of functions in files that differ from those of a capture; functions of all
other files run untraced. Made for a script that runs for the answer of a command, not for a training.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import FrameType
from typing import Any

from reprokit.errors import ignored_errors
from reprokit.program.code_lines import CodeDigests, line_digests, read_text
from reprokit.program.sites import kind_of_file, relative_path

Trace = Callable[[FrameType, str, Any], Any]


class ExecutedLines:
    """The lines that have run since `start`, by file."""

    def __init__(self, captured: CodeDigests | None) -> None:
        """``captured`` are the digests of a capture. Without them nothing tells the files that were edited."""
        self._captured = captured
        self._lines: dict[str, set[int] | None] = {}  # by `co_filename`; ``None`` of a file that was not edited
        self._trace: Trace = self._enter  # a bound method is another object each time
        self._is_complete = False

    def start(self) -> None:
        """Begin, unless a debugger or a measurement of coverage traces: Python has one trace function."""
        is_free = sys.gettrace() is None and threading.gettrace() is None
        if self._captured is None or not is_free:
            return
        self._is_complete = True
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def stop(self) -> None:
        """End, and leave the trace function of somebody else alone."""
        if threading.gettrace() is self._trace:
            threading.settrace(None)
        if sys.gettrace() is self._trace:
            sys.settrace(None)

    def by_name(self) -> Mapping[str, Set[int]] | None:
        """The lines by the short names of edited files; ``None`` if they are not known."""
        if not self._is_complete:
            return None
        return {relative_path(file): lines for file, lines in self._lines.items() if lines is not None}

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        file = frame.f_code.co_filename
        if file not in self._lines:
            self._lines[file] = set() if self._is_edited(file) else None
        lines = self._lines[file]
        if lines is None:
            return None

        def note(frame: FrameType, event: str, argument: Any) -> Trace:
            lines.add(frame.f_lineno)
            return note

        return note

    def _is_edited(self, file: str) -> bool:
        """True for a file of the user's that is not as it was, or was not there."""
        with ignored_errors():  # of a file that is gone
            if not file.endswith(".py") or kind_of_file(file) != "user":
                return False
            known = (self._captured or {}).get(relative_path(file))
            text = read_text(Path(file))
            return known is None or text is None or line_digests(text) != tuple(known)
        return False
