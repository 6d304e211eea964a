"""Failures that do not happen every time: how often, what makes a difference, and how many runs a decision takes.

A candidate is accepted when it fails in at least ``needed`` of ``runs`` runs. Both are chosen so that a candidate that
fails as often as the snapshot is refused with probability 1% at most, and one that fails a quarter as often is accepted
with probability 1% at most. "As often" is the lower end of the Wilson score interval of what was measured
(E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22, 1927); the two errors
are exact binomial tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.run import Settings
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.protocol import Check
from reprokit.shrink.isolation.task import Report
from reprokit.shrink.oracle import Verdict

ERROR = 0.01
MAX_RUNS = 60
MEASURED_RUNS = 30
_RARE = 0.25
_Z = 2.3263478740408408  # the one-sided 99% quantile of the normal distribution
_SETTING_RUNS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of the runs failed as recorded."""

    failed: int
    runs: int

    @classmethod
    def of(cls, check: Check, candidate: Candidate, seen: Sequence[Failure | None]) -> Rate:
        """The rate among these observations of one candidate."""
        return cls(sum(check.judge(found, candidate) is Verdict.SAME for found in seen), len(seen))

    def __str__(self) -> str:
        return f"{self.failed}/{self.runs}"

    @property
    def at_least(self) -> float:
        """The lower end of the one-sided 99% Wilson score interval."""
        n, share = self.runs, self.failed / self.runs
        middle = share + _Z * _Z / (2 * n)
        spread = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n))
        return max(0.0, (middle - spread) / (1 + _Z * _Z / n))


@dataclass(frozen=True, slots=True)
class Rule:
    """Accept when at least ``needed`` of ``runs`` runs fail."""

    needed: int
    runs: int

    def __str__(self) -> str:
        return f"accepted on {self.needed} of {self.runs} runs, each decision wrong with probability 1% at most"


def rule_for(rate: Rate) -> Rule | None:
    """The rule with the fewest runs, ``None`` when it would take more than `MAX_RUNS`."""
    often = rate.at_least
    for runs in range(1, MAX_RUNS + 1):
        for needed in range(1, runs + 1):
            is_rarely_refused = 1 - _tail(runs, needed, often) <= ERROR
            if is_rarely_refused and _tail(runs, needed, often * _RARE) <= ERROR:
                return Rule(needed, runs)
    return None


def _tail(runs: int, needed: int, chance: float) -> float:
    """The probability of at least ``needed`` failures."""
    return sum(math.comb(runs, k) * chance**k * (1 - chance) ** (runs - k) for k in range(needed, runs + 1))


@dataclass(frozen=True)
class RepeatedCheck:
    """A check of a flaky failure: observes as often as its rule says, and stops when the answer is certain."""

    once: Check
    rule: Rule

    def observe(self, candidate: Candidate) -> Failure | None:
        """A run that failed as wanted if enough did, otherwise one that did not."""
        same: list[Failure | None] = []
        other: list[Failure | None] = []
        while len(same) < self.rule.needed and len(other) <= self.rule.runs - self.rule.needed:
            found = self.once.observe(candidate)
            (same if self.once.judge(found, candidate) is Verdict.SAME else other).append(found)
        return same[0] if len(same) >= self.rule.needed else other[-1]


def settings_that_matter(
    report: Callable[[Settings], Report],
    check: Check,
    candidate: Candidate,
    settings: Settings,
    *,
    is_flaky: bool,
) -> list[str]:
    """Sentences about the thread count and deterministic algorithms, where they change how often it fails.

    Deterministic algorithms are tried for flaky failures and on CUDA only: elsewhere they change nothing in a failure
    that happens every time, and switching them on loads torch's compiler. A run that breaks off says nothing.
    """
    threads = settings.num_threads or torch.get_num_threads()
    trials: list[tuple[str, Settings]] = []
    if threads > 1:
        trials.append(("with 1 thread", replace(settings, num_threads=1)))
    if is_flaky or any(tensor.is_cuda for tensor in candidate.tensors.values()):
        trials.append(("with deterministic algorithms", replace(settings, deterministic_algorithms=True)))
    runs = _SETTING_RUNS if is_flaky else 1
    found = []
    for words, changed in trials:
        reports = [report(changed) for _ in range(runs)]
        if any(one.error is not None for one in reports):
            continue
        rate = Rate.of(check, candidate, [one.observation for one in reports])
        if rate.failed == 0:
            found.append(f"{words} it does not fail ({rate} runs)")
        elif is_flaky and rate.failed == rate.runs:
            found.append(f"{words} it fails every time ({rate} runs)")
    return found
