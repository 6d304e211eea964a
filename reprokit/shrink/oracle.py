"""The oracle: does this candidate still fail the same way? Every answer is a real execution.

A verdict is remembered by the candidate's content, so the same candidate is never run twice. What is looked at and how
it is judged (`SignatureCheck`) and where candidates run (`Isolation`) are seams. Time and number of checks are
bounded. When several candidates run at once, those after the first success are neither counted nor reported, so the log
does not depend on it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import Report
from reprokit.shrink.signature import Signature, SignatureCheck, Verdict

_LEAST_SECONDS = 20.0
_TIMES_FIRST = 50
_MOST_SECONDS = 120.0  # seven passes of this length are as long as anybody waits unasked
_CHECKS = 1000
_PATIENCE = 5  # where the machine is busy with other things, or a candidate sleeps


class OutOfBudget(Exception):
    """The time or the number of checks that was allowed is spent."""


class PartIsOver(OutOfBudget):
    """A part of the search has spent its own budget; the rest of the search goes on."""


@dataclass
class PartBudget:
    """What a part of the search may still take, over all rounds."""

    seconds: float
    checks: int = _CHECKS

    @classmethod
    def after(cls, seconds: float, max_time: float | None = None, max_checks: int | None = None) -> PartBudget:
        """The budget of a part where the snapshot runs in so many seconds: 50 runs, at least 20 s, at most 120 s.

        A larger ``max_time`` or ``max_checks`` of the user's applies to each part.
        """
        default = min(max(_LEAST_SECONDS, _TIMES_FIRST * seconds), _MOST_SECONDS)
        return cls(max(default, max_time or 0.0), max(_CHECKS, max_checks or 0))


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Seconds of work since it was made: of the clock, but no more than this process and its children computed.

    So a budget buys the same work on a busy machine; a fifth of the clock's seconds counts in any case.
    """

    _clock: float = field(default_factory=time.monotonic)
    _computed: float = field(default_factory=lambda: sum(os.times()[:4]))

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        passed = time.monotonic() - self._clock
        return max(min(passed, sum(os.times()[:4]) - self._computed), passed / _PATIENCE)

    def has_passed(self, seconds: float) -> bool:
        """True if so many seconds are over; asks for computed time, a system call, only when it matters."""
        return time.monotonic() - self._clock > seconds and self.seconds > seconds


Proposal = tuple[str, Candidate]


@dataclass
class Oracle:
    """Decides candidates with a check.

    ``isolation`` decides where candidates run. ``checks`` counts executions. ``was_late``: a time limit was hit.
    ``start`` is the whole program with its failure, which may be too large to digest in passing.
    """

    predicate: SignatureCheck
    isolation: Isolation
    max_time: float | None = None
    max_checks: int | None = None
    on_check: Callable[[Candidate, Verdict, str], None] | None = None
    checks: int = 0
    was_late: bool = False
    start: tuple[Candidate, Failure] | None = None
    _known: dict[str, Verdict] = field(default_factory=dict)
    _failures: dict[str, Failure] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _parts: list[tuple[Stopwatch, float, int]] = field(default_factory=list)  # each: since when, seconds, last check

    @property
    def signature(self) -> Signature:
        """What must stay the same."""
        return self.predicate.signature

    def check(self, candidate: Candidate, change: str = "") -> Verdict:
        """The verdict on a candidate; raises `OutOfBudget` when no more checks are allowed."""
        return self._check(candidate, change, lambda: self.isolation.report(candidate))

    def first(self, proposals: Iterable[Proposal]) -> Candidate | None:
        """The first of the proposed candidates that fails the same way.

        As many as the isolation has room for run at once. Only those up to the success are counted, in their order, so
        the answer and the log are the same for any number.
        """
        for batch in _batches(proposals, lambda: self.isolation.num_at_once):
            unknown = {c.digest: c for _, c in batch if self._without_a_run(c) is None}
            with closing(self.isolation.reports(list(unknown.values()))) as reports:
                for change, candidate in batch:
                    if self._check(candidate, change, partial(next, reports)) is Verdict.SAME:
                        return candidate
        return None

    def confirm(self, candidate: Candidate) -> bool:
        """True if a fresh interpreter gives the same failure; not counted as a check, may raise."""
        return self._judge(candidate, self.isolation.report_freshly(candidate)) is Verdict.SAME

    def _without_a_run(self, candidate: Candidate) -> Verdict | None:
        """The verdict on a candidate that need not run: it did already, or is bad from the start."""
        known = self._known.get(candidate.digest)
        if known is None and not self.predicate.is_clean(candidate):
            return Verdict.OTHER
        return known

    def _check(self, candidate: Candidate, change: str, run: Callable[[], Report]) -> Verdict:
        known = self._without_a_run(candidate)
        if known is not None:
            return known
        self._spend()
        verdict = self._judge(candidate, run())
        self._known[candidate.digest] = verdict
        if self.on_check is not None:
            self.on_check(candidate, verdict, change)
        return verdict

    def failure(self, candidate: Candidate) -> Failure | None:
        """The failure of a candidate under the recorded settings; not counted as a check, may raise."""
        return self.isolation.report(candidate).value()

    def known_failure(self, candidate: Candidate) -> Failure | None:
        """The failure of a candidate that was found to be the same one, without running it again."""
        if self.start is not None and candidate is self.start[0]:
            return self.start[1]
        if candidate.digest not in self._failures:
            found = self.failure(candidate)
            if found is None:
                return None
            self._failures[candidate.digest] = found
        return self._failures[candidate.digest]

    def remember(self, candidate: Candidate, failure: Failure) -> None:
        """Note the failure of a candidate, so that nobody has to run it for that."""
        self._failures[candidate.digest] = failure

    @property
    def remembered(self) -> dict[str, str]:
        """The verdicts by digest, as plain data."""
        return {digest: verdict.value for digest, verdict in self._known.items()}

    def recall(self, verdicts: Mapping[str, str]) -> None:
        """Take over the verdicts of an earlier run; raises `ValueError` for one that does not exist."""
        self._known.update({digest: Verdict(value) for digest, value in verdicts.items()})

    @contextmanager
    def within(self, budget: PartBudget) -> Iterator[None]:
        """Raise `PartIsOver` in the block once the budget is spent; what the block took is deducted from it.

        An outer budget still holds.
        """
        watch, checks = Stopwatch(), self.checks
        self._parts.append((watch, budget.seconds, checks + budget.checks))
        try:
            yield
        finally:
            self._parts.pop()
            budget.seconds -= watch.seconds
            budget.checks -= self.checks - checks

    @property
    def seconds_left(self) -> float:
        """The seconds left of the whole search and of its current part."""
        left = [seconds - watch.seconds for watch, seconds, _ in self._parts]
        return min(self._seconds_left_of_all, *left, math.inf)

    @property
    def _seconds_left_of_all(self) -> float:
        return math.inf if self.max_time is None else self.max_time - (time.monotonic() - self._started)

    def require_time(self) -> None:
        """Raise `OutOfBudget` if the time is up, also where much is proposed and little is checked."""
        is_late = self._seconds_left_of_all < 0
        if is_late or any(watch.has_passed(seconds) for watch, seconds, _ in self._parts):
            self.was_late = True
            raise OutOfBudget if is_late else PartIsOver

    def _spend(self) -> None:
        self.require_time()
        if self.max_checks is not None and self.checks >= self.max_checks:
            raise OutOfBudget
        if any(self.checks >= last for _, _, last in self._parts):
            raise PartIsOver
        self.checks += 1

    def _judge(self, candidate: Candidate, report: Report) -> Verdict:
        if report.error is not None:
            return Verdict.INVALID
        verdict = self.predicate.judge(report.observation, candidate)
        if verdict is Verdict.SAME and report.observation is not None:
            self.remember(candidate, report.observation)
        return verdict


def _batches(proposals: Iterable[Proposal], size: Callable[[], int]) -> Iterator[list[Proposal]]:
    """The proposals in batches. An error in making one comes after all before it were looked at, as it would one by
    one."""
    remaining = iter(proposals)
    while True:
        batch: list[Proposal] = []
        error: Exception | None = None
        wanted = size()
        try:
            while len(batch) < wanted:
                batch.append(next(remaining))
        except StopIteration as end:
            error = end
        except Exception as raised:
            error = raised
        if batch:
            yield batch
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
