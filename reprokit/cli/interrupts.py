"""Ctrl-C and deadlines: while a kernel of torch runs, Python calls no handler, and a thread then ends the process."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from reprokit.cli.console import say_error
from reprokit.errors import ReprokitError
from reprokit.snapshot.files import REDUCTION_FILE, RESULTS, unfinished

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
    """The error for a step that does not end."""
    hint = hint or f"--max-time {2 * seconds:g} waits longer"
    return ReprokitError(f"the step takes over {seconds:g} s to run", hint=hint)
