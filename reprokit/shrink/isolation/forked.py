"""A forked child for each candidate, which starts in a few milliseconds and shares all tensors until it writes.

The child works in a new thread: OpenMP's pool of the thread that forked is gone, and the first parallel loop in it
would wait for that pool for ever, while a new thread makes a pool of its own, with as many threads as were recorded.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.limits import Limits
from reprokit.shrink.isolation.running import Run, become_expendable, kill_group, uninterrupted, wait_for
from reprokit.shrink.isolation.task import Report, Task
from reprokit.shrink.isolation.transport import pack_report

_TRIAL_SECONDS = 20.0


class ForkedRun(Run):
    """A candidate in a forked child. Ends with `close`, which leaves no process and no descriptor behind."""

    def __init__(self, pid: int, connection: Connection[Any, Any], limits: Limits) -> None:
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


def start(task: Task, candidate: Candidate, limits: Limits, runs: list[ForkedRun]) -> None:
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


def is_usable() -> bool:
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
        start(Task(_differentiate), Candidate(Program((), ()), {}), Limits(_TRIAL_SECONDS), runs)
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
