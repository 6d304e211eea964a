"""The options of a capture that are one of a few words, as types and as tuples; no torch, as the CLI shows them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from reprokit.capture.early.alarm import EventKind
from reprokit.errors import UsageError
from reprokit.snapshot.source import SOURCES, Source

__all__ = [
    "AFTER",
    "DEFAULT_ON",
    "DEFAULT_PERCENT",
    "EVENTS",
    "ON",
    "SOURCES",
    "WATCH",
    "After",
    "On",
    "Source",
    "Watch",
    "check_options",
    "events_in",
]

After = Literal["stop", "continue"]
Watch = Literal["sampled", "every-step"]
On = Literal["nonfinite", "exception", "skipped", "spike", "explosion", "dead", "scale", "early", "ranks"]

AFTER: tuple[After, ...] = get_args(After)
WATCH: tuple[Watch, ...] = get_args(Watch)
ON: tuple[On, ...] = get_args(On)
EVENTS: tuple[EventKind, ...] = get_args(EventKind)  # `early` is all of them
DEFAULT_PERCENT = 10.0  # of the loop's CPU time
DEFAULT_ON: tuple[On, ...] = ("nonfinite", "exception")


def events_in(on: Collection[str]) -> tuple[EventKind, ...]:
    """The kinds of events that are asked for."""
    return tuple(kind for kind in EVENTS if kind in on or "early" in on)


def check_options(
    after: str,
    history: int | None,
    watch: str,
    on: Collection[str],
    source: str = "traceback",
    budget: object = None,
    from_step: int | None = None,
) -> None:
    """Raises `UsageError` for a value that no option has."""
    chosen = (("after", after, AFTER), ("watch", watch, WATCH), ("source", source, SOURCES))
    for name, value, known in (*chosen, *(("on", item, ON) for item in on)):
        if value not in known:
            raise UsageError(f"`{name}` cannot be {value!r}", hint=f"it is one of {', '.join(map(repr, known))}")
    if history is not None and history < 0:
        raise UsageError(f"`history` cannot be {history}", hint="it is a number of steps, 0 for no copies")
    if budget not in (None, "off") and not (isinstance(budget, (int, float)) and budget > 0):
        raise UsageError(f"`budget` cannot be {budget!r}", hint='it is a percentage above 0, or "off" for no limit')
    if from_step is not None and from_step < 0:
        raise UsageError(f"`from_step` cannot be {from_step}", hint="it is the number of a step, the first one is 0")
