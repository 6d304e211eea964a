"""Events of a run as people and programs get them: data, one line of text, one line of JSON.

Imports no torch: `reprokit.TrainingEvent` is part of the public API.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from reprokit.grammar import Line, Name, values_of
from reprokit.grammar import Path as FilePath
from reprokit.series.course import QUANTITIES, Alarm, EventKind
from reprokit.words import json_line, number_words, times_words

if TYPE_CHECKING:
    from reprokit.locate.failure import Failure

_MOST_BYTES = 2**20  # of a log, after which it is renamed; so two files hold about 8,000 events


class Silence(NamedTuple):
    """Something in a run that is not learned, in words, and a step that shows it; the first one of a ``dead`` layer.

    ``origin`` has the call or the line that it comes of, as far as they are known. ``name`` and ``key`` (the ``id``)
    are those of a parameter that gets no gradient. It was ``seen`` at another step, if that is given.
    """

    text: str
    place: int
    step: int
    origin: Failure
    kind: EventKind = "silent"
    name: str = ""
    key: int | None = None
    seen: int | None = None

    def event(self, severity: Literal["warning", "error"], path: Path | None = None) -> TrainingEvent:
        """The event, with the path of the file if its step was saved."""
        module = self.origin.module
        is_dead = self.kind == "dead"
        own = self.name.rpartition(".")[0] or self.name if is_dead else None
        place, begun = module if module and not module.startswith("<") else own, self.step if is_dead else None
        step, snapshot = self.step if self.seen is None else self.seen, str(path) if path is not None else None
        return TrainingEvent(self.kind, step, severity, self.text, place, begun, snapshot=snapshot)


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """Something about a run that is unlike its last 100 steps.

    ``step`` is the one whose number gave the alarm, ``began_at`` the first one off the course; both count from 0. The
    ``quantity`` had the ``value`` in that step, was ``usual`` before (the median), and may be up to ``threshold``;
    ``reference_step`` is the last healthy one. ``place`` is the module, parameter or input that it is about, if that is
    known. ``severity`` is ``error`` for what is saved, else ``warning``. ``snapshot`` is the path of the file.
    """

    kind: EventKind
    step: int
    severity: Literal["warning", "error"]
    evidence: Line
    place: Name | None = None
    began_at: int | None = None
    quantity: Name | None = None
    value: float | None = None
    usual: float | None = None
    threshold: float | None = None
    reference_step: int | None = None
    snapshot: FilePath | None = None

    def line(self) -> str:
        """The event in one line."""
        place = f" in `{self.place}`" if self.place else ""
        words = self.evidence.removeprefix(f"began at step {self.step}: ")
        return f"{self.severity}: {self.kind} at step {self.step}{place}: {words}"

    def to_json(self) -> str:
        """The event as a line of JSON; numbers that JSON does not have are texts, and what is unknown is left out."""
        return json_line({name: value for name, value in values_of(self).items() if value is not None})


def event_of(alarm: Alarm) -> TrainingEvent:
    """The event of a number that has left its course, as long as its step is not saved."""
    values = [value.number for value in alarm.values]
    words = f"the {QUANTITIES[alarm.kind]} was {number_words(values[0])}{times_words(values[0], alarm.usual)}"
    if len(values) > 1:
        highest = max(values, key=lambda number: math.inf if math.isnan(number) else number)
        words += f", and stayed off its course for {len(values)} steps up to {number_words(highest)}"
    words = f"began at step {alarm.step}: {words}"
    return TrainingEvent(alarm.kind, alarm.shown_by, "warning", words, **alarm.numbers)


class LineLog:
    """Lines in a file, such as events as JSON; the file appears with the first one.

    Any thread may add. A file that grows beyond ``most_bytes`` is renamed to ``<name>.1``, in the place of an older
    one. The function ``name`` is called for the first line: a process may learn its rank after its capture has begun.
    """

    def __init__(self, name: Callable[[], Path], most_bytes: int = _MOST_BYTES) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    @functools.cached_property
    def path(self) -> Path:
        """The file."""
        return self._name()

    def add(self, line: str) -> None:
        """Append a line; raises `OSError` if the disk says no."""
        with self._lock:
            if self.path.exists() and self.path.stat().st_size > self._most_bytes:
                os.replace(self.path, older(self.path))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def older(log: Path) -> Path:
    """The name that a log gets when it has grown too large."""
    return log.with_name(f"{log.name}.1")
