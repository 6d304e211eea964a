"""A spawned worker: a fresh interpreter that runs one candidate after another, where forking is not possible.

It is started again after a crash, a hang or a flood of memory. Starting takes as long as importing torch. The first
message is the task; each later one is a candidate, and is answered with its report. Tensors that the next candidate
uses again stay in the worker, so that a large model is sent once.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from reprokit.errors import ReprokitError
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.processes import (
    ChildRun,
    RunLimits,
    become_expendable,
    kill_group,
    uninterrupted,
    wait_for,
)
from reprokit.shrink.isolation.task import Report, Task, Tensors, pack, pack_report, unpack, used_tensors

READY = b"ready"
_SECONDS_TO_START = 300.0
_SECONDS_TO_WARM_UP = 60.0  # a first candidate on a GPU also loads its kernels
_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from reprokit.shrink.isolation.worker import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


def serve(descriptor: int, parent: int) -> None:
    """Answer until the other side hangs up."""
    connection: Connection[bytes, bytes] = Connection(descriptor)
    try:
        task: Task = pickle.loads(connection.recv_bytes())
    except Exception as error:  # the task is code of somebody's, and may fail to load in any way
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    become_expendable(parent)
    connection.send_bytes(READY)
    held: Tensors = {}
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        report, held = _observe(task, packed, held)
        connection.send_bytes(pack_report(report))


def _observe(task: Task, packed: bytes, held: Tensors) -> tuple[Report, Tensors]:
    try:
        candidate, held = unpack(packed, held)
    except Exception as error:  # a candidate that cannot be loaded here cannot be run either
        return Report(error=error), held
    return task.report(candidate), held


class Worker:
    """One process at a time. ``close`` ends it; so does losing the worker, or the end of this process."""

    def __init__(self, task: Task) -> None:
        try:
            self._task = pickle.dumps(task)
        except Exception as error:  # pickling fails in as many ways as there are classes
            raise ReprokitError(
                "the check cannot be sent to a worker", hint="use a function of a module", note=str(error)
            ) from error
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_ready = False
        self._is_warm = False
        self._held: Tensors = {}
        self._current: ChildRun | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def open(self) -> None:
        """Start the process if there is none; it gets ready while this one goes on."""
        if self._process is not None:
            return
        ours, theirs = Pipe(duplex=True)
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        try:
            with uninterrupted():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
                self._connection = ours
                self._finalizer = weakref.finalize(self, _end, self._process, ours)
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # a process that ends at once is noticed when it has to be ready
            ours.send_bytes(self._task)

    def start(self, candidate: Candidate, limits: RunLimits, runs: list[ChildRun]) -> None:
        """Start a candidate and add it to ``runs``; first comes the end of one that nobody waited for."""
        if self._current is not None and self._current.report is None:
            wait_for(self._current, [self._current])
        self.settle()
        self._get_ready()
        assert self._process is not None and self._connection is not None
        if not self._is_warm and limits.seconds is not None and not _is_on_cpu(candidate):
            limits = RunLimits(limits.seconds + _SECONDS_TO_WARM_UP, limits.memory)
        run = ChildRun(self._process.pid, self._connection, limits, self.end)
        runs.append(run)
        self._current = run
        try:
            self._connection.send_bytes(pack(candidate, self._held))
            self._held = used_tensors(candidate)
        except OSError:  # it has ended
            run.read()
        except Exception as error:  # not every tensor can be stored
            run.report = Report(error=error)

    def settle(self) -> None:
        """After a run: forget a process that has come to its end."""
        report = self._current.report if self._current is not None else None
        if report is not None:
            self._is_warm = True
            if report.took_its_process_down:
                self.close()

    def end(self) -> int:
        """Kill the process with all that it started; how it ended."""
        if self._process is None:
            return 0
        kill_group(self._process.pid)
        return self._process.wait()

    def close(self) -> None:
        """End the process; a later `open` starts another one."""
        with uninterrupted():
            if self._finalizer is not None:
                self._finalizer()
            self._process = self._connection = self._current = self._finalizer = None
            self._is_ready = self._is_warm = False
            self._held = {}

    def _get_ready(self) -> None:
        self.open()
        if self._is_ready:
            return
        assert self._connection is not None
        said = b"it took too long"
        try:
            if self._connection.poll(_SECONDS_TO_START):
                said = self._connection.recv_bytes()
        except (EOFError, OSError):
            said = b"it ended at once"
        if said != READY:
            self.close()
            raise ReprokitError("no worker can be started", note=said.decode(errors="replace"))
        self._is_ready = True


def observe_freshly(task: Task, candidate: Candidate, limits: RunLimits) -> Report:
    """The report on a candidate from a new interpreter that runs nothing else."""
    worker = Worker(task)
    runs: list[ChildRun] = []
    try:
        worker.start(candidate, limits, runs)
        return wait_for(runs[0], runs)
    finally:
        worker.close()


def _is_on_cpu(candidate: Candidate) -> bool:
    return all(tensor.device.type == "cpu" for tensor in candidate.tensors.values())


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    kill_group(process.pid)
    process.wait()
    connection.close()
