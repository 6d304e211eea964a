"""What is usual of a number of a run, such as its loss: that of the steps before those in which it left its course.

    usual = UsualLoss([(0, 2.4), (1, 2.3), (2, 2.5), (3, 41.0), (4, 900.0)])
    usual.divergence.text    "The run diverged before: the loss rose from 2.5 to 900 in 2 steps"
    usual.high               7.5

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from reprokit.words import counted, number_words

_DIVERGED = 10.0  # times the loss of before: where a run is on its course the loss varies by less
_RISES = 1.5  # times the loss of the step before, in every step of a divergence
_USUAL = 3.0  # times the largest loss of the usual steps
_ABSURD = 1e30  # for any loss
_LEAST_SIGNED = 3  # losses, none below zero
_GROWN = 10.0  # times all before: a growth for good
_LEAST_BOUND = 1e-12  # a number that was smaller is no measure of a growth
Numbers = Sequence[tuple[int, float]]  # with their steps


@dataclass(frozen=True, slots=True)
class Divergence:
    """The losses of a run that has left its course."""

    # The last usual one
    step: int
    usual: float
    # The last one before the failing step
    last_step: int
    last: float

    @property
    def text(self) -> str:
        """In words, without a full stop."""
        steps = counted(self.last_step - self.step, "step")
        rise = f"the loss rose from {number_words(self.usual)} to {number_words(self.last)} in {steps}"
        return f"The run diverged before: {rise}"


def divergence(losses: Numbers) -> Divergence | None:
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


class UsualLoss:
    """The losses of a run as far as they are usual. Smaller ones than ``least`` are no measure."""

    def __init__(self, losses: Numbers, *, least: float = 0.0) -> None:
        self.divergence = divergence(losses)
        end = self.divergence.step if self.divergence is not None else math.inf
        self.losses = [loss for step, loss in losses if math.isfinite(loss) and step <= end]
        # The lowest and the highest loss that is usual
        self.low, self.high = -math.inf, math.inf
        sizes = list(map(abs, self.losses))
        if sizes:
            self.low = -_USUAL * max(*sizes, least)
            self.high = _USUAL * max(median(sizes), sizes[-1], least)

    @property
    def size(self) -> float | None:
        """The usual magnitude, if any step was made before."""
        return median_low(map(abs, self.losses)) if self.losses else None

    def has(self, losses: Sequence[float]) -> bool:
        """True if other losses are like the usual ones.

        Where none was below zero, one that is, by more than the losses before were large, is not.
        """
        is_absurd = not max(map(abs, losses)) < _ABSURD  # also a nan
        if is_absurd or min(losses) < self.low or max(losses) > self.high:
            return False
        if len(self.losses) < _LEAST_SIGNED or min(self.losses) < 0:
            return True
        second_largest = sorted(self.losses)[-2]
        return min(losses) >= -second_largest


class Growth(NamedTuple):
    """A number that has grown from the lowest to the highest value."""

    from_step: int
    low: float
    to_step: int
    high: float


def growth(numbers: Numbers) -> Growth | None:
    """How a number has grown tenfold, for good: its later half goes beyond everything in the earlier one, in more than
    a single step."""
    if len(numbers) < 3:
        return None
    before, after = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    low_step, low = min(before, key=lambda item: item[1])
    high_step, high = max(after, key=lambda item: item[1])
    bound = max(abs(size) for _, size in before)
    others = [size for step, size in numbers if low_step < step != high_step]
    is_for_good = max(others, default=-math.inf) > bound
    if high > _GROWN * max(bound, _LEAST_BOUND) and is_for_good:
        return Growth(low_step, low, high_step, high)
    return None
