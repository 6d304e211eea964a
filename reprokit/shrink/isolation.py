"""Where candidates run: in this process what cannot crash it, a millisecond each, else in a child (`shrink.apart`).

The policy: which candidates run where, how many at once, and when the limits are known.

An executor of ``concurrent.futures`` runs each candidate in a child of its own process, so that a crash ends a
candidate and not the executor.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, field

from reprokit.errors import ReprokitError
from reprokit.program.step import Step
from reprokit.shrink import apart
from reprokit.shrink.apart import (
    Child,
    NotObserved,
    Report,
    RunLimits,
    Task,
    pack,
    pack_report,
    unpack,
    unpack_report,
    wait_for,
)
from reprokit.shrink.safety import trusts_arguments

Reports = Generator[Report, None, None]
_SECONDS_ON_THE_WAY = 60.0  # a large model's tensors over a slow network, or a queue; a worker may be gone for good
_WORTH_A_PROCESS = 0.1  # seconds; a quicker candidate is done here before a child has started


def observe_packed(task: Task, packed: bytes, limits: RunLimits) -> bytes:
    """The other side of an executor: the report on one candidate."""
    with closing(Isolation(task, limits=limits, always_apart=True)) as isolation:
        return pack_report(isolation.report(unpack(packed)[0]))


@dataclass
class Isolation:
    """Hands out the reports on candidates.

    What is known not to take this process down runs here, unless ``always_apart`` (for checks that are code of the
    user's) or after a candidate did take its process down; anything else in a child, or through the ``executor`` if
    there is one. Up to ``jobs`` run at once. Without ``limits`` these follow from the first run, which has none.
    ``ended`` counts the reasons for which candidates took a process down.
    """

    task: Task
    jobs: int = 1
    limits: RunLimits | None = None
    always_apart: bool = False
    executor: Executor | None = None
    ended: Counter[str] = field(default_factory=Counter)
    _spawned: list[Child] = field(default_factory=list)
    _latest_seconds: float = 0.0
    _measured: RunLimits | None = None

    @property
    def num_at_once(self) -> int:
        """How many candidates are worth running at once."""
        if not _has_process_groups():
            return 1
        is_worth_it = self.executor is not None or self.is_wary or self._latest_seconds > _WORTH_A_PROCESS
        return self.jobs if is_worth_it else 1

    def report(self, candidate: Step) -> Report:
        """The report on one candidate."""
        with closing(self.reports([candidate])) as reports:
            return next(reports)

    def reports(self, candidates: Sequence[Step], ways: Sequence[str] = ()) -> Reports:
        """The reports in the order of the candidates, all of which run at once; closing ends those not waited for.

        Raises `ReprokitError` if the executor fails. ``ways`` are for children only.
        """
        if len(candidates) == 1 and self._may_run_here(candidates[0]):
            started = time.monotonic()
            report = self.task.report(candidates[0])
            self._time(time.monotonic() - started)
            yield report
            return
        if self.executor is None:
            found = self._in_children(candidates, ways or [""] * len(candidates))
        else:
            found = self._through_executor(candidates)
        with closing(found) as reports:
            for report in reports:
                if report.took_its_process_down:
                    assert isinstance(report.error, NotObserved)
                    self.ended[report.error.reason] += 1
                yield report

    def report_freshly(self, candidate: Step) -> Report:
        """The report from an interpreter that is started for this candidate alone."""
        child = Child(self.task, is_forked=False)
        with closing(child):
            child.start(candidate, self.allowed)
            return wait_for(child, [child])

    def change(self, task: Task, runs: int = 1) -> None:
        """Observe in another way from here on, which takes so many runs for each candidate. The limits stay, so that
        no candidate is ever without any."""
        self.close()
        self.task = task
        if self._measured is not None:
            self._measured = self._measured.times(runs)

    def forget_limits(self) -> None:
        """Let them follow from the next run: what ran so far was smaller than what comes."""
        self._measured = None

    def close(self) -> None:
        """End all children."""
        for child in self._spawned:
            child.close()
        self._spawned.clear()

    @property
    def allowed(self) -> RunLimits:
        """The limits in force."""
        return self.limits or self._measured or RunLimits()

    @property
    def is_wary(self) -> bool:
        """True if nothing runs in this process any more."""
        return self.always_apart or bool(self.ended)

    def _may_run_here(self, candidate: Step) -> bool:
        return not _has_process_groups() or not (self.is_wary or trusts_arguments(candidate.program))

    def _in_children(self, candidates: Sequence[Step], ways: Sequence[str]) -> Reports:
        if apart.can_fork():
            running = [Child(self.task, is_forked=True) for _ in candidates]
        else:
            missing = len(candidates) - len(self._spawned)
            self._spawned += [Child(self.task, is_forked=False) for _ in range(missing)]
            running = self._spawned[: len(candidates)]
        try:
            for child in running:
                child.open()
            for child, candidate, way in zip(running, candidates, ways, strict=True):
                child.start(candidate, self.allowed, way)
            for child in running:
                yield wait_for(child, running)
                self._time(child.seconds)
        finally:
            for child in running:
                child.settle()

    def _through_executor(self, candidates: Sequence[Step]) -> Reports:
        assert self.executor is not None
        limits = self.allowed
        seconds = None if limits.seconds is None else limits.seconds + _SECONDS_ON_THE_WAY
        started = time.monotonic()
        futures: list[Future[bytes]] = []
        try:
            for candidate in candidates:
                futures.append(self.executor.submit(observe_packed, self.task, pack(candidate), limits))
            for future in futures:
                report = unpack_report(future.result(seconds))
                self._time(time.monotonic() - started)
                yield report
        except Exception as error:  # executors fail in as many ways as there are; candidates never raise here
            message = f"the executor failed: {type(error).__name__}: {error}"
            raise ReprokitError(message, hint="shrink without it, or with another one") from error
        finally:
            for future in futures:
                future.cancel()

    def _time(self, seconds: float) -> None:
        self._latest_seconds = seconds
        if self._measured is None:
            self._measured = RunLimits.after(seconds)


def _has_process_groups() -> bool:
    return hasattr(os, "killpg")
