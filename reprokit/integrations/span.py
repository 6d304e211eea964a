"""A capture that begins in one callback and ends in another one.

A ``with`` block knows when it is left. Callbacks run at a good end only, some not even after an exception: so the end
also comes with the exception that ends the process, with the callback's own, and with the process's, whichever is
first. After it no hook, exception hook or exit function is left behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from reprokit.capture import launch
from reprokit.capture.launch import capture
from reprokit.capture.options import Options

if TYPE_CHECKING:
    from reprokit.capture.session import Session


class Span:
    """At most one running capture; ``snapshots`` are the files that all captures of this span have written."""

    def __init__(self, output: str | os.PathLike[str] | None, options: Options) -> None:
        self.snapshots: list[Path] = []
        self._output = output
        self._options = options
        self._session: Session | None = None
        self._stack = contextlib.ExitStack()
        self._process = 0

    def begin(self, owner: object, on_numbers: Callable[[dict[str, float]], object] | None = None) -> None:
        """Begin to watch, until `end`, `finish` or the end of ``owner``; a run without an end callback ends now.

        What `record` measures goes to ``on_numbers``, unless there is a function for that among the options.
        """
        self.end()
        self._process = os.getpid()
        options = self._options
        if options.get("record") is not None and options.get("on_numbers") is None:
            options = Options(**{**options, "on_numbers": on_numbers})
        self._session = self._stack.enter_context(capture(self._output, **options))
        self._stack.callback(weakref.finalize(owner, self.end).detach)

    def note(self, numbers: Mapping[str, object]) -> None:
        """Add those values that are numbers to the timeline."""
        if self._session is not None:
            found = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
            self._session.note(**found)

    def finish(self) -> None:
        """End well; what is found only now stops the program as a capture in the midst of the loop would have."""
        session = self._session
        self.end()
        if session is not None and session.has_failed and self._options.get("after", "stop") == "stop":
            from reprokit.capture.mode import CaptureStop

            raise CaptureStop(session)

    def end(self, error: BaseException | None = None) -> None:
        """Stop to watch, with the exception that ended the loop; nothing happens when nothing is watched."""
        session, self._session = self._session, None
        if session is None or os.getpid() != self._process:
            return
        try:
            kind, traceback = (type(error), error.__traceback__) if error is not None else (None, None)
            self._stack.__exit__(kind, error, traceback)
        finally:
            self.snapshots += session.snapshots
        if error is not None:
            launch.peel(error)  # whoever shows it shows the frames of the program only

    def end_when_uncaught(self) -> None:
        """Let an exception that ends the program end this span as well, after its traceback was shown."""
        shown_by = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            if self._session is None:
                shown_by(kind, error, traceback)
                return
            launch.peel(error)
            shown_by(kind, error, error.__traceback__)
            self.end(error.with_traceback(traceback))

        def unhook() -> None:
            if sys.excepthook is show:
                sys.excepthook = shown_by

        sys.excepthook = show
        self._stack.callback(unhook)


class WithSpan:
    """What every callback has beside its framework's base class: a span, the arguments for it, and what it wrote."""

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        super().__init__()
        self._span = Span(output, options)

    @property
    def snapshots(self) -> list[Path]:
        return self._span.snapshots
