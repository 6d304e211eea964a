"""The course of one number of a run, such as its loss: its last 100 values, and when a value has left them.

A value is off the course if it lies more than `SPREADS` spreads above the median of the last values. The spread is the
median absolute deviation, scaled to the standard deviation of a normal distribution, and at least a share of what the
run has shown; a fall that goes on through all of these values does not count. Numbers above zero are compared as
logarithms. One value says little: an alarm needs several in a row, and one of them above everything that the run has
had so far. Needs no torch.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

Severity = Literal["warning", "error"]

LENGTH = 100  # steps that a value is compared with
LEAST = 16  # steps before any value is compared: the first ones of a run change fastest
_EVERY = 25  # steps after which the limit is computed again, which takes 20 to 90 us; sooner in a young run
_PARTS = 4  # of the last values: the limit of a young run is learned again after one, and a fall shows in all
SPREADS = 8.0  # of a normal distribution nothing lies that far; of one with heavy tails a single value may
_GROWN = 1.3  # times as large as it was, a spread has grown
HIGH = 4.0  # spreads from which a step belongs to a rise that is known to go on
USUAL = 2.0  # spreads up to which a step is one to compare with; the steps of a slow rise look like one another
_BEYOND = 2.0  # spreads by which an alarm exceeds the highest value so far
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_LEAST_RATIO = 0.1  # of the spread of logarithms: losses of full batches hardly vary
OF_NORMS = 0.3  # the same of gradient norms and updates, which vary more
LEAST_PLAYED = 8  # healthy steps that a played number is compared with
_GAP = 8  # steps before a number that it is not compared with: a slow rise would be its own reference
_RECENT = 32  # of them: numbers of a run drift, and those of its first steps are far above all others
_LEAST_SHARE = 0.05  # of the range of a window with numbers below zero
_LASTING = 10  # steps off the course without going beyond the highest value, after which that is worth a warning
_REGIME = 50  # steps after which the new values are the run's course
_ALONE = 30.0  # spreads of a single value that comes back at once and is worth a warning
_RISE = 1.5  # a learning rate so many times its median explains a loss that rises within what it was before
_LARGEST = sys.float_info.max


class Value(NamedTuple):
    """The number of one step: ``place`` counts the steps of all optimizers, ``step`` is the iteration."""

    place: int
    step: int
    number: float


@dataclass(frozen=True, slots=True)
class Departure:
    """A number that has left its course: the ``values`` off it in a row, the last one of now, and what was usual.

    ``limit`` is the highest number on the course, ``healthy`` the last usual value. ``is_over``: the number has come
    back.
    """

    severity: Severity
    values: tuple[Value, ...]
    usual: float
    limit: float
    healthy: Value
    is_over: bool = False

    @property
    def began(self) -> Value:
        """The first value off the course."""
        return self.values[0]

    @property
    def peak(self) -> Value:
        """The highest value, a NaN above all."""
        return max(self.values, key=lambda value: math.inf if math.isnan(value.number) else value.number)


@dataclass(frozen=True, slots=True)
class Band:
    """The usual value and the spread of a series, both of logarithms if ``is_log``."""

    center: float
    spread: float
    is_log: bool

    @classmethod
    def of(cls, numbers: Sequence[float], least_ratio: float = _LEAST_RATIO) -> Band:
        """The band of finite numbers, of which there is at least one."""
        is_log = min(numbers) > 0
        values = list(map(math.log, numbers)) if is_log else list(numbers)
        center = _median(values)
        spread = _NORMAL * _median(_deviations(values, center))
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


@dataclass
class Course:
    """Follows one number. ``persistence`` is how many values in a row have to be off for an alarm.

    ``limit`` is the highest number on the course; the largest float until enough is known.
    """

    persistence: int = 3
    least_ratio: float = _LEAST_RATIO
    limit: float = _LARGEST
    band: Band = field(default_factory=lambda: Band(0.0, 1.0, False))
    _window: deque[Value] = field(default_factory=lambda: deque(maxlen=LENGTH))
    _numbers: array[float] = field(default_factory=lambda: array("d"))  # of the window: all in a few cache lines
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH))
    _highest: float = -math.inf
    _lowest: float = math.inf
    _streak: list[Value] = field(default_factory=list)
    _rose: bool = False
    _is_told: bool = False
    _left: int = LEAST
    _every: int = _EVERY
    _high: float = math.inf
    _low: float = -math.inf
    _is_old: bool = False

    def add(self, place: int, step: int, number: float, rate: float | None = None) -> Departure | None:
        """Take the number of a step, and the learning rate it was made with; a departure if there is one to report."""
        if number > self._high and self._is_old:  # the median of long ago must not decide
            self._learn()
        if number <= self.limit:
            departure = self._come_back() if self._streak else None
            self._window.append(Value(place, step, number))
            self._numbers.append(number)
            if rate is not None:
                self._rates.append(rate)
            if number > self._highest:
                self._highest = number
            if number < self._lowest:
                self._lowest = number
            if number < self._low and self._left > _EVERY:
                self._left = _EVERY
            self._left -= 1
            self._is_old = True
            if not self._left:
                self._learn()
            return departure
        return self._leave(Value(place, step, number), rate)

    @property
    def pending(self) -> Departure | None:
        """The values off the course so far, if there are any that no departure was made of; for a failure that comes
        before there are enough of them."""
        return self._departure("error") if self._streak and not self._is_told else None

    def _learn(self) -> None:
        """Compute the limit from the last values; less often while the course is steady.

        Any value above the new limit is above the old `HIGH` then, where a value makes the course learn, so none was
        missed in between; and the spread has not grown, as it does in a window where values fall.
        """
        del self._numbers[:-LENGTH]
        before, high = self.band, self._high
        self.band = Band.of(self._numbers, self.least_ratio)
        self.limit = self.band.number(SPREADS)
        self._high, self._low = self.band.number(HIGH), self.band.number(-HIGH)
        is_full = len(self._window) == LENGTH
        is_steady = is_full and self.limit >= high and self.band.spread <= _GROWN * before.spread
        self._every = min(2 * self._every, LENGTH) if is_steady else _EVERY
        self._left, self._is_old = self._every if is_full else len(self._window) // _PARTS, False

    def _leave(self, value: Value, rate: float | None) -> Departure | None:
        streak = self._streak
        streak.append(value)
        if rate is not None and len(self._rates) >= LEAST:
            self._rose = self._rose or rate > _RISE * _median(self._rates)
        if len(streak) > _REGIME:
            self._adopt()
            return None
        if self._is_told or len(streak) < self.persistence or self.limit == _LARGEST:
            return None
        if self._is_beyond(self._peak()):
            self._is_told = True
            return self._departure("error")
        if len(streak) == _LASTING and not self._rose:
            self._is_told = True
            return self._departure("warning")
        return None

    def _come_back(self) -> Departure | None:
        """End a streak; a single value far off the course is a warning."""
        peak = self._peak()
        is_new = not self._is_told and not self._rose and self.limit < _LARGEST
        is_far = is_new and self.band.spreads(peak) > _ALONE and self._is_beyond(peak)
        departure = self._departure("warning", is_over=True) if is_far else None
        if math.isfinite(peak):
            self._highest = max(self._highest, peak)
        self._forget_streak()
        return departure

    def _adopt(self) -> None:
        """Make a long streak of values the new course."""
        finite = [value for value in self._streak if math.isfinite(value.number)]
        self._window.clear()
        del self._numbers[:]
        self._forget_streak()
        self.limit, self._high, self._low, self._left = _LARGEST, math.inf, -math.inf, LEAST
        for value in finite:
            self._highest, self._lowest = max(self._highest, value.number), min(self._lowest, value.number)
            self._window.append(value)
            self._numbers.append(value.number)
        if len(finite) >= LEAST:
            self._learn()

    def _forget_streak(self) -> None:
        self._streak = []
        self._rose = self._is_told = False

    def _peak(self) -> float:
        return max(math.inf if math.isnan(value.number) else value.number for value in self._streak)

    def _is_beyond(self, number: float) -> bool:
        """True if a number is clearly above the highest one so far."""
        if self.band.is_log and self._lowest > 0:
            return self.band.spreads(number) > self.band.spreads(self._highest) + _BEYOND
        return number > self._highest + (self._highest - self._lowest)

    def _departure(self, severity: Severity, *, is_over: bool = False) -> Departure:
        """The streak, with the values right before it that were already high, as with a number that grows slowly."""
        values, before, limit = list(self._streak), list(self._window), self.limit
        while len(before) > 1 and self.band.spreads(before[-1].number) > HIGH:
            values.insert(0, before.pop())
            limit = self.band.number(HIGH)
        usual = (value for value in reversed(before) if self.band.spreads(value.number) <= USUAL)
        healthy = next(usual, before[-1] if before else values[0])
        return Departure(severity, tuple(values), self.band.number(0.0), limit, healthy, is_over)


# -- numbers of steps that were played -----------------------------------------------------------------------------


def band_before(numbers: Sequence[float | None], position: int) -> Band | None:
    """The course of the numbers before a position, without the last ones if there are enough others; ``None`` where
    they are too few."""
    older, before = _known(numbers[: max(position - _GAP, 0)]), _known(numbers[:position])
    before = older if len(older) >= LEAST_PLAYED else before
    return Band.of(before[-_RECENT:], OF_NORMS) if len(before) >= LEAST_PLAYED else None


def is_off(numbers: Sequence[float | None], position: int, limit: float = SPREADS) -> bool:
    """True if the number of a step is so many spreads above the course of those before."""
    value = numbers[position] if position >= LEAST_PLAYED else None
    band = band_before(numbers, position) if value is not None else None
    return value is not None and band is not None and band.spreads(value) > limit


def first_off(numbers: Sequence[float | None]) -> int | None:
    """The position from which on all numbers are high, and the last ones off the course of those before.

    ``None`` if the last one is not off.
    """
    first, limit = None, SPREADS
    for position in range(len(numbers) - 1, LEAST_PLAYED - 1, -1):
        if not is_off(numbers, position, limit):
            break
        first, limit = position, HIGH
    return first


def stays_off(numbers: Sequence[float], position: int) -> bool:
    """True if all numbers from a position on are off the course of those before, of which there may be few: these say
    nothing about how much they vary."""
    before = sorted(value for value in numbers[:position] if math.isfinite(value))
    if not before or before[(len(before) - 1) // 2] <= 0:
        return False
    known = _known(numbers[:position])
    is_enough = len(known) >= LEAST_PLAYED
    band = Band.of(known[-_RECENT:], OF_NORMS) if is_enough else Band(math.log(_median(known)), OF_NORMS, True)
    return all(not math.isfinite(value) or band.spreads(value) > SPREADS for value in numbers[position:])


def _known(numbers: Sequence[float | None]) -> list[float]:
    return [value for value in numbers if value and math.isfinite(value)]


def _deviations(values: Sequence[float], center: float) -> list[float]:
    """Distances from the center; for a series that falls from quarter to quarter, from the median of the quarter.

    The fall itself says nothing about how much the values vary.
    """
    if len(values) >= LEAST:
        ends = [len(values) * part // _PARTS for part in range(_PARTS + 1)]
        parts = [values[begin:end] for begin, end in pairwise(ends)]
        medians = [_median(part) for part in parts]
        if all(later < before for before, later in pairwise(medians)):
            return [abs(value - median) for part, median in zip(parts, medians, strict=True) for value in part]
    return [abs(value - center) for value in values]


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
