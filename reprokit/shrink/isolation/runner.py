"""The policy: which candidates run where, how many at once, and when the limits are known.

An executor in the manner of ``concurrent.futures`` runs each candidate in a child or worker of its own process, so that
a crash ends a candidate and not the executor.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from reprokit.errors import UsageError
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation import processes
from reprokit.shrink.isolation.engines import described
from reprokit.shrink.isolation.processes import ChildRun, ForkedRun, RunLimits, uninterrupted, wait_for
from reprokit.shrink.isolation.task import NotObserved, Report, Task, pack, pack_report, unpack, unpack_report
from reprokit.shrink.isolation.worker import Worker, observe_freshly
from reprokit.shrink.probe import trusts_arguments

_here = threading.local()
Reports = Generator[Report, None, None]
MODES = ("auto", "process", "fork", "worker")
_SECONDS_ON_THE_WAY = 60.0  # a large model's tensors over a slow network, or a queue; a worker may be gone for good
_WORTH_A_PROCESS = 0.1  # seconds; a quicker candidate is done here before a child has started


class Future(Protocol):
    """What `Executor.submit` hands out."""

    def result(self, timeout: float | None = None) -> Any:
        """The result, once there is one; raises what the function raised, or that there is none after ``timeout`` s."""

    def cancel(self) -> Any:
        """Do not start what has not started."""


class Executor(Protocol):
    """What runs functions somewhere else."""

    def submit(self, function: Any, /, *arguments: Any) -> Future:
        """Run the function with the arguments."""


def reports_from(
    executor: Executor, task: Task, candidates: Sequence[Candidate], limits: RunLimits
) -> Generator[Report, None, None]:
    """The reports on candidates in their order; raises what is wrong with the executor."""
    futures: list[Future] = []
    seconds = None if limits.seconds is None else limits.seconds + _SECONDS_ON_THE_WAY
    try:
        for candidate in candidates:
            futures.append(executor.submit(observe_packed, task, pack(candidate), limits))
        for future in futures:
            yield unpack_report(future.result(seconds))
    finally:
        for future in futures:
            future.cancel()


def observe_packed(task: Task, packed: bytes, limits: RunLimits) -> bytes:
    """The other side: the report on one candidate."""
    isolation: Isolation | None = getattr(_here, "isolation", None)
    if isolation is None or isolation.task != task:
        isolation = _here.isolation = Isolation(task, always_apart=True)
    isolation.limits = limits
    candidate, _ = unpack(packed)
    return pack_report(isolation.report(candidate))


@dataclass
class Isolation:
    """Hands out the reports on candidates.

    ``mode`` ``auto`` runs in this process what is known not to take it down, unless ``always_apart`` (for checks that
    are code of the user's) or after a candidate did take its process down; ``process`` runs everything here, ``fork``
    and ``worker`` nothing. With an ``executor`` that is where candidates go that do not run here. Up to ``jobs`` run at
    once. Without ``limits`` these follow from the first run, which has none. ``ended`` counts the reasons for which
    candidates took a process down, ``trouble`` says what was wrong with the executor; ``on_trouble`` is called with it.
    """

    task: Task
    mode: str = "auto"
    jobs: int = 1
    limits: RunLimits | None = None
    always_apart: bool = False
    executor: Executor | None = None
    ended: Counter[str] = field(default_factory=Counter)
    trouble: str = ""
    on_trouble: Callable[[str], None] | None = None
    _workers: list[Worker] = field(default_factory=list)
    _latest_seconds: float = 0.0
    _measured: RunLimits | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"there is no isolation `{self.mode}`", hint=f"one of {', '.join(MODES)}")
        if self.mode == "fork" and not processes.can_fork():
            raise UsageError("candidates cannot be forked here", hint="use isolation `worker`")
        if self.mode == "worker" and not _has_process_groups():
            raise UsageError("there are no workers on this system", hint="use isolation `process`")

    @property
    def num_at_once(self) -> int:
        """How many candidates are worth running at once."""
        if self.jobs == 1 or self.mode == "process" or not _has_process_groups():
            return 1
        is_asked_for = self.mode != "auto" or self.executor is not None
        return self.jobs if is_asked_for or self.is_wary or self._latest_seconds > _WORTH_A_PROCESS else 1

    def report(self, candidate: Candidate) -> Report:
        """The report on one candidate."""
        with closing(self.reports([candidate])) as reports:
            return next(reports)

    def reports(self, candidates: Sequence[Candidate]) -> Reports:
        """The reports in the order of the candidates, all of which run at once; closing ends those not waited for."""
        if len(candidates) == 1 and self._may_run_here(candidates[0]):
            yield self._run_here(candidates[0])
            return
        done = 0
        with closing(self._apart(candidates)) as reports:
            for report in reports:
                done += 1
                yield self._noted(report)
        if done < len(candidates):  # the executor has failed
            yield from self.reports(candidates[done:])

    def report_freshly(self, candidate: Candidate) -> Report:
        """The report from an interpreter that is started for this candidate alone."""
        return observe_freshly(self.task, candidate, self.allowed)

    def change(self, task: Task, runs: int = 1) -> None:
        """Observe in another way from here on, which takes so many runs for each candidate. The limits stay, so that
        no candidate is ever without any."""
        self.close()
        self.task = task
        if self._measured is not None:
            self._measured = self._measured.times(runs)

    @contextmanager
    def observing(self, task: Task) -> Iterator[None]:
        """Observe in another way for a while."""
        before = self.task
        self.change(task)
        try:
            yield
        finally:
            self.change(before)

    def forget_limits(self) -> None:
        """Let them follow from the next run: what ran so far was smaller than what comes."""
        self._measured = None

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    @property
    def allowed(self) -> RunLimits:
        """The limits in force."""
        return self.limits or self._measured or RunLimits()

    @property
    def is_wary(self) -> bool:
        """True if nothing runs in this process any more, unless it was asked for."""
        return self.always_apart or bool(self.ended)

    def _may_run_here(self, candidate: Candidate) -> bool:
        if self.mode == "process" or not _has_process_groups():
            return True
        return self.mode == "auto" and not self.is_wary and not trusts_arguments(candidate.program)

    def _run_here(self, candidate: Candidate) -> Report:
        started = time.monotonic()
        report = self.task.report(candidate)
        self._time(time.monotonic() - started)
        return report

    def _apart(self, candidates: Sequence[Candidate]) -> Reports:
        if self.executor is not None:
            return self._through_executor(candidates)
        is_forked = self.mode == "fork" or (self.mode == "auto" and processes.can_fork())
        return self._in_children(candidates) if is_forked else self._in_workers(candidates)

    def _in_children(self, candidates: Sequence[Candidate]) -> Reports:
        runs: list[ForkedRun] = []
        try:
            for candidate in candidates:
                processes.start_forked(self.task, candidate, self.allowed, runs)
            for run in runs:
                yield wait_for(run, runs)
                self._time(run.seconds)
        finally:
            with uninterrupted():
                for run in runs:
                    run.close()

    def _in_workers(self, candidates: Sequence[Candidate]) -> Reports:
        while len(self._workers) < len(candidates):
            self._workers.append(Worker(self.task))
        workers = self._workers[: len(candidates)]
        for worker in workers:
            worker.open()
        runs: list[ChildRun] = []
        for worker, candidate in zip(workers, candidates, strict=True):
            worker.start(candidate, self.allowed, runs)
        for run, worker in zip(runs, workers, strict=True):
            yield wait_for(run, runs)
            worker.settle()
            self._time(run.seconds)

    def _through_executor(self, candidates: Sequence[Candidate]) -> Reports:
        assert self.executor is not None
        started = time.monotonic()
        try:
            with closing(reports_from(self.executor, self.task, candidates, self.allowed)) as reports:
                for report in reports:
                    self._time(time.monotonic() - started)
                    yield report
        except Exception as error:  # executors fail in as many ways as there are; candidates never raise here
            self._lose_executor(described(error))

    def _lose_executor(self, trouble: str) -> None:
        """Go on here, with as many at once as there are cores."""
        self.trouble = trouble
        self.executor = None
        self.jobs = min(self.jobs, os.cpu_count() or 1)
        if self.on_trouble is not None:
            self.on_trouble(trouble)

    def _noted(self, report: Report) -> Report:
        if report.took_its_process_down:
            assert isinstance(report.error, NotObserved)
            self.ended[report.error.reason] += 1
        return report

    def _time(self, seconds: float) -> None:
        self._latest_seconds = seconds
        if self._measured is None:
            self._measured = RunLimits.after(seconds)


def _has_process_groups() -> bool:
    return hasattr(os, "killpg")
