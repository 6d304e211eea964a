"""What is unlike the steps before: values, settings, state, by one comparison for a failing step and for a run.

Begin with `unlike`, which compares the `Reading`s of one value and returns an `Unlike`, whose text is such as

    `x` is 0 to 34.1 in row 3 of step 12, and was 0 to 3.4 in steps 0-11

A value is compared with the same value of the steps before, never with fixed numbers: it has jumped if its largest
magnitude is several times all of before, and it drifts if it has gone the same way in every step. A change that many
healthy runs make on purpose (a schedule, a term that is switched on or off, a layer that begins to learn) is none.
Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from reprokit.words import counted, number_words, row_words, value_words

JUMP = 5.0  # times the largest magnitude before: labels and images of healthy runs vary by less
FAR = 1000.0  # times all values before: a code for a missing label
LEAST_BEFORE = 16  # steps of a run before a setting is taken to be constant
LEAST_AFTER = 8  # steps with one value, and then with another: an evaluation changes modes for a moment
LEAST_ALIKE = 3  # readings before one can be unlike them in more than its size
_BELOW_ZERO = 0.2  # of the highest value before, in a run that goes on
_OUTSIDE, _APART = 0.02, 0.25  # of shares of zeros, each and their medians: a mask that is inverted
_LEAST_DRIFT = 5  # steps in a row that make a drift
_EVEN = 1.5  # the largest step of a drift over its smallest
_GROWS = 1.1  # a step: what is carried from step to step and grows by more does not settle
_GROWN = 10.0  # times in all
_MOST_NAMES = 2

Value = float | bool | str


class Reading(NamedTuple):
    """The range of one value in one step, and how many elements it had."""

    step: int
    low: float
    high: float
    numel: int = 1
    zeros: float = 0.0  # the share of zeros
    rows: int = 0  # the size of the first dimension, 0 without one
    dtype: str = ""
    total: float = 0.0  # the sum, which tells one batch from another

    @property
    def limits(self) -> tuple[float, float]:
        """Lowest and highest."""
        return self.low, self.high

    @property
    def size(self) -> float:
        """The largest magnitude; of nan infinite."""
        size = max(abs(self.low), abs(self.high))
        return size if size == size else math.inf

    def joined(self, other: Reading) -> Reading:
        """The range of both."""
        limits = min(self.low, other.low), max(self.high, other.high)
        zeros, rows = max(self.zeros, other.zeros), min(self.rows, other.rows)
        return Reading(self.step, *limits, self.numel + other.numel, zeros, rows, self.dtype, self.total + other.total)


@dataclass(frozen=True, slots=True)
class Unlike:
    """A value of the failing step that is unlike the steps before."""

    name: str
    # ``batch``: given to the loop; ``carried``: a step goes on with it from the step before; ``state``: a parameter or
    # buffer; ``setting``: a number that is no tensor
    role: str
    # Its range in the steps from ``first`` to ``since``, and at that step
    before: tuple[float, float]
    now: tuple[float, float]
    first: int
    since: int
    # The whole sentence, where the fields below do not say it
    words: str = ""
    # Indexes in the first dimension that are outside of the range of before, and the samples there
    rows: Sequence[int] = ()
    samples: str = ""
    # What it is and was, where that is not a range that was left
    is_now: str = ""
    was: str = ""
    place: str | None = None  # a module
    # How many times as large as before; 0 for class labels
    times: float = 0.0

    @property
    def text(self) -> str:
        """In words."""
        if self.words:
            return self.words
        samples = f" ({self.samples})" if self.samples else ""
        where = f" in {row_words(self.rows)}{samples} of" if self.rows else " in"
        when = f"step {self.since - 1}" if self.first == self.since - 1 else f"steps {self.first}-{self.since - 1}"
        now, was = self.change
        return f"`{self.name}` {now}{where} step {self.since}, and {was} in {when}"

    @property
    def change(self) -> tuple[str, str]:
        """What it is, and what it was before."""
        return self.is_now or f"is {_range(*self.now)}", self.was or f"was {_range(*self.before)}"


def _range(low: float, high: float) -> str:
    return value_words(low) if low == high else f"{value_words(low)} to {value_words(high)}"


def _all_of(readings: Sequence[Reading]) -> tuple[float, float]:
    return min(reading.low for reading in readings), max(reading.high for reading in readings)


def unlike(
    name: str, role: str, readings: Sequence[Reading], *, least: int = 1, num_past: int = 0, for_good: bool = False
) -> Unlike | None:
    """How the last reading is unlike those before, of which there are at least so many, or one of so many before it: a
    bad batch may ruin the weights, and a later one fails (`exp_outlier_before` of the benchmark of causes). In a run
    that goes on all readings from one on have to be, ``for_good``.
    """
    if not for_good:
        for place in range(least, len(readings)):
            before, later = readings[:place], readings[place:]
            ways = _ways(before, later[0], for_good=False)
            if len(later) - 1 > num_past and ways:
                ends = _ways(before, later[-1], for_good=False)
                ways = [way for way in ways if way in ends]
            if ways:
                return _unlike_in(ways[0], name, role, before, later, later[:1])
        return None
    if len(readings) > least and any(_ways(readings[:least], readings[-1], for_good=True)):
        for place in range(least, len(readings)):
            before, later = readings[:place], readings[place:]
            way = _way_of_all(before, later)
            if way is not None:
                return _unlike_in(way, name, role, before, later, later)
    return _again(name, role, readings, least)


def _way_of_all(before: Sequence[Reading], later: Sequence[Reading]) -> str | None:
    """The first way in which all later readings are unlike those before."""
    ways = _ways(before, later[0], for_good=True)
    if "zeros" in ways and abs(_usual_zeros(later) - _usual_zeros(before)) <= _APART:
        ways.remove("zeros")
    for one in later if ways else ():
        end = _ways(before, one, for_good=True)
        ways = [way for way in ways if way in end]
    return next(iter(ways), None)


def _usual_zeros(readings: Sequence[Reading]) -> float:
    return median(one.zeros for one in readings)


def _unlike_in(
    way: str,
    name: str,
    role: str,
    before: Sequence[Reading],
    later: Sequence[Reading],
    shown: Sequence[Reading],
) -> Unlike:
    """A value whose ``later`` readings are unlike those before in a way, which the ``shown`` ones say."""
    times = median(one.size for one in later) / (max(one.size for one in before) or math.inf)
    if "float" not in later[0].dtype and not times > FAR:
        times = 0.0
    is_now, was = _said(way, before, shown)
    limits = _all_of(before), _all_of(shown)
    return Unlike(name, role, *limits, before[0].step, later[0].step, is_now=is_now, was=was, times=times)


def _ways(before: Sequence[Reading], now: Reading, *, for_good: bool) -> list[str]:
    """In which ways a reading is unlike those before: the range, that it is one number everywhere, which it never was
    or another one than always, that it is smaller, its share of zeros, its type, far fewer rows. Labels that are all
    ignored are one number; the last batch may be a single row."""
    found = []
    sizes = [one.size for one in before]
    is_known, is_single = len(before) >= LEAST_ALIKE, now.numel == 1
    if is_known and not is_single and now.low == now.high and _is_new_number(before, now):
        found.append("flat")
    if now.size > JUMP * max(sizes) > 0:
        found.append("larger")
    if not is_known:
        return found
    low, high = _all_of(before)
    if low >= 0 and high > 0 and -now.low > (_BELOW_ZERO * high if for_good else 0.0):
        found.append("negative")
    if for_good and 0 < now.size * JUMP < min(sizes) and not is_single:
        found.append("smaller")
    zeros, slack = [one.zeros for one in before], _OUTSIDE if for_good else _APART
    if not min(zeros) - slack <= now.zeros <= max(zeros) + slack:
        found.append("zeros")
    if now.dtype not in [one.dtype for one in before]:
        found.append("type")
    if not for_good and 0 < now.rows * JUMP < min(one.rows for one in before):
        found.append("rows")
    return found


def _is_new_number(before: Sequence[Reading], now: Reading) -> bool:
    """True for one number everywhere where there never was one, or always another one."""
    limits, (low, high) = {one.limits for one in before}, _all_of(before)
    return all(low < high for low, high in limits) or (low == high and now.limits not in limits)


def _said(way: str, before: Sequence[Reading], later: Sequence[Reading]) -> tuple[str, str]:
    """What is said of readings and of those before; nothing where their ranges say it."""
    now, was, limits = later[0], f"was {_range(*_all_of(before))}", _range(*_all_of(later))
    is_same = len({one.limits for one in later}) == 1  # labels in the order of their classes are not
    return {
        "flat": (f"is {limits} everywhere" if is_same else f"is one number in each step, {limits},", was),
        "smaller": (f"is {_range(*now.limits)}", was),
        "zeros": (f"is zero in {now.zeros:.0%} of its elements", f"was in {median(one.zeros for one in before):.0%}"),
        "type": (f"is {now.dtype}", f"was {before[-1].dtype}"),
        "rows": (f"has {counted(now.rows, 'row')}", f"had {min(one.rows for one in before)} or more"),
    }.get(way, ("", ""))


def _again(name: str, role: str, readings: Sequence[Reading], least: int) -> Unlike | None:
    """That a value is the same in all steps since one, and was another one in every step before."""
    alike = [(a.total, a.limits) == (b.total, b.limits) for a, b in pairwise(readings)]
    num = next((n for n, is_same in enumerate(reversed(alike)) if not is_same), len(alike))
    place = len(alike) - num
    if num < LEAST_AFTER or place < least or any(alike[:place]) or readings[-1].numel == 1:
        return None
    is_now, was = f"is the same as in step {readings[place].step}", "was another one in every step before"
    limits = _all_of(readings[:place]), readings[-1].limits
    return Unlike(name, role, *limits, readings[0].step, readings[place + 1].step, is_now=is_now, was=was)


def sign(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a value is negative that never was."""
    place = next((n for n, reading in enumerate(readings) if reading.low < 0), 0)
    before = _all_of(readings[:place]) if place >= LEAST_ALIKE and readings[-1].low < 0 else (0.0, 0.0)
    if not before[1] > 0:
        return None
    return Unlike(name, role, before, readings[place].limits, readings[0].step, readings[place].step)


def is_far(before: Sequence[float], later: Sequence[float]) -> bool:
    """True if later values of a setting are several times as large as all before, or as small; have another sign; or
    are above one, as a discount or decay is that was below."""
    sizes, now = list(map(abs, before)), list(map(abs, later))
    is_turned = max(later) < 0 <= min(before) or max(before) < 0 < min(later)
    is_growth = min(before) > 0.5 and max(before) < 1 < min(later)
    is_apart = min(now) > JUMP * max(sizes) > 0 or max(now) * JUMP < min(sizes)  # many begin with 0
    return is_apart or is_turned or is_growth


def setting(was: Value, now: Value, *, option: str = "") -> str | None:
    """That a setting which was constant, maybe an ``option``, has changed, ``None`` if that is what a plan looks like:
    a rate that falls, a small step, or zero that ends or begins."""
    if isinstance(was, (bool, str)) or isinstance(now, (bool, str)):
        return f"went from {was} to {now}"
    is_plan = now == 0 or (was == 0 and not (option and now < 0)) or (option == "lr" and 0 < now < was)
    return None if is_plan or not is_far([was], [now]) else f"went from {value_words(was)} to {value_words(now)}"


def changed(name: str, readings: Sequence[Reading], *, is_flag: bool) -> Unlike | None:
    """How a setting has jumped up or down since some step, or a flag has a value that it never had."""
    for place in range(1, len(readings)):
        before, later = readings[:place], readings[place:]
        old, new = ([end for one in part for end in one.limits] for part in (before, later))
        is_new = len(later) == 1 and new[0] not in old if is_flag else is_far(old, new)
        if is_new:
            was, is_now = [str(bool(one.low)) if is_flag else _range(*one.limits) for one in readings[place - 1 :][:2]]
            words = f"`{name}` went from {was} to {is_now} at step {later[0].step}"
            limits = readings[place - 1].limits, later[0].limits
            return Unlike(name, "setting", *limits, before[0].step, later[0].step, words)
    return None


def resized(name: str, before: Sequence[Sequence[int]], now: Sequence[int], step: str, steps: str) -> str:
    """How a size is beyond all of the steps before, empty if none is: the last batch may be smaller, a text longer."""
    sizes = list(zip(*before, strict=True)) if len({len(now), *map(len, before)}) == 1 else []
    if all(min(size) <= new <= max(size) for size, new in zip(sizes, now, strict=False)):
        return ""
    was = ", ".join(f"{min(size)}" if len({*size}) == 1 else f"{min(size)} to {max(size)}" for size in sizes)
    return f"{name} is {[*now]} in {step}, and was [{was}] in {steps}"


def rewritten(name: str, step: int, rows: Sequence[int], now: tuple[float, float], then: tuple[float, float]) -> str:
    """That an input of a step has other values by now, in all rows if none are given."""
    lead = f"`{name}` of step {step} is no longer what it was when the step read it"
    where = f"{row_words(rows)} {'are' if len(rows) > 1 else 'is'}" if rows else "it is"
    was = "were" if len(rows) > 1 else "was"
    values = f"{where} {_range(*now)} now and {was} {_range(*then)}"
    return f"{lead}: its memory, which is not torch's, was written since; {values}"


def drift(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a single number has gone the same way by the same amount, in all steps up to the last one."""
    values = [(reading.step, reading.low) for reading in readings]
    if not all(math.isfinite(value) for _, value in values):
        return None
    changes = [after - before for (_, before), (_, after) in pairwise(values)]
    length = 0
    for change in reversed(changes):
        recent = [*changes[len(changes) - length :], change]
        if change == 0 or max(map(abs, recent)) > _EVEN * min(map(abs, recent)) or change * recent[0] < 0:
            break
        length += 1
    if length < _LEAST_DRIFT:
        return None
    (first, before), (last, now) = values[-1 - length], values[-1]
    way, by = "fell" if now < before else "rose", number_words(abs(now - before) / length)
    words = (
        f"`{name}` {way} by {by} in each of {counted(length, 'step')}, from {value_words(before)} to {value_words(now)}"
    )
    return Unlike(name, role, (before, before), (now, now), first, last, words)


def course(name: str, readings: Sequence[Reading], *, is_flag: bool = False) -> Unlike | None:
    """How a setting has gone the same way in every change, to many times what it was, or to a small part of it."""
    if is_flag or len(readings) <= _LEAST_DRIFT or any(reading.low != reading.high for reading in readings):
        return None
    first, before, last, now = readings[0].step, readings[0].low, readings[-1].step, readings[-1].low
    is_one_way = len({after.low > before.low for before, after in pairwise(readings)}) == 1
    is_far = before * now <= 0 or not 1 / _GROWN < now / before < _GROWN
    if not (is_one_way and is_far):
        return None
    steps, way = counted(last - first, "step"), "fell" if now < before else "rose"
    words = f"`{name}` {way} from {value_words(before)} to {value_words(now)} in {steps}"
    return Unlike(name, "setting", (before, before), (now, now), first, last, words)


def _streak(readings: Sequence[Reading], goes_on: Callable[[Reading, Reading], bool]) -> int:
    """The steps in a row, up to the last one, in each of which a value goes on."""
    ends = (n for n, (before, now) in enumerate(reversed(list(pairwise(readings)))) if not goes_on(before, now))
    return next(ends, len(readings) - 1)


def growth(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a value has grown in every step up to the last one."""
    length = _streak(readings, lambda before, now: now.size > _GROWS * before.size > 0)
    start, end = readings[-1 - length], readings[-1]
    if length < _LEAST_DRIFT or not end.size < math.inf or end.size < _GROWN * start.size:
        return None
    times = (end.size / start.size) ** (1 / length)
    limits = f"was up to {number_words(start.size)} in step {start.step} and is up to {number_words(end.size)} now"
    who = ", which is carried from step to step," if role == "carried" else ""
    words = f"`{name}`{who} grows by {number_words(times)} times in each: it {limits}"
    return Unlike(name, role, start.limits, end.limits, start.step, end.step, words)


def decay(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How the least element of a value that is not negative has fallen in every step up to the last one."""
    length = _streak(readings, lambda before, now: 0 <= _GROWS * now.low < before.low)
    start, end = readings[-1 - length], readings[-1]
    if length < _LEAST_DRIFT or _GROWN * end.low > start.low:
        return None
    least = f"its least element was {number_words(start.low)} in step {start.step} and is {number_words(end.low)} now"
    words = f"`{name}` falls in each of {counted(length, 'step')}: {least}"
    return Unlike(name, role, start.limits, end.limits, start.step, end.step, words)


def written(
    name: str, was: Reading, now: Reading, where: str, earlier: Sequence[Reading] = (), *, may_fall: bool = True
) -> Unlike | None:
    """How a call of the loop has written other values into a part of the state, on the line ``where``; larger ones, or
    much smaller ones if it ``may_fall`` not."""
    is_lost = not may_fall and now.size * JUMP < was.size
    if was.size == 0 or not (is_lost or now.size > JUMP * max([was.size, *(one.size for one in earlier)])):
        return None
    change = f"went from {_range(*was.limits)} to {_range(*now.limits)}"
    words = f"{name} {change} at step {now.step}, which {where or 'the loop'} has written"
    return Unlike(name, "state", was.limits, now.limits, now.step, now.step, words)


def emptied_state(name: str, step: int) -> Unlike:
    """That the state of the optimizer ``name`` was lost before its update of a step."""
    words = f"The state of {name} is empty before the update of step {step}, and was not after the one before"
    return Unlike(name, "state", (0.0, 0.0), (0.0, 0.0), step, step, words)


def told(name: str, step: int, words: str, place: str | None = None) -> Unlike:
    """A change of something in a run since a step, as ``words`` behind its name say."""
    return Unlike(name, "setting", (0.0, 0.0), (0.0, 0.0), step, step, words, place=place)


def grouped(changes: Iterable[Unlike]) -> list[Unlike]:
    """Changes of several things that are alike in step and words as one, the first names of all."""
    found, alike = [], dict[tuple[int, str], list[Unlike]]()
    for one in changes:
        alike.setdefault((one.since, one.words or " and ".join(one.change)), []).append(one)
    for (step, words), group in sorted(alike.items()):
        names = sorted(dict.fromkeys(one.name for one in group), key=len)
        num_more = len(names) - _MOST_NAMES
        more = f" and {counted(num_more, 'other')}" if num_more > 0 else ""
        lead = (", " if more else " and ").join(names[:_MOST_NAMES]) + more
        place = min(group, key=lambda one: len(one.name)).place
        found.append(told(lead, step, words, place))
    return found
