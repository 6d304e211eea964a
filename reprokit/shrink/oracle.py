"""The oracle: does this candidate still fail the same way? Every answer is a real execution.

A verdict is remembered by the candidate's content, so the same candidate is never run twice. What is looked at and how
it is judged (`Check`) and where candidates run (`Isolation`) are seams. Time and number of checks are
bounded. When several candidates run at once, those after the first success are neither counted nor reported, so the log
does not depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from reprokit.locate.failure import Failure
from reprokit.program.step import Step
from reprokit.shrink.apart import Isolation, Report
from reprokit.shrink.checks.check import Check, Ruling


class OutOfBudget(Exception):
    """The budget is spent; the text is the option that sets it, ``max-time`` or ``max-checks``."""


Proposal = tuple[str, Step]


@dataclass
class Oracle:
    """Decides candidates with a check."""

    predicate: Check
    isolation: Isolation  # where candidates run
    max_time: float = math.inf
    max_checks: float = math.inf
    on_check: Callable[[Step, Ruling, str], None] | None = None
    checks: int = 0  # that were executed
    start: tuple[Step, Failure] | None = None  # the whole program, which may be too large to digest in passing
    _known: dict[str, Ruling] = field(default_factory=dict)
    _failures: dict[str, Failure] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)  # ``max_time`` counts from here

    def check(self, candidate: Step, change: str = "") -> Ruling:
        """The verdict on a candidate; raises `OutOfBudget` when no more checks are allowed."""
        return self._check(candidate, change, lambda: self.isolation.report(candidate))

    def first(self, proposals: Iterable[Proposal]) -> Step | None:
        """The first of the proposed candidates that fails the same way.

        As many as the isolation has room for run at once. Only those up to the success are counted, in their order, so
        the answer and the log are the same for any number.
        """
        for batch in _batches(proposals, lambda: self.isolation.num_at_once):
            unknown = {c.digest: c for _, c in batch if self.verdict_without_a_run(c) is None}
            with closing(self.isolation.reports(list(unknown.values()))) as reports:
                for change, candidate in batch:
                    if self._check(candidate, change, partial(next, reports)) is Ruling.SAME:
                        return candidate
        return None

    def verdict_without_a_run(self, candidate: Step) -> Ruling | None:
        """The verdict on a candidate that need not run: it did already, or is bad from the start."""
        known = self._known.get(candidate.digest)
        if known is None and not self.predicate.allows(candidate):
            return Ruling.OTHER
        return known

    def _check(self, candidate: Step, change: str, run: Callable[[], Report]) -> Ruling:
        known = self.verdict_without_a_run(candidate)
        if known is not None:
            return known
        self.require_time()
        if self.checks >= self.max_checks:
            raise OutOfBudget("max-checks")
        self.checks += 1
        verdict = self._judge(candidate, run())
        self._known[candidate.digest] = verdict
        if self.on_check is not None:
            self.on_check(candidate, verdict, change)
        return verdict

    def failure(self, candidate: Step) -> Failure | None:
        """The failure of a candidate under the recorded settings; not counted as a check, may raise."""
        found: Failure | None = self.isolation.report(candidate).value()
        return found

    def known_failure(self, candidate: Step) -> Failure | None:
        """The failure of a candidate that was found to be the same one, without running it again."""
        if self.start is not None and candidate is self.start[0]:
            return self.start[1]
        if candidate.digest not in self._failures:
            found = self.failure(candidate)
            if found is None:
                return None
            self._failures[candidate.digest] = found
        return self._failures[candidate.digest]

    def remember(self, candidate: Step, failure: Failure) -> None:
        """Note the failure of a candidate, so that nobody has to run it for that."""
        self._failures[candidate.digest] = failure

    @contextmanager
    def at_most(self, share: float, checks: int | None = None) -> Iterator[None]:
        """Raise `OutOfBudget` in the block once this share of the time that is left, or so many checks, are spent."""
        before = self.max_time, self.max_checks
        self.max_time = time.monotonic() - self.started + share * self.seconds_left
        if checks is not None:
            self.max_checks = min(self.checks + checks, self.max_checks)
        try:
            yield
        finally:
            self.max_time, self.max_checks = before

    @property
    def seconds_left(self) -> float:
        """The seconds left of the budget."""
        return self.max_time - (time.monotonic() - self.started)

    def require_time(self) -> None:
        """Raise `OutOfBudget` if the time is up, also where much is proposed and little is checked."""
        if self.seconds_left < 0:
            raise OutOfBudget("max-time")

    def _judge(self, candidate: Step, report: Report) -> Ruling:
        if report.error is not None:
            return Ruling.INVALID
        verdict = self.predicate.judge(report.found)
        if verdict is Ruling.SAME and report.found is not None:
            self.remember(candidate, report.found)
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
