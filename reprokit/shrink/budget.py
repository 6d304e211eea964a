"""Budgets: the seconds and checks that a part of the search may take, so that every reduction ends."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_SECONDS = 20.0
_TIMES_FIRST = 50
_MOST_SECONDS = 120.0  # seven passes of this length are as long as anybody waits unasked
_CHECKS = 1000


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

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s or {self.checks:,} checks"
