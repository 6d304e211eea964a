"""What the reducer reports while it works. Views (a live display, plain lines, JSON lines) turn events into text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replayed:
    """The snapshot was run again; ``failed`` of ``times`` runs failed as recorded."""

    failed: int
    times: int

    def __str__(self) -> str:
        return f"replay: {self.failed}/{self.times} runs fail as recorded"


@dataclass(frozen=True, slots=True)
class PassStarted:
    """A pass begins in a round (counted from 1) with what is left."""

    name: str
    round: int
    calls: int
    elements: int

    def __str__(self) -> str:
        return f"round {self.round}, {self.name}: {self.calls} calls, {self.elements:,} elements left"


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate was run: what it would leave, and the verdict."""

    number: int
    calls: int
    elements: int
    verdict: str
    change: str

    def __str__(self) -> str:
        return f"check {self.number}: {self.change}: {self.verdict} ({self.calls} calls, {self.elements:,} elements)"


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more can go (or, if not ``one_minimal``, the budget is spent)."""

    calls: int
    elements: int
    checks: int
    one_minimal: bool

    def __str__(self) -> str:
        end = "nothing more can go" if self.one_minimal else "stopped early"
        return f"{end}: {self.calls} calls, {self.elements:,} elements after {self.checks} checks"


Event = Replayed | PassStarted | Checked | Finished
