"""What the reducer reports while it works. Views (a live display, plain lines, JSON lines) turn events into text."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, cast

from reprokit.words import counted


class Event:
    """Something that happened in a reduction or a table; its text is one line."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Started(Event):
    """Work begins on a program of this size; the budget is in seconds and checks, ``None`` without one."""

    calls: int
    elements: int
    max_time: float | None = None
    max_checks: int | None = None

    def __str__(self) -> str:
        limits = [f"{self.max_time:g} s"] if self.max_time is not None else []
        limits += [counted(self.max_checks, "check")] if self.max_checks is not None else []
        budget = f", at most {' and '.join(limits)}" if limits else ""
        return f"start: {_size(self)}{budget}"


@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """The snapshot was run again; ``failed`` of ``times`` runs failed as recorded."""

    failed: int
    times: int

    def __str__(self) -> str:
        return f"replay: {self.failed}/{self.times} runs fail as recorded"


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """An earlier reduction of this snapshot is gone on from."""

    calls: int
    elements: int
    checks: int

    def __str__(self) -> str:
        return f"resumed after {counted(self.checks, 'check')}: {_size(self)} left"


@dataclass(frozen=True, slots=True)
class ExecutorLost(Event):
    """The executor failed in this way; from here on candidates run on this machine."""

    trouble: str

    def __str__(self) -> str:
        return f"the executor failed ({self.trouble}); the reduction goes on on this machine"


@dataclass(frozen=True, slots=True)
class PassStarted(Event):
    """A pass begins in a round (counted from 1, 0 for the cut before the first) with what is left."""

    name: str
    round: int
    calls: int
    elements: int

    def __str__(self) -> str:
        return f"{place_of(self)}: {_size(self)} left"


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """A candidate was run: what it would leave, and the verdict."""

    number: int
    calls: int
    elements: int
    verdict: str
    change: str

    def __str__(self) -> str:
        return f"check {self.number}: {self.change}: {self.verdict} ({_size(self)})"


@dataclass(frozen=True, slots=True)
class Improved(Event):
    """A candidate became the best one so far."""

    calls: int
    elements: int
    change: str

    def __str__(self) -> str:
        return f"kept: {self.change}: {_size(self)} left"


@dataclass(frozen=True, slots=True)
class PassEnded(Event):
    """A pass is through: its checks, the changes it kept, and what is left. ``is_over``: its budget is spent."""

    name: str
    round: int
    checks: int
    successes: int
    calls: int
    elements: int
    is_over: bool = False

    def __str__(self) -> str:
        done = f"{self.successes:,} of {counted(self.checks, 'check')} kept"
        end = "; budget spent" if self.is_over else ""
        return f"{place_of(self)}: {done}, {_size(self)} left{end}"


@dataclass(frozen=True, slots=True)
class Varied(Event):
    """A variant of the result was run to explain it."""

    number: int
    verdict: str
    change: str

    def __str__(self) -> str:
        return f"variant {self.number}: {self.change}: {self.verdict}"


@dataclass(frozen=True, slots=True)
class Written(Event):
    """The first repro is on disk, before any run has verified it."""

    path: str
    lines: int

    def __str__(self) -> str:
        return f"{counted(self.lines, 'line')}, verification has not run yet -> {self.path}"


@dataclass(frozen=True, slots=True)
class ContextStarted(Event):
    """The search for the piece of the model begins, for so many seconds at most."""

    seconds: float

    def __str__(self) -> str:
        return f"context: the piece of the model that shows the failure, for {self.seconds:.0f} s at most"


@dataclass(frozen=True, slots=True)
class ContextChecked(Event):
    """A piece of the model was run as a context; a number of its own."""

    number: int
    verdict: str
    change: str

    def __str__(self) -> str:
        return f"context {self.number}: {self.change}: {self.verdict}"


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The search is over. ``stopped`` says why it ended before everything was tried, and ``untried`` what was not."""

    calls: int
    elements: int
    checks: int
    one_minimal: bool
    stopped: str | None = None
    untried: tuple[str, ...] = ()

    def __str__(self) -> str:
        end = "nothing more can go" if self.one_minimal else "stopped early" if self.stopped else "done"
        return f"{end}: {_size(self)} after {counted(self.checks, 'check')}"


@dataclass(frozen=True, slots=True)
class Comparing(Event):
    """The result is run in other precisions, compiled and so on, for so many seconds at most."""

    seconds: float

    def __str__(self) -> str:
        return f"running the result in other ways, for {self.seconds:g} s at most (--no-whatif leaves this out)"


@dataclass(frozen=True, slots=True)
class Compared(Event):
    """A program was run in another way: what came out, by its name and in words."""

    program: str
    variant: str
    answer: str
    words: str

    def __str__(self) -> str:
        return f"{self.program}, {self.variant}: {self.words}"


@dataclass(frozen=True, slots=True)
class Writing(Event):
    """The results are rendered and verified; ``is_early`` when the user stopped the search."""

    is_early: bool

    def __str__(self) -> str:
        if self.is_early:
            return "interrupted: writing the best so far; Ctrl-C again ends at once"
        return "writing the results and verifying them in clean processes"


def _size(event: Started | Resumed | PassStarted | Checked | Improved | PassEnded | Finished) -> str:
    return f"{counted(event.calls, 'call')}, {counted(event.elements, 'element')}"


def place_of(event: PassStarted | PassEnded) -> str:
    """The pass, with its round if it is part of one."""
    return f"round {event.round}, {event.name}" if event.round else event.name


def as_plain(event: Event) -> dict[str, Any]:
    """An event as plain data; ``event`` names its kind, such as ``pass_started``."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    return {"event": kind, **asdict(cast(Any, event))}
