"""Ctrl-C and deadlines: the first Ctrl-C asks to stop, the second one ends the process at once.

While a kernel of torch runs, Python calls no handler; a thread of its own then ends the process (`stuck`, `deadline`).
The first raises `KeyboardInterrupt` where the work is, and again at the next `check` in case somebody's callback
swallowed it. Both leave only whole files: what is being put in place is finished first, unfinished files are removed.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from reprokit.cli.console import say_error
from reprokit.errors import ReprokitError
from reprokit.snapshot.files import REDUCTION_FILE, left_behind, unfinished

EXIT_CODE = 130
STAGING = ".rendering-"
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


class Interrupts:
    """Takes over SIGINT inside a ``with`` block. Outside the main thread, or where SIGINT is ignored, it does nothing.

    ``folder`` is where unfinished files may lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._is_held = False
        self._is_disposable = True
        self._is_answered = False
        self._previous: object = None
        self._stuck = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not the main thread
                self._previous = signal.signal(signal.SIGINT, self._interrupted)
                self._stuck.enter_context(stuck(self._unanswered))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stuck.close()
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def begin(self) -> None:
        """From here on there is something to keep; before (while torch is loaded) one Ctrl-C ends the process."""
        self._is_disposable = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if an interrupt was asked for and nobody has answered it yet."""
        if self._count and not self._is_answered:
            raise KeyboardInterrupt

    def answer(self) -> None:
        """The interrupt is dealt with; only another one ends the work that remains."""
        self._is_answered = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Finish what is inside, then be interrupted."""
        count, self._is_held = self._count, True
        try:
            yield
        finally:
            self._is_held = False
        if self._count > count:
            self._react()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if not self._is_held:
            self._react()

    def _unanswered(self, number: int) -> None:
        """End if a Ctrl-C that ends the process does not get to its handler."""
        time.sleep(PATIENCE)
        if self._count < number and (number > 1 or self._is_disposable):
            self._end()

    def _react(self) -> None:
        if self._count > 1 or self._is_disposable:
            self._end()
        raise KeyboardInterrupt

    def _end(self) -> None:
        """End now: no cleaning up but of unfinished files and of the terminal."""
        remove_unfinished(self._folder)
        processes = sys.modules.get("multiprocessing")
        with contextlib.suppress(Exception):
            for child in processes.active_children() if processes is not None else ():
                child.kill()
        end_now()


def remove_unfinished(target: Path) -> None:
    """Remove temporary files of ``target``, or of results in it, unless another running process writes them."""
    with contextlib.suppress(OSError):
        for path in unfinished(target / REDUCTION_FILE if target.is_dir() else target):
            path.unlink(missing_ok=True)
        for folder in left_behind(target, STAGING):
            shutil.rmtree(folder, ignore_errors=True)


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
    """The error for a step that does not end."""
    hint = hint or f"--max-time {2 * seconds:g} waits longer"
    return ReprokitError(f"the step takes over {seconds:g} s to run", hint=hint)
