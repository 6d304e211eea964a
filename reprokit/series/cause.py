"""The cause of a failure: values that differ from those of the steps before, and interventions on these steps.

A value of the failing step is compared with the same value of the steps before, never with fixed numbers: it has jumped
if its largest magnitude is several times all of before, and it drifts if it has gone the same way in every step. That
is evidence; a cause is claimed only of an `Intervention` that removes the failure. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, NamedTuple

from reprokit.grammar import Count, Line, Text, one_of, plain_of
from reprokit.words import counted, number_words, row_words, value_words

JUMP = 5.0  # times the largest magnitude before: labels and images of healthy runs vary by less
_LEAST_ALIKE = 3  # steps that a new sign, or a constant, is compared with
_LEAST_DRIFT = 5  # steps in a row that make a drift
_EVEN = 1.5  # the largest step of a drift over its smallest
_GROWS = 1.1  # a step: what is carried from step to step and grows by more does not settle
_GROWN = 10.0  # times in all
_DIVERGED = 10.0  # times the loss of before: where a run is on its course the loss varies by less
_RISES = 1.5  # times the loss of the step before, in every step of a divergence
_MOSTLY, _HARDLY = 0.5, 0.1  # shares of zeros
_USUAL = 3.0  # times the largest loss of the usual steps
TENTH = "a tenth of the learning rate"  # the change of an experiment
SMALLER_RATES = {TENTH: 0.1, "a hundredth of the learning rate": 0.01}  # 50 for 0.5 diverges at 5 too
EVENTS = frozenset({"spike", "explosion"})


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
    """A value of the failing step that is unlike the steps before, since the step ``since``.

    ``role``: ``batch`` is what the loop was given, ``carried`` what a step goes on with from the step before, ``state``
    a parameter or buffer, ``setting`` a number that is no tensor. ``before`` is its range in the steps from ``first``
    to ``since``, ``now`` at that step. ``rows`` are the indexes in the first dimension that are outside of the range
    of before. ``words`` say it, where that is not a range that was left.
    """

    name: str
    role: str
    before: tuple[float, float]
    now: tuple[float, float]
    first: int
    since: int
    words: str = ""
    rows: Sequence[int] = ()
    samples: str = ""  # of these rows, in words

    @property
    def text(self) -> str:
        """In words."""
        if self.words:
            return self.words
        samples = f" ({self.samples})" if self.samples else ""
        where = f" in {row_words(self.rows)}{samples} of" if self.rows else " in"
        when = f"step {self.since - 1}" if self.first == self.since - 1 else f"steps {self.first}-{self.since - 1}"
        now, before = _range(*self.now), _range(*self.before)
        return f"`{self.name}` is {now}{where} step {self.since}, and was {before} in {when}"


def _range(low: float, high: float) -> str:
    return value_words(low) if low == high else f"{value_words(low)} to {value_words(high)}"


def _all_of(readings: Sequence[Reading]) -> tuple[float, float]:
    return min(reading.low for reading in readings), max(reading.high for reading in readings)


def jump(name: str, role: str, readings: Sequence[Reading], num_past: int = 0) -> Unlike | None:
    """How the last reading is beyond all of before, or one of so many before it; ``None`` if none is."""
    for place in range(1, len(readings)):
        before, now = readings[:place], readings[place]
        largest = max(reading.size for reading in before)
        if not largest < math.inf:
            return None
        if largest and now.step > before[0].step and now.size > JUMP * largest:
            if readings[-1].size <= JUMP * largest and len(readings) - 1 - place > num_past:
                return None
            return Unlike(name, role, _all_of(before), (now.low, now.high), before[0].step, now.step)
    return None


def sign(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a value is negative that never was."""
    place = next((n for n, reading in enumerate(readings) if reading.low < 0), 0)
    before = _all_of(readings[:place]) if place >= _LEAST_ALIKE and readings[-1].low < 0 else (0.0, 0.0)
    if not before[1] > 0:
        return None
    return Unlike(name, role, before, readings[place].limits, readings[0].step, readings[place].step)


def unlike(name: str, role: str, readings: Sequence[Reading], num_past: int) -> Unlike | None:
    """How the last reading is unlike those before, or one of so many before it: a bad batch may ruin the weights, and a
    later one fails (`exp_outlier_before` of the benchmark of causes).

    Labels that are all ignored are one number; the last batch may be a single row.
    """
    *before, now = readings
    is_known, varied = len(before) >= _LEAST_ALIKE, all(one.low < one.high for one in before)
    steps = f"steps {before[0].step}-{before[-1].step}" if is_known else ""
    words, share = "", max((one.zeros for one in before), default=1.0)
    if is_known and varied and now.low == now.high and now.numel > 1:
        was = _range(*_all_of(before))
        words = f"is {value_words(now.low)} everywhere in step {now.step}, and was {was} in {steps}"
    elif found := jump(name, role, readings, num_past) or sign(name, role, readings):
        return found
    elif is_known and now.zeros >= _MOSTLY and share <= _HARDLY:
        was = f"in at most {share:.0%} in {steps}"
        words = f"is zero in {now.zeros:.0%} of its elements in step {now.step}, and was {was}"
    elif is_known and now.dtype not in [one.dtype for one in before]:
        words = f"is {now.dtype} in step {now.step}, and was {before[-1].dtype} before"
    elif is_known and now.rows and now.rows * JUMP < (least := min(one.rows for one in before)):
        words = f"has {counted(now.rows, 'row')} in step {now.step}, and had {least} or more before"
    limits = (_all_of(before), now.limits) if words else ((0.0, 0.0), (0.0, 0.0))
    return Unlike(name, role, *limits, before[0].step, now.step, f"`{name}` {words}") if words else None


def changed(name: str, readings: Sequence[Reading], *, is_flag: bool) -> Unlike | None:
    """How a setting has jumped up or down since some step, or a flag has a value that it never had."""
    for place in range(1, len(readings)):
        before, later = readings[:place], readings[place:]
        sizes, now = [reading.size for reading in before], [reading.size for reading in later]
        is_far = min(now) > JUMP * max(sizes) > 0 or max(now) * JUMP < min(sizes)  # many begin with 0
        is_new = is_flag and len(later) == 1 and now[0] not in sizes
        if is_new or (is_far and not is_flag):
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


def growth(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a value has grown in every step up to the last one."""
    last, length = len(readings) - 1, 0
    while length < last and readings[last - length].size > _GROWS * readings[last - length - 1].size > 0:
        length += 1
    start, end = readings[last - length], readings[last]
    if length < _LEAST_DRIFT or not end.size < math.inf or end.size < _GROWN * start.size:
        return None
    times = (end.size / start.size) ** (1 / length)
    limits = f"was up to {number_words(start.size)} in step {start.step} and is up to {number_words(end.size)} now"
    who = ", which is carried from step to step," if role == "carried" else ""
    words = f"`{name}`{who} grows by {number_words(times)} times in each: it {limits}"
    return Unlike(name, role, start.limits, end.limits, start.step, end.step, words)


def decay(name: str, role: str, readings: Sequence[Reading]) -> Unlike | None:
    """How the least element of a value that is not negative has fallen in every step up to the last one."""
    last, length = len(readings) - 1, 0
    while length < last and 0 <= _GROWS * readings[last - length].low < readings[last - length - 1].low:
        length += 1
    start, end = readings[last - length], readings[last]
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


@dataclass(frozen=True, slots=True)
class Divergence:
    """The losses of a run that has left its course: the last usual one at ``step``, and the last one."""

    step: int
    usual: float
    last_step: int
    last: float

    @property
    def text(self) -> str:
        """In words, without a full stop."""
        steps = counted(self.last_step - self.step, "step")
        rise = f"the loss rose from {number_words(self.usual)} to {number_words(self.last)} in {steps}"
        return f"The run diverged before: {rise}"


def divergence(losses: Sequence[tuple[int, float]]) -> Divergence | None:
    """Where the losses before the failing step began to rise to many times the usual ones, ``None`` if they did not."""
    known = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(known) < 2:
        return None
    last_step, last = known[-1]
    place = len(known) - 1
    while place and known[place][1] > _RISES * abs(known[place - 1][1]):
        place -= 1
    step, usual = known[place]
    return Divergence(step, usual, last_step, last) if last > _DIVERGED * abs(usual) else None


def rate_words(found: Divergence | None, update: float, low: float, high: float) -> str:
    """That a run diverged, or had a large update, at learning rates from ``low`` to ``high``."""
    says = f"An update changed the parameters by {number_words(update)} times their norm"
    rate = f"a learning rate of {number_words(low)}"
    rates = rate if low == high else f"learning rates of {number_words(low)} to {number_words(high)}"
    return f"{found.text if found is not None else says}, at {rates}."


def usual_limits(losses: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The lowest and highest loss that is usual: of the steps before those in which it left its course."""
    found = divergence(losses)
    known = [loss for step, loss in losses if math.isfinite(loss) and (found is None or step <= found.step)]
    if not known:
        return -math.inf, math.inf
    sizes = list(map(abs, known))
    return -_USUAL * max(sizes), _USUAL * max(median(sizes), sizes[-1])


@dataclass(frozen=True, slots=True)
class Intervention:
    """The steps before the failure, played again with one ``change``: whether that ``removes`` it, the ``loss`` of the
    failing step then, and how many ``steps`` were played."""

    change: Line
    removes: bool
    loss: float | None = None
    steps: Count = 0

    def words(self, kind: str) -> str:
        """What it has shown of a failure of a kind; of an event no value was bad before."""
        steps = "the step" if self.steps == 1 else f"the same {self.steps} steps"
        ending = "" if self.steps > 1 else "s"
        shown, loss = f"stay{ending} finite", f" (loss {number_words(self.loss)})" if self.loss is not None else ""
        if kind == "exception":
            shown = f"end{ending} without the exception"
        elif kind in EVENTS and self.loss is not None:
            shown, loss = f"end{ending} with a usual loss", f" ({number_words(self.loss)})"
        return f"With {self.change} {steps} {shown}{loss}."


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a failure: its class (``kind``), a sentence, the evidence for it, and the interventions."""

    kind: Annotated[str, one_of("data", "setting", "state", "numerics", "framework", "unknown")]
    text: Text
    evidence: tuple[Line, ...] = ()
    interventions: tuple[Intervention, ...] = ()

    def described(self) -> dict[str, Any]:
        """As ``show --json`` has it."""
        tried = [plain_of(one) for one in self.interventions]
        return {"class": self.kind, "text": self.text, "evidence": list(self.evidence), "interventions": tried}
