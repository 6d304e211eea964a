"""What is unlike the steps before in a run that goes on: a setting that has changed for good, data of another range.

The run itself says what is usual; a change that many healthy runs make on purpose (a schedule, a term that is switched
on or off, a layer that begins to learn) is none. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from reprokit.series.cause import JUMP, Reading
from reprokit.words import counted, value_words

LEAST_BEFORE = 16  # steps with one value, before a setting is taken to be constant
LEAST_AFTER = 8  # steps with another one: an evaluation between two steps changes modes for a moment
LEAST_ALIKE = 3  # readings of a value before it can be unlike them
_CLEARLY = 2.0  # times the largest of the ranges before
_BELOW_ZERO = 0.2  # of the highest value before
_HARDLY, _MOSTLY = 0.1, 0.5  # shares of zeros
_MOST_NAMES = 2

Value = float | bool | str


@dataclass(frozen=True, slots=True)
class Change:
    """Something is unlike before since a step: ``text`` says it behind the name. ``is_far``: by orders of magnitude."""

    name: str
    step: int
    text: str
    place: str | None = None
    is_far: bool = False


def setting(was: Value, now: Value, *, is_rate: bool = False) -> str | None:
    """That a setting which was constant has changed, ``None`` if that is what a plan looks like: a rate that falls, a
    small step, or zero that ends or begins."""
    if isinstance(was, (bool, str)) or isinstance(now, (bool, str)):
        return f"went from {was} to {now}"
    says = f"went from {value_words(was)} to {value_words(now)}"
    if was == 0 or (now == 0 and not is_rate):
        return None
    is_other = was * now < 0 or abs(now) > JUMP * abs(was) or (is_rate and now == 0)
    is_small = not is_rate and abs(now) * JUMP < abs(was)
    return says if is_other or is_small or 0.5 < was < 1 < now else None  # a discount or decay above one grows


def are_exchanged(first: tuple[Value, Value], second: tuple[Value, Value]) -> bool:
    """True if two settings, each as it was and as it is, have got each other's value, as the labels of a GAN."""
    return first == second[::-1] and first[0] != first[1]


def since(readings: Sequence[Reading], least: int = LEAST_ALIKE) -> tuple[int, str] | None:
    """The position from which on all readings of a value are unlike all before in one way, how."""
    for way in _WAYS:
        place = len(readings)
        while place > least and way(readings[:least], readings[place - 1]):
            place -= 1
        before = readings[:place]
        if place < len(readings) and all(way(before, one) for one in readings[place:]):
            was, now = _range(before), _range(readings[place:])
            return place, f"is {_words(now)} and was {_words(was)}"
    return _repeated(readings, least)


def _repeated(readings: Sequence[Reading], least: int) -> tuple[int, str] | None:
    """The same for a value that has been the same for many steps, and was another one in each before."""
    alike = [(a.total, a.limits) == (b.total, b.limits) for a, b in pairwise(readings)]
    num = next((n for n, is_same in enumerate(reversed(alike)) if not is_same), len(alike))
    place = len(alike) - num
    if num < LEAST_AFTER or place < least or any(alike[:place]) or readings[-1].numel == 1:
        return None
    return place, f"is the same in each of {counted(num + 1, 'step')}, and was another one in every step before"


def _is_larger(before: Sequence[Reading], now: Reading) -> bool:
    sizes = [one.size for one in before]
    return now.size > max(JUMP * median(sizes), _CLEARLY * max(sizes)) > 0


def _is_smaller(before: Sequence[Reading], now: Reading) -> bool:
    sizes = [one.size for one in before]
    return 0 < now.size < min(median(sizes) / JUMP, min(sizes) / _CLEARLY) and now.numel > 1


def _is_constant(before: Sequence[Reading], now: Reading) -> bool:
    """One number everywhere, which it never was, or another one than always."""
    if now.low < now.high or now.numel == 1:
        return False
    was = {one.limits for one in before}
    return all(low < high for low, high in was) or (was == {(before[0].low, before[0].low)} and now.limits not in was)


def _is_negative(before: Sequence[Reading], now: Reading) -> bool:
    return min(one.low for one in before) >= 0 and -now.low > _BELOW_ZERO * max(one.high for one in before) > 0


def _is_empty(before: Sequence[Reading], now: Reading) -> bool:
    return now.zeros > _MOSTLY and max(one.zeros for one in before) < _HARDLY


def _is_of_another_type(before: Sequence[Reading], now: Reading) -> bool:
    return now.dtype not in [one.dtype for one in before]


_WAYS: tuple[Callable[[Sequence[Reading], Reading], bool], ...] = (
    _is_constant,
    _is_larger,
    _is_smaller,
    _is_negative,
    _is_empty,
    _is_of_another_type,
)


def _range(readings: Iterable[Reading]) -> tuple[float, float]:
    limits = [one.limits for one in readings]
    return min(low for low, _ in limits), max(high for _, high in limits)


def _words(limits: tuple[float, float]) -> str:
    low, high = map(value_words, limits)
    return low if low == high else f"{low} to {high}"


def grouped(changes: Iterable[Change]) -> list[Change]:
    """Changes of several things that are alike in step and words as one, the first names of all."""
    found = []
    for _, group in groupby(sorted(changes, key=lambda one: (one.step, one.text)), lambda one: (one.step, one.text)):
        alike = list(dict.fromkeys(group))
        names = [one.name for one in alike[:_MOST_NAMES]]
        more = f" and {counted(len(alike) - _MOST_NAMES, 'other')}" if len(alike) > _MOST_NAMES else ""
        first = min(alike, key=lambda one: len(one.place or ""))
        lead = f"{', '.join(names)}{more}" if more else " and ".join(names)
        found.append(Change(lead, first.step, first.text, first.place))
    return found
