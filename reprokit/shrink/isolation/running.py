"""A candidate on its way in another process: waiting for its report, and ending it when it takes too much.

One thread does everything: it waits for all runs at once, and looks at their limits between reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from reprokit.shrink.isolation.limits import Limits, resident_bytes
from reprokit.shrink.isolation.task import NotObserved, Report
from reprokit.shrink.isolation.transport import unpack_report

_SECONDS_BETWEEN_LOOKS = 0.05
_PR_SET_PDEATHSIG = 1


class Run:
    """One candidate in a process of its own. ``end`` kills that process's whole group and returns its exit code.

    ``report`` is ``None`` until the candidate has come to an end, one way or another.
    """

    def __init__(self, pid: int, connection: Connection[Any, Any], limits: Limits, end: Callable[[], int]) -> None:
        self.connection = connection
        self.report: Report | None = None
        self.seconds = 0.0
        self._pid = pid
        self._end = end
        self._limits = limits
        self._started = time.monotonic()
        self._allowed = None if limits.memory is None else resident_bytes(pid) + limits.memory

    def read(self) -> None:
        """Take the report that has arrived, or notice that there will be none."""
        try:
            self._finish(unpack_report(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self._finish(Report(error=NotObserved("crash", f"the candidate ended its process ({_told(self._end())})")))

    def enforce(self) -> None:
        """End a run that has taken too much."""
        if self._limits.seconds is not None and time.monotonic() - self._started > self._limits.seconds:
            self._stop("time", f"the candidate took more than {self._limits.seconds:.0f} s")
        elif self._allowed is not None and resident_bytes(self._pid) > self._allowed:
            self._stop("memory", f"the candidate took more than {self._limits.memory:,} bytes")

    def _stop(self, reason: str, message: str) -> None:
        self._end()
        self._finish(Report(error=NotObserved(reason, message)))

    def _finish(self, report: Report) -> None:
        self.report = report
        self.seconds = time.monotonic() - self._started


def wait_for(run: Run, runs: Sequence[Run]) -> Report:
    """The report of ``run``; meanwhile all ``runs`` are served."""
    while run.report is None:
        open_runs = [other for other in runs if other.report is None]
        ready = wait([other.connection for other in open_runs], _SECONDS_BETWEEN_LOOKS)
        for other in open_runs:
            if other.connection in ready:
                other.read()
            else:
                other.enforce()
    return run.report


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the block, so that no process is started that nobody knows of."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: missed.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if missed and callable(handler):
            handler(*missed[0])


def kill_group(pid: int) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def become_expendable(parent: int) -> None:
    """In a new process: die with the parent, leave no core files, and keep quiet."""
    import faulthandler
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be asked
            os._exit(1)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.close(quiet)


def _told(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
