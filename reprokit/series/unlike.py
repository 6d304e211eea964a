"""What is unlike the steps before in a run that goes on: a setting that has changed for good, data of another range.

The run itself says what is usual; a change that many healthy runs make on purpose (a schedule, a term that is switched
on or off, a layer that begins to learn) is none. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from reprokit.series.cause import JUMP, Reading
from reprokit.words import counted, value_words

LEAST_BEFORE = 16  # steps of a run before a setting is taken to be constant
LEAST_AFTER = 8  # steps with one value, and then with another: an evaluation changes modes for a moment
LEAST_ALIKE = 3  # readings of a value before one can be unlike them
FAR = 1000.0  # times all values before: a code for a missing label
CLEARLY = 2.0  # times the largest of the ranges before
_BELOW_ZERO = 0.2  # of the highest value before
_OUTSIDE, _APART = 0.02, 0.25  # of shares of zeros, each and their medians: a mask that is inverted
_ZEROS = 4  # of the ways in which values are unlike
_MOST_NAMES = 2

Value = float | bool | str


@dataclass(frozen=True, slots=True)
class Shift:
    """Something is unlike before since a step: ``text`` says it behind the name. ``times``: so many times as
    large as before, of data that are no class labels."""

    name: str
    step: int
    text: str
    place: str | None = None
    times: float = 0.0


def setting(was: Value, now: Value, *, is_rate: bool = False) -> str | None:
    """That a setting which was constant has changed, ``None`` if that is what a plan looks like: a rate that falls, a
    small step, or zero that ends or begins."""
    if isinstance(was, (bool, str)) or isinstance(now, (bool, str)):
        return f"went from {was} to {now}"
    if was == 0 or now == 0:
        return None
    is_far = was * now < 0 or abs(now) > JUMP * abs(was) or (not is_rate and abs(now) * JUMP < abs(was))
    is_growth = 0.5 < was < 1 < now  # a discount or decay above one
    return f"went from {value_words(was)} to {value_words(now)}" if is_far or is_growth else None


def since(readings: Sequence[Reading], least: int = LEAST_ALIKE) -> tuple[int, str] | None:
    """The position from which on all readings of a value are unlike all before in one way, and how."""
    first = _ways(readings[:least], readings[-1]) if len(readings) > least else []
    for way, is_so in enumerate(first):
        place = len(readings) - is_so
        while is_so and place > least and _ways(readings[:least], readings[place - 1])[way]:
            place -= 1
        before, later = readings[:place], readings[place:]
        if is_so and all(_ways(before, one)[way] for one in later):
            now, was = (median(one.zeros for one in part) for part in (later, before))
            if way == _ZEROS and abs(now - was) > _APART:
                return place, f"is zero in {now:.0%} of its elements and was in {was:.0%}"
            if way != _ZEROS:
                return place, f"is {_range(later)} and was {_range(before)}"
    alike = [(a.total, a.limits) == (b.total, b.limits) for a, b in pairwise(readings)]
    num = next((n for n, is_same in enumerate(reversed(alike)) if not is_same), len(alike))
    place = len(alike) - num
    if num < LEAST_AFTER or place < least or any(alike[:place]) or readings[-1].numel == 1:
        return None
    return place + 1, f"is the same as in step {readings[place].step}, and was another one in every step before"


def _ways(before: Sequence[Reading], now: Reading) -> list[bool]:
    """In which ways a reading is unlike those before: one number everywhere, which it never was, or another one than
    always; larger; smaller; negative; of another share of zeros; of another type."""
    sizes, limits, is_single = [one.size for one in before], {one.limits for one in before}, now.numel == 1
    zeros = [one.zeros for one in before]
    was_constant = len(limits) == 1 and before[0].low == before[0].high
    return [
        now.low == now.high
        and not is_single
        and (all(low < high for low, high in limits) or (was_constant and now.limits not in limits)),
        now.size > max(JUMP * median(sizes), CLEARLY * max(sizes)) > 0,
        0 < now.size < min(median(sizes) / JUMP, min(sizes) / CLEARLY) and not is_single,
        min(one.low for one in before) >= 0 and -now.low > _BELOW_ZERO * max(one.high for one in before) > 0,
        not min(zeros) - _OUTSIDE <= now.zeros <= max(zeros) + _OUTSIDE,
        now.dtype not in [one.dtype for one in before],
    ]


def _range(readings: Iterable[Reading]) -> str:
    lows, highs = zip(*(one.limits for one in readings), strict=True)
    low, high = value_words(min(lows)), value_words(max(highs))
    return low if low == high else f"{low} to {high}"


def grouped(changes: Iterable[Shift]) -> list[Shift]:
    """Changes of several things that are alike in step and words as one, the first names of all."""
    found = []
    for _, group in groupby(sorted(changes, key=lambda one: (one.step, one.text)), lambda one: (one.step, one.text)):
        alike = sorted(dict.fromkeys(group), key=lambda one: len(one.name))
        names, num_more = [one.name for one in alike[:_MOST_NAMES]], len(alike) - _MOST_NAMES
        lead = f"{', '.join(names)} and {counted(num_more, 'other')}" if num_more > 0 else " and ".join(names)
        first = alike[0]
        found.append(Shift(lead, first.step, first.text, first.place))
    return found
