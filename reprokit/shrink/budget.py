"""Budgets: the seconds and checks that a part of the search may take, so that every reduction ends."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

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
class Budget:
    """What a part of the search may still take, over all rounds."""

    seconds: float
    checks: int = _CHECKS

    @classmethod
    def after(cls, seconds: float, max_time: float | None = None, max_checks: int | None = None) -> Budget:
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
