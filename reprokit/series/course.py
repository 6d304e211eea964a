"""The course of a number of a run, such as its loss, and when its values have left it. Needs no torch.

One rule, of steps as they run (`Course`) and of those that were played (`band_before`): a value is off the course if it
lies more than `SPREADS` spreads above the median of the values before. The spread is the median absolute deviation,
scaled to the standard deviation of a normal distribution, and at least a share of what the run has shown; a fall that
goes on through all of these values does not count. Numbers above zero are compared as logarithms. One value says
little: an alarm needs several in a row, and one of them above everything that the run has had so far.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from statistics import median_high
from typing import Any, Literal, NamedTuple

EventKind = Literal["spike", "explosion", "dead", "scale", "change", "silent"]
QUANTITIES: Mapping[EventKind, str] = {"spike": "loss", "explosion": "gradient norm", "scale": "scale"}

LENGTH = 100  # steps that a value is compared with
LEAST = 16  # steps before any value is compared: the first ones of a run change fastest
_EVERY = 50  # steps after which the limit is computed again, which takes 20 to 90 us; sooner in a young run
_PARTS = 4  # of the last values: the limit of a young run is learned again after one, and a fall shows in all
SPREADS = 8.0  # of a normal distribution nothing lies that far; of one with heavy tails a single value may
HIGH = 4.0  # spreads from which a step belongs to a rise that is known to go on
USUAL = 2.0  # spreads up to which a step is one to compare with; the steps of a slow rise look like one another
_BEYOND = 2.0  # spreads by which an alarm exceeds the highest value so far
_ALONE = 1000.0  # times the highest loss so far: one value is enough, such as a code for a missing label in a batch
_LEAST_ALONE = 4  # values before such a one
_LONE = 5.0  # times the highest so far: a value that bad data explain, if they are there
LEVEL = 12  # values off the course in a row: it has another level
_LEAST_LEVEL = 6  # of these, before what is off the course is back on it: another task is learned
_ONCE = 10.0  # times the first of them: a number that goes on rising
_STAYS = 1.5  # times the highest of the first half of them: a run that diverges grows by more
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
OF_LOSSES = 0.1  # the least spread of logarithms: losses of full batches hardly vary
OF_NORMS = 0.3  # the same of gradient norms and updates, which vary more
LEAST_PLAYED = 8  # healthy steps that a played number is compared with
_GAP = 8  # steps before a number that it is not compared with: a slow rise would be its own reference
_RECENT = 32  # of them: numbers of a run drift, and those of its first steps are far above all others
_LEAST_SHARE = 0.05  # of the range of a window with numbers below zero
_FALLS = 6  # of a scale in a row; a scaler that has grown its scale once too often makes one or two
_SETTLED = 20  # steps in which a grad scaler looks for its first scale


class Value(NamedTuple):
    """The number of one step: ``place`` counts the steps of all optimizers, ``step`` is the iteration."""

    place: int
    step: int
    number: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """A number that has left its course."""

    kind: EventKind
    values: tuple[Value, ...]  # off the course, in a row
    usual: float
    limit: float  # the highest number on the course
    healthy: Value  # the last usual one
    shown_by: int  # the step of now
    is_beyond: bool = True  # it is above all that the run has had

    @property
    def place(self) -> int:
        """The place of the step where it began, among those of all optimizers."""
        return self.values[0].place

    @property
    def step(self) -> int:
        """The step where it began."""
        return self.values[0].step

    @property
    def numbers(self) -> dict[str, Any]:
        """What is known of the event, by the names that it has in a `TrainingEvent` and in a file."""
        values = {"value": self.values[0].number, "usual": self.usual, "threshold": self.limit}
        return {"quantity": QUANTITIES[self.kind], **values, "began_at": self.step, "reference_step": self.healthy.step}


@dataclass(frozen=True, slots=True)
class Band:
    """The usual value and the spread of a series, both of logarithms if ``is_log``."""

    center: float
    spread: float
    is_log: bool

    @classmethod
    def of(cls, numbers: Sequence[float], least_ratio: float) -> Band:
        """The band of finite numbers, of which there is at least one."""
        is_log = min(numbers) > 0
        values = list(map(math.log, numbers)) if is_log else list(numbers)
        center = median_high(values)
        spread = _NORMAL * median_high(_deviations(values, center))
        least = least_ratio if is_log else max(_LEAST_SHARE * (max(values) - min(values)), sys.float_info.min)
        return cls(center, max(spread, least), is_log)

    def number(self, spreads: float) -> float:
        """The number so many spreads above the usual one."""
        value = self.center + spreads * self.spread
        return math.exp(min(value, 709.0)) if self.is_log else value  # exp(709) is the largest power of a float

    def spreads(self, number: float) -> float:
        """By how many spreads a number is above the usual one."""
        if math.isnan(number):
            return math.inf
        if self.is_log:
            number = math.log(number) if number > 0 else -math.inf
        return (number - self.center) / self.spread


class Course:
    """Follows one number; ``persistence`` is how many values in a row have to be off for an alarm."""

    def __init__(self, kind: EventKind = "spike", persistence: int = 3, least_ratio: float = OF_LOSSES) -> None:
        self._kind = kind
        self._persistence = persistence
        self._least_ratio = least_ratio
        # None until enough is known
        self._band: Band | None = None
        # The numbers at `SPREADS` and `HIGH`
        self._limit = self._high = math.inf
        self._window: deque[Value] = deque(maxlen=LENGTH)
        # Values of the window since the limit was computed
        self._num_new = 0
        # On the course, of the whole run
        self._highest, self._lowest = -math.inf, math.inf
        # The last values, if they are off the course, and whether an alarm was made of them
        self._streak: list[Value] = []
        self._is_told = False

    def add(self, place: int, step: int, number: float) -> Alarm | None:
        """Take the number of a step; an alarm if there is one to report."""
        value, alarm = Value(place, step, number), None
        is_single = self._kind == "spike" and number < math.inf and self._lowest > 0
        is_alone = is_single and number > _ALONE * self._highest
        if is_alone and self._band is None:
            self._learn(_LEAST_ALONE)
        elif number > self._high and self._num_new and not self._streak:  # not the median of long ago
            self._learn()
        if number <= self._limit and number < math.inf:
            self._return_to_course(number)
        else:
            alarm = self._leave_course(value, is_single, is_alone)
        if math.isfinite(number):
            self._window.append(value)
            self._num_new += 1
        # in a streak late: it is no spread, but a long one is the run's new course
        is_slow = len(self._window) == LENGTH or self._streak
        if self._num_new >= (_EVERY if is_slow else max(LEAST, len(self._window)) // _PARTS):
            self._learn()
        return alarm

    def _return_to_course(self, number: float) -> None:
        peak = _peak(self._streak)  # fewer values than an alarm takes, and the number has come back
        self._highest = max(self._highest, number, peak if math.isfinite(peak) else number)
        self._lowest = min(self._lowest, number)
        self._streak, self._is_told = [], False

    def _leave_course(self, value: Value, is_single: bool, is_alone: bool) -> Alarm | None:
        """Take a value off the course; ``is_single``: one may be enough for an alarm, ``is_alone``: this one is."""
        if len(self._streak) < LENGTH:  # a run may go on with nan
            self._streak.append(value)
        if self._band is None or self._is_told:
            return None
        length = len(self._streak)
        is_several = is_alone or length >= self._persistence
        self._is_told = is_several and self._is_beyond(self._band, _peak(self._streak))
        is_lone = length == 1 and is_single and value.number > _LONE * self._highest
        is_shown = self._is_told or is_lone or length in (self._persistence, LEVEL)
        return replace(self._alarm(), is_beyond=self._is_told) if is_shown else None

    def is_level(self, alarm: Alarm) -> bool | None:
        """True if the number has jumped once and stays there, or is learned anew, as at another task; ``None`` as long
        as that cannot be known."""
        values = [value for value in self._window if value.place >= alarm.place]
        is_log = alarm.usual > 0 and alarm.values[0].number < math.inf
        between = math.sqrt(alarm.usual * alarm.values[0].number) if is_log else -math.inf  # a few odd batches end
        off = list(takewhile(lambda value: value.number > max(self._limit, between), values))[:LEVEL]
        if len(off) < _LEAST_LEVEL:
            return None if len(off) == len(values) else False
        if len(off) == len(values) < LEVEL:
            return None
        first, last = (max(value.number for value in part) for part in (off[: len(off) // 2], off[len(off) // 2 :]))
        is_known = self._lowest <= 0 or first <= min(_ONCE * off[0].number, _ALONE * self._highest)
        return is_known and last <= _STAYS * first

    @property
    def pending(self) -> Alarm | None:
        """The values off the course so far, if there are any that no alarm was made of; for a failure that comes
        before there are enough of them."""
        return self._alarm() if self._streak and not self._is_told else None

    def _learn(self, least: int = LEAST) -> None:
        if len(self._window) >= least:
            self._band = Band.of([value.number for value in self._window], self._least_ratio)
            self._limit, self._high = self._band.number(SPREADS), self._band.number(HIGH)
            self._num_new = 0

    def _is_beyond(self, band: Band, number: float) -> bool:
        """True if a number is clearly above the highest one so far."""
        if band.is_log and self._lowest > 0:
            return band.spreads(number) > band.spreads(self._highest) + _BEYOND
        return number > self._highest + (self._highest - self._lowest)

    def _alarm(self) -> Alarm:
        """The streak, with the values right before it that were already high, as with a number that grows slowly."""
        band = self._band or Band(0.0, 1.0, False)
        values, limit = list(self._streak), self._limit
        before = [value for value in self._window if value.place < values[0].place]
        while len(before) > 1 and band.spreads(before[-1].number) > HIGH:
            values.insert(0, before.pop())
            limit = band.number(HIGH)
        usual = (value for value in reversed(before) if band.spreads(value.number) <= USUAL)
        healthy = next(usual, before[-1] if before else values[0])
        return Alarm(self._kind, tuple(values), band.number(0.0), limit, healthy, values[-1].step)


class ScaleFalls:
    """The course of the scale of a grad scaler: it has left it when it falls many times in a row after it had settled.
    The first one of the values is of the step before it fell, whose gradients have overflowed."""

    pending: Alarm | None = None  # a failure of now stands for no falls

    def __init__(self) -> None:
        self._num_steps = 0
        self._healthy: Value | None = None
        self._values: list[Value] = []

    def add(self, place: int, step: int, number: float) -> Alarm | None:
        """Take the scale of a step."""
        values, self._num_steps = self._values, self._num_steps + 1
        if self._num_steps <= _SETTLED or number >= values[-1].number:
            self._healthy = values[-1] if values else None
            values.clear()
        values.append(Value(place, step, number))
        if len(values) != _FALLS + 1:
            return None
        first = values[0]
        return Alarm("scale", tuple(values), first.number, first.number, self._healthy or first, step)


# -- numbers of steps that were played -----------------------------------------------------------------------------


def band_before(numbers: Sequence[float | None], position: int, least: int = LEAST_PLAYED) -> Band | None:
    """The course of the numbers before a position, without the last ones if there are enough others; ``None`` where
    they are fewer than ``least``, or few are above zero. Very few say nothing about how much they vary."""
    finite = [number for number in numbers[:position] if number is not None and math.isfinite(number)]
    known = [number for number in finite if number > 0]
    if len(known) < least or 2 * len(known) < len(finite):
        return None
    if len(known) < LEAST_PLAYED:
        return Band(math.log(median_high(known)), OF_NORMS, True)
    return Band.of((known[:-_GAP] if len(known) >= LEAST_PLAYED + _GAP else known)[-_RECENT:], OF_NORMS)


def is_off(numbers: Sequence[float | None], position: int, limit: float = SPREADS) -> bool:
    """True if the number of a step is so many spreads above the course of those before."""
    value, band = (numbers[position], band_before(numbers, position)) if position >= 0 else (None, None)
    return value is not None and band is not None and band.spreads(value) > limit


def first_off(numbers: Sequence[float | None]) -> int | None:
    """The position from which on all numbers are high, and the last ones off the course of those before.

    ``None`` if the last one is not off.
    """
    first, limit = None, SPREADS
    for position in range(len(numbers) - 1, -1, -1):
        if not is_off(numbers, position, limit):
            break
        first, limit = position, HIGH
    return first


def _peak(values: Iterable[Value]) -> float:
    """The highest number, a NaN above all."""
    return max((math.inf if math.isnan(value.number) else value.number for value in values), default=-math.inf)


def _deviations(values: Sequence[float], center: float) -> list[float]:
    """Distances from the center; for a series that falls from quarter to quarter, from the median of the quarter.

    The fall itself says nothing about how much the values vary.
    """
    if len(values) >= LEAST:
        ends = [len(values) * part // _PARTS for part in range(_PARTS + 1)]
        parts = [values[begin:end] for begin, end in pairwise(ends)]
        medians = [median_high(part) for part in parts]
        if all(later < before for before, later in pairwise(medians)):
            return [abs(value - median) for part, median in zip(parts, medians, strict=True) for value in part]
    return [abs(value - center) for value in values]
