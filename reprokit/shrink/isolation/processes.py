"""A candidate in another process: its limits, waiting for its report, and forked children.

One thread waits for all runs at once and looks at their limits between reports. A forked child starts in a few
milliseconds and shares all tensors until it writes. It works in a new thread: OpenMP's pool of the thread that forked
is gone, and the first parallel loop would wait for that pool for ever, while a new thread makes a pool of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.task import NotObserved, Report, Task, pack_report, unpack_report

_LEAST_SECONDS = 10.0
_TIMES_FIRST = 10
_LEAST_BYTES = 1 << 30
_TIMES_PEAK = 2
_UNIT = 1 if sys.platform == "darwin" else 1024  # of what the system says about the peak
_SECONDS_BETWEEN_LOOKS = 0.05
_PR_SET_PDEATHSIG = 1
_TRIAL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``seconds`` for a whole run, ``memory`` in bytes on top of what the process has when a run starts; ``None``: no
    limit."""

    seconds: float | None = None
    memory: int | None = None

    @classmethod
    def after(cls, seconds: float) -> RunLimits:
        """The limits after a first run that took so long and, at its peak, as much memory as the system remembers."""
        return cls(max(_LEAST_SECONDS, _TIMES_FIRST * seconds), max(_LEAST_BYTES, _TIMES_PEAK * peak_bytes()))

    def times(self, runs: int) -> RunLimits:
        """The limits for so many runs in a row."""
        return self if self.seconds is None else RunLimits(runs * self.seconds, self.memory)


def peak_bytes() -> int:
    """The most memory that this process, or any child that has ended, ever held."""
    if sys.platform == "win32":
        return 0
    import resource

    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * _UNIT


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 where the system does not tell, or for a process that has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class ChildRun:
    """One candidate in a process of its own. ``end`` kills that process's whole group and returns its exit code.

    ``report`` is ``None`` until the candidate has come to an end, one way or another.
    """

    def __init__(self, pid: int, connection: Connection[Any, Any], limits: RunLimits, end: Callable[[], int]) -> None:
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


def wait_for(run: ChildRun, runs: Sequence[ChildRun]) -> Report:
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


class ForkedRun(ChildRun):
    """A candidate in a forked child. Ends with `close`, which leaves no process and no descriptor behind."""

    def __init__(self, pid: int, connection: Connection[Any, Any], limits: RunLimits) -> None:
        super().__init__(pid, connection, limits, self.end)
        self._child = pid
        self._exit_code: int | None = None

    def end(self) -> int:
        """Kill the child with all that it started; how it ended."""
        if self._exit_code is None:
            kill_group(self._child)
            try:
                self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
            except ChildProcessError:  # somebody else waits for all children
                self._exit_code = 1
        return self._exit_code

    def close(self) -> None:
        """End the child and forget it."""
        self.end()
        self.connection.close()


def start_forked(task: Task, candidate: Candidate, limits: RunLimits, runs: list[ForkedRun]) -> None:
    """Start a candidate and add it to ``runs``."""
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    try:
        with uninterrupted(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which torch always has some
            child = os.fork()
            if child == 0:
                _live(task, candidate, writer, parent)
            _lead_group(child)
            runs.append(ForkedRun(child, reader, limits))
    finally:
        writer.close()


def can_fork() -> bool:
    """True if forked children can run torch here: tried once, because what autograd allows depends on its build."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False  # macOS's own libraries do not survive a fork
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not is_on_gpu and _passes_trial()


@functools.cache
def _passes_trial() -> bool:
    from reprokit.program.ir import Program

    differentiating = threading.Thread(target=_differentiate, args=(None,))  # this may be a forked child itself
    differentiating.start()
    differentiating.join()
    runs: list[ForkedRun] = []
    try:
        start_forked(Task(_differentiate), Candidate(Program((), ()), {}), RunLimits(_TRIAL_SECONDS), runs)
        return wait_for(runs[0], runs).error is None
    finally:
        with uninterrupted():
            for run in runs:
                run.close()


def _differentiate(_: Candidate | None) -> None:
    """A backward pass with a parallel loop in it."""
    with torch.enable_grad():
        leaf = torch.ones(1 << 16, requires_grad=True)
        (leaf.exp() * 2).sum().backward()  # type: ignore[no-untyped-call]


def _live(task: Task, candidate: Candidate, writer: Connection[Any, Any], parent: int) -> NoReturn:
    """The whole life of a child."""
    try:
        _lead_group(0)
        become_expendable(parent)
        reports: list[Report] = []
        thread = threading.Thread(target=lambda: reports.append(task.report(candidate)))
        thread.start()
        thread.join()
        for report in reports:
            writer.send_bytes(pack_report(report))
    finally:
        os._exit(0)


def _lead_group(child: int) -> None:
    """Give a child a process group of its own; child and parent both see to it, so it holds for both from the start."""
    try:
        os.setpgid(child, child)
    except OSError:  # the child has ended, or has done it
        return
