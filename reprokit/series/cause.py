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
from reprokit.words import counted, number_words, row_words

_JUMP = 5.0  # times the largest magnitude before: labels and images of healthy runs vary by less
_LEAST = 1  # steps that a jump is compared with: an experiment decides what it means
_LEAST_DRIFT = 5  # steps in a row that make a drift
_EVEN = 1.5  # the largest step of a drift over its smallest
_GROWS = 1.1  # a step: what is carried from step to step and grows by more does not settle
_GROWN = 10.0  # times in all
_DIVERGED = 10.0  # times the loss of before: where a run is on its course the loss varies by less
_RISES = 1.5  # times the loss of the step before, in every step of a divergence
_DIGITS = 1e9  # below which a whole number is told by all its digits
_USUAL = 3.0  # times the largest loss of the usual steps


class Reading(NamedTuple):
    """The range of one value in one step."""

    step: int
    low: float
    high: float

    @property
    def size(self) -> float:
        """The largest magnitude; of nan infinite."""
        size = max(abs(self.low), abs(self.high))
        return size if size == size else math.inf


@dataclass(frozen=True, slots=True)
class Unlike:
    """A value of the failing step that is unlike the steps before: a jump at the step ``since``, or a drift ``by`` so
    much in each step; ``times`` if it grows by a factor.

    ``role``: ``batch`` is what the loop was given, ``carried`` what a step goes on with from the step before,
    ``parameter`` one of a single number, ``option`` one of an optimizer. ``before`` is its range in the steps from
    ``first`` to ``since``, ``now`` at the jump, or in the failing step. ``rows`` are the indexes in the first dimension
    that are outside of the range of before.
    """

    name: str
    role: str
    before: tuple[float, float]
    now: tuple[float, float]
    first: int
    since: int
    by: float | None = None
    times: float | None = None
    rows: Sequence[int] = ()

    @property
    def text(self) -> str:
        """In words."""
        name, now, before = f"`{self.name}`", _range(*self.now), _range(*self.before)
        if self.times is not None:
            before, now = number_words(_size(self.before)), number_words(_size(self.now))
            grows = f"grows by {number_words(self.times)} times in each"
            limits = f"it was up to {before} before step {self.first + 1} and is up to {now} now"
            return f"{name}, which is carried from step to step, {grows}: {limits}"
        if self.by is not None:
            way = "fell" if self.by < 0 else "rose"
            change = number_words(abs(self.by))
            steps = counted(self.since - self.first, "step")
            return f"{name} {way} by {change} in each of {steps}, from {before} to {now}"
        if self.role == "option":
            return f"{name} went from {before} to {now} at step {self.since}"
        where = f" in {row_words(self.rows)} of" if self.rows else " in"
        when = f"step {self.since - 1}" if self.first == self.since - 1 else f"steps {self.first}-{self.since - 1}"
        return f"{name} is {now}{where} step {self.since}, and was {before} in {when}"


def _size(limits: tuple[float, float]) -> float:
    return max(map(abs, limits))


def _range(low: float, high: float) -> str:
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """A code such as -999999 is told digit by digit."""
    return f"{value:.0f}" if value == int(value) and abs(value) < _DIGITS else number_words(value)


def jump(name: str, role: str, readings: Sequence[Reading], least: int = _LEAST) -> Unlike | None:
    """How the last reading is beyond all of before, ``None`` if it is not; ``least`` steps are needed to tell."""
    for place in range(least, len(readings)):
        before = readings[:place]
        largest = max(reading.size for reading in before)
        if not 0 < largest < math.inf:
            return None
        if readings[place].size > _JUMP * largest:
            if readings[-1].size <= _JUMP * largest:
                return None
            limits = min(reading.low for reading in before), max(reading.high for reading in before)
            if role == "option":
                limits = before[-1].low, before[-1].high
            now = readings[place]
            return Unlike(name, role, limits, (now.low, now.high), before[0].step, now.step)
    return None


def drift(name: str, readings: Sequence[Reading]) -> Unlike | None:
    """How a parameter of a single number has gone the same way by the same amount, in all steps up to the last one."""
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
    by = (now - before) / length
    return Unlike(name, "parameter", (before, before), (now, now), first, last, by=by)


def growth(name: str, readings: Sequence[Reading]) -> Unlike | None:
    """How what is carried from step to step has grown in every step up to the last one."""
    last, length = len(readings) - 1, 0
    while length < last and readings[last - length].size > _GROWS * readings[last - length - 1].size > 0:
        length += 1
    start, end = readings[last - length], readings[last]
    if length < _LEAST_DRIFT or not end.size < math.inf or end.size < _GROWN * start.size:
        return None
    times = (end.size / start.size) ** (1 / length)
    return Unlike(name, "carried", (start.low, start.high), (end.low, end.high), start.step, end.step, times=times)


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


def usual_limit(losses: Sequence[tuple[int, float]]) -> float:
    """The largest magnitude of a loss that is usual: of the steps before those in which it left its course."""
    found = divergence(losses)
    known = [abs(loss) for step, loss in losses if math.isfinite(loss) and (found is None or step <= found.step)]
    return _USUAL * max(median(known), known[-1]) if known else math.inf


@dataclass(frozen=True, slots=True)
class Intervention:
    """The steps before the failure, played again with one ``change``: whether that ``removes`` it, the ``loss`` of the
    failing step then, and how many ``steps`` were played."""

    change: Line
    removes: bool
    loss: float | None = None
    steps: Count = 0

    def words(self, *, is_event: bool) -> str:
        """What it has shown; of an event no value was bad before."""
        steps = "the step" if self.steps == 1 else f"the same {self.steps} steps"
        ending = "" if self.steps > 1 else "s"
        shown, loss = f"stay{ending} finite", f" (loss {number_words(self.loss)})" if self.loss is not None else ""
        if is_event and self.loss is not None:
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
