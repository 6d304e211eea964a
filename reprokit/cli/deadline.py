"""A deadline for work that cannot be stopped from within: a kernel of torch that computes for hours.

Python's own code is interrupted first, so that it takes its files and processes away; a kernel ends with the process.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from reprokit.cli.console import say_error
from reprokit.errors import ReprokitError

SECONDS = 900.0  # for a step to be run before anything comes of it
GRACE = 2.0  # seconds for Python's own code to end


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
