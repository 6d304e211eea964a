"""How certain a reduction is: how often the snapshot fails again, how candidates are decided then, and the last word.

A failure that comes every time is decided by one run. Of one that comes only sometimes the rate is measured and stated,
and a candidate counts if most of five runs fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reprokit.errors import Flaky, NotReproduced
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.program.step import Step
from reprokit.shrink.apart import Isolation, Task
from reprokit.shrink.checks.check import Check, Ruling
from reprokit.shrink.oracle import Oracle

MEASURED_RUNS = 30
REPLAYS = 5  # one bad run among them tells a flaky failure
MIN_REPLAYS = 3  # of slow snapshots
_SLOW_REPLAY = 0.4  # seconds; five such runs would be half of the time to a first repro


@dataclass(frozen=True)
class Majority:
    """A check of a flaky failure: observes until most of five runs have failed as wanted, or can no longer do so."""

    once: Check

    def __call__(self, candidate: Step) -> Failure | None:
        """A run that failed as wanted if most did, otherwise one that did not."""
        seen: dict[bool, list[Failure | None]] = {True: [], False: []}
        while True:
            found = self.once(candidate)
            alike = seen[self.once.judge(found) is Ruling.SAME]
            alike.append(found)
            if len(alike) > REPLAYS // 2:
                return found


@dataclass
class Certainty:
    """The failure in question, and how it is recognised."""

    oracle: Oracle
    isolation: Isolation
    check: Check
    settings: Settings
    is_own_check: bool  # candidates run by ``check``, not by something that the caller gave
    failure: Failure
    doubt: str = ""  # why the capture could not show it either
    is_flaky: bool = False  # the failure is there only sometimes
    reproduces: str = ""
    notes: list[str] = field(default_factory=list)  # sentences for the user
    seconds: float = 0.0  # of the latest run of the snapshot

    def establish(self, whole: Step, on_rate: Callable[[int, int], None], first: Sequence[Failure | None] = ()) -> None:
        """Measure and report how often the whole program fails. Raises `NotReproduced` when it never does, and `Flaky`
        when at most half of the runs fail. ``first`` are failing runs that selected ``whole``: they count only if all
        others fail, too.
        """
        seen = self._runs(whole, REPLAYS, first)
        if self.check.wanted is None:
            self._adopt(seen, whole)
        failed = self._num_same(seen)
        if 0 < failed < len(seen):
            seen = seen[len(first) :]  # these would raise the rate
            seen += self._runs(whole, MEASURED_RUNS - len(seen))
            failed = self._num_same(seen)
        self.reproduces = f"{failed}/{len(seen)}"
        on_rate(failed, len(seen))
        found = next((f for f in (*first, *seen) if f is not None and self._num_same([f])), None)
        if found is None:
            raise self._not_reproduced(
                "the snapshot does not fail again", "was it made with another torch or device?", seen
            )
        self.oracle.start = (whole, found)
        if failed == len(seen):
            return
        if failed <= len(seen) / 2 or not self.is_own_check:
            raise Flaky(
                f"the snapshot fails in {failed} of {len(seen)} runs, too seldom to reduce it",
                hint="`torch.use_deterministic_algorithms(True)` may make it fail every time",
                note=f"reproduces {self.reproduces}",
            )
        self.is_flaky = True
        self.notes.append(f"flaky: the snapshot fails in {self.reproduces} runs; a change needs 3 failures in 5 runs")
        self.isolation.change(Task.of(Majority(self.check), self.settings), REPLAYS)

    def confirm(self, best: Step) -> bool:
        """True if nothing speaks against the result; raises `Flaky` if it never fails.

        The rate of a flaky result is measured; of any other the repro is verified in clean processes.
        """
        if self.is_flaky:
            majority = self.isolation.task
            self.isolation.change(Task.of(self.check, self.settings))
            failed = self._num_same([self.isolation.report(best).found for _ in range(MEASURED_RUNS)])
            self.isolation.change(majority)
            self.notes.append(f"the result fails in {failed}/{MEASURED_RUNS} runs")
            if not failed:
                raise Flaky("the result does not fail when it is run again", note=self.notes[0])
            return failed > MEASURED_RUNS / 2
        return True

    def _runs(self, whole: Step, times: int, first: Sequence[Failure | None] = ()) -> list[Failure | None]:
        """So many runs, fewer when they are slow."""
        seen = list(first)
        while len(seen) < times:
            started = time.monotonic()
            seen.append(self.oracle.failure(whole))
            self.seconds = time.monotonic() - started
            if len(seen) >= MIN_REPLAYS and times == REPLAYS and self.seconds > _SLOW_REPLAY:
                break
        return seen

    def _adopt(self, seen: list[Failure | None], whole: Step) -> None:
        """Take the first failure of the check's kind for the one in question."""
        found = next((failure for failure in seen if failure is not None and self.check.recognises(failure)), None)
        if found is None:
            said = f"the check `{self.check.spec}` does not fail on the snapshot"
            raise self._not_reproduced(said, "leave out `--check` to reduce the failure that was captured", seen)
        self.failure = found
        self.check = self.oracle.predicate = self.check.adopted(found, whole)
        if self.is_own_check:
            self.isolation.change(Task.of(self.check, self.settings))

    def _not_reproduced(self, message: str, hint: str, seen: list[Failure | None]) -> NotReproduced:
        """The error that no run fails, with what the capture has said of it in place of a guess."""
        doubt = f"the capture has said so: {self.doubt}" if self.doubt else ""
        return NotReproduced(
            message, hint=hint if not doubt else None, note="; ".join(filter(None, [_told(seen), doubt]))
        )

    def _num_same(self, seen: Sequence[Failure | None]) -> int:
        return sum(self.check.judge(found) is Ruling.SAME for found in seen)


def _told(outcomes: list[Failure | None]) -> str:
    """What happened instead, in a few words."""
    failure = next((found for found in outcomes if found is not None), None)
    if failure is None:
        return "nothing goes wrong in a replay"
    return f"a replay gives {failure.kind} from `{failure.call or failure.input_name}` in the {failure.phase} phase"
