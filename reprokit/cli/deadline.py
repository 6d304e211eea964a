"""A deadline for work that cannot be stopped from within: a kernel of torch that computes for hours."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from reprokit.cli.console import say_error
from reprokit.errors import ReprokitError


@contextlib.contextmanager
def deadline(seconds: float, error: ReprokitError) -> Iterator[None]:
    """End the process with ``error`` unless the block is over in time. For commands that hold nothing to be saved."""

    def give_up() -> None:
        say_error(error)
        os._exit(error.exit_code)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
