"""The options of a capture, which API and callbacks share, the words that some of them take, and the names of files.

Imports no torch, as the CLI shows the words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypedDict, get_args

from reprokit.errors import UsageError, ignored_errors
from reprokit.series.course import EventKind
from reprokit.series.events import TrainingEvent
from reprokit.snapshot.source import SOURCES, Source

After = Literal["stop", "continue"]
Watch = Literal["sampled", "every-step"]
On = Literal[
    "nonfinite", "exception", "skipped", "spike", "explosion", "dead", "scale", "change", "silent", "early", "ranks"
]

AFTER: tuple[After, ...] = get_args(After)
WATCH: tuple[Watch, ...] = get_args(Watch)
ON: tuple[On, ...] = get_args(On)
EVENTS: tuple[EventKind, ...] = get_args(EventKind)  # `early` is all of them
DEFAULT_PERCENT = 10.0  # of the loop's CPU time
DEFAULT_ON: tuple[On, ...] = ("nonfinite", "exception")


class Options(TypedDict, total=False):
    """The keyword arguments of `reprokit.capture` and of callbacks; `Session` says what they do."""

    name: str
    after: After
    overwrite: bool
    quiet: bool
    history: int | None
    watch: Watch
    on: Collection[str]
    source: Source
    budget: float | Literal["off"] | None
    from_step: int | None
    at_step: int | Collection[int]
    on_snapshot: Callable[[Path], object] | None
    on_event: Callable[[TrainingEvent], object] | None
    record: str | None
    on_numbers: Callable[[dict[str, float]], object] | None
    cause: bool


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


def check_steps(at_step: object) -> set[int]:
    """The steps that are asked for, as a set; raises `UsageError` for anything but numbers of steps."""
    steps = at_step if isinstance(at_step, Collection) and not isinstance(at_step, str) else [at_step]
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
        raise UsageError(f"`at_step` cannot be {at_step!r}", hint="it is a step, or several; the first one is 0")
    return set(steps)


def rank_suffix() -> str:
    """``.rank<R>`` for one of several ranks: of torch's process group, else of the environment that torchrun sets."""
    distributed = sys.modules.get("torch.distributed")
    with ignored_errors():  # of a process group that is coming or going
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return f".rank{distributed.get_rank()}" if distributed.get_world_size() > 1 else ""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    return f".rank{rank}" if rank is not None and size.isdigit() and int(size) > 1 else ""


def current_folder() -> Path:
    """The working folder; raises `UsageError` if somebody has deleted it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", hint="change to another folder") from None


def with_part(path: Path, part: str) -> Path:
    """``out.rank1.pt`` of ``out.pt`` and ``.rank1``."""
    suffix = ".repro.pt" if path.name.endswith(".repro.pt") else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}{part}{suffix}")
