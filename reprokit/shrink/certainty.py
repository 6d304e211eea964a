"""How certain a reduction is: how often the snapshot fails again, how candidates are decided then, and the last word.

A failure that comes every time is decided by one run. Otherwise a candidate is accepted when it fails in at least
``needed`` of ``runs`` runs. Both are chosen so that a candidate that fails as often as the snapshot is refused with
probability 1% at most, and one that fails a quarter as often is accepted with probability 1% at most. "As often" is the
lower end of the Wilson score interval of the measured rate (E. B. Wilson, "Probable Inference, the Law of Succession,
and Statistical Inference", JASA 22, 1927); the two errors are exact binomial tails. The result is run again in the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit.errors import Flaky, NotReproduced
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import Report, Task
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.signature import SignatureCheck, Verdict

ERROR = 0.01  # the probability that a decision is wrong
MAX_RUNS = 60
MEASURED_RUNS = 30
_RARE = 0.25
_Z = 2.3263478740408408  # the one-sided 99% quantile of the normal distribution
_SETTING_RUNS = 8
REPLAYS = 5  # one bad run among them tells a flaky failure
MIN_REPLAYS = 3  # of slow snapshots
_SLOW_REPLAY = 0.4  # seconds; five such runs would be half of the time to a first repro


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of the runs failed as recorded."""

    failed: int
    runs: int

    @classmethod
    def of(cls, check: SignatureCheck, candidate: Candidate, seen: Sequence[Failure | None]) -> Rate:
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

    once: SignatureCheck
    rule: Rule

    def __call__(self, candidate: Candidate) -> Failure | None:
        """A run that failed as wanted if enough did, otherwise one that did not."""
        same: list[Failure | None] = []
        other: list[Failure | None] = []
        while len(same) < self.rule.needed and len(other) <= self.rule.runs - self.rule.needed:
            found = self.once(candidate)
            (same if self.once.judge(found, candidate) is Verdict.SAME else other).append(found)
        return same[0] if len(same) >= self.rule.needed else other[-1]


def settings_that_matter(
    report: Callable[[Settings], Report],
    check: SignatureCheck,
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
        seen = [one.observation for one in reports]
        if any(one.error is not None for one in reports) or Verdict.INVALID in (
            check.judge(o, candidate) for o in seen
        ):
            continue
        rate = Rate.of(check, candidate, seen)
        if rate.failed == 0:
            found.append(f"{words} it does not fail ({rate} runs)")
        elif is_flaky and rate.failed == rate.runs:
            found.append(f"{words} it fails every time ({rate} runs)")
    return found


@dataclass
class Certainty:
    """The failure in question, and how it is recognised.

    ``is_own_check`` says that candidates run by ``check`` and not by something that the caller gave. For a failure
    that is only sometimes there, ``rule`` says how candidates are decided and ``steps`` are the best so far. ``notes``
    are sentences for the user. ``seconds`` is what the latest run of the snapshot took.
    """

    oracle: Oracle
    isolation: Isolation
    check: SignatureCheck
    settings: Settings
    is_own_check: bool
    failure: Failure
    rule: Rule | None = None
    reproduces: str = ""
    notes: list[str] = field(default_factory=list)
    steps: list[Candidate] = field(default_factory=list)
    seconds: float = 0.0

    def establish(
        self, whole: Candidate, on_rate: Callable[[Rate], None], first: Sequence[Failure | None] = ()
    ) -> None:
        """Measure and report how often the whole program fails. Raises `NotReproduced` when it never does, and `Flaky`
        when too seldom. ``first`` are failing runs that selected ``whole``: they count only if all others fail, too.
        """
        seen = self._runs(whole, REPLAYS, first)
        if not self.check.is_settled:
            self._adopt(seen, whole)
        rate = Rate.of(self.check, whole, seen)
        if 0 < rate.failed < rate.runs:
            seen = seen[len(first) :]  # these would raise the rate
            seen += self._runs(whole, MEASURED_RUNS - len(seen))
            rate = Rate.of(self.check, whole, seen)
        self.reproduces = str(rate)
        on_rate(rate)
        found = next((f for f in (*first, *seen) if f is not None and self._is_same(f, whole)), None)
        if found is None:
            raise NotReproduced(
                "the snapshot does not fail again",
                hint="was it made with another torch or device?",
                note=_told(seen),
            )
        self.oracle.start = (whole, found)
        if rate.failed < rate.runs:
            self._decide_by_rule(rate, whole)

    def accepted(self, candidate: Candidate) -> None:
        """A candidate became the best one."""
        if self.rule is not None:
            self.steps.append(candidate)

    def confirmed(self, best: Candidate) -> tuple[Candidate, bool]:
        """The result after a last look, and whether nothing speaks against the best candidate.

        A fresh interpreter is asked about a check of the user's and after a crash; in all other cases the repro is
        verified in clean processes. A flaky result is run again, and where chance had a hand the last step that holds
        is the result.
        """
        if self.rule is not None:
            return self._last_that_holds(best)
        self.notes += self._what_matters(best, is_flaky=False)
        if not self.isolation.is_wary:
            return best, True
        agrees = self.oracle.confirm(best)
        self.notes.append(f"a fresh interpreter gives {'the same failure' if agrees else 'something else'}")
        return best, agrees

    def _decide_by_rule(self, rate: Rate, whole: Candidate) -> None:
        """From here on decide by repeated runs."""
        rule = rule_for(rate)
        self.notes += self._what_matters(whole, is_flaky=True)
        if rule is None or not self.is_own_check:
            raise Flaky(
                f"the snapshot fails in {rate.failed} of {rate.runs} runs, too seldom to decide with confidence",
                hint="`torch.use_deterministic_algorithms(True)` may make it fail every time",
                note="; ".join([f"reproduces {rate}", *self.notes]),
            )
        self.rule = rule
        self.accepted(whole)
        self.notes.append(f"flaky: the snapshot fails in {rate} runs; a change was {rule}")
        self.isolation.change(Task.of(RepeatedCheck(self.check, rule), self.settings), rule.runs)

    def _last_that_holds(self, best: Candidate) -> tuple[Candidate, bool]:
        def observed(candidate: Candidate) -> Failure | None:
            return self.isolation.report(candidate).observation  # a run that broke off did not fail as wanted

        found = next((step for step in reversed(self.steps) if self._is_same(observed(step), step)), None)
        if found is None:
            raise Flaky("no reduction holds when it is run again", note=self.notes[-1])
        with self.isolation.observing(Task.of(self.check, self.settings)):
            rate = Rate.of(self.check, found, [observed(found) for _ in range(MEASURED_RUNS)])
        self.notes.append(f"the result fails in {rate} runs")
        return found, found is best

    def _what_matters(self, candidate: Candidate, *, is_flaky: bool) -> list[str]:
        """Sentences about settings of torch that decide whether it fails."""
        if not self.is_own_check:
            return []

        def report(settings: Settings) -> Report:
            with self.isolation.observing(Task.of(self.check, settings)):
                return self.isolation.report(candidate)

        return settings_that_matter(report, self.check, candidate, self.settings, is_flaky=is_flaky)

    def _runs(self, whole: Candidate, times: int, first: Sequence[Failure | None] = ()) -> list[Failure | None]:
        """So many runs, fewer when they are slow."""
        seen = list(first)
        while len(seen) < times:
            started = time.monotonic()
            seen.append(self.oracle.failure(whole))
            complaint = self.check.complaint(seen[-1])
            if complaint is not None:
                raise complaint
            self.seconds = time.monotonic() - started
            if len(seen) >= MIN_REPLAYS and times == REPLAYS and self.seconds > _SLOW_REPLAY:
                break
        return seen

    def _adopt(self, seen: list[Failure | None], whole: Candidate) -> None:
        """Take the first failure of the check's kind for the one in question."""
        found = next((failure for failure in seen if failure is not None and self.check.recognises(failure)), None)
        if found is None:
            raise NotReproduced(
                f"the check `{self.check.spec}` does not fail on the snapshot",
                hint="leave out `--check` to reduce the failure that was captured",
                note=_told(seen),
            )
        self.failure = found
        self.check = self.oracle.predicate = self.check.adopted(found, whole)
        if self.is_own_check:
            self.isolation.change(Task.of(self.check, self.settings))

    def _is_same(self, observation: Failure | None, candidate: Candidate) -> bool:
        return self.check.judge(observation, candidate) is Verdict.SAME


def _told(outcomes: list[Failure | None]) -> str:
    """What happened instead, in a few words."""
    failure = next((found for found in outcomes if found is not None), None)
    if failure is None:
        return "nothing goes wrong in a replay"
    return f"a replay gives {failure.kind} from `{failure.call or failure.input_name}` in the {failure.phase} phase"
