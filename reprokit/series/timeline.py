"""The last steps in numbers: loss, learning rate, gradient norm where the loop computed one, scale, seconds.

Losses, norms and scales are kept as the tensors they are and turned into numbers only when somebody asks.

Counting iterations as a person would: one per attempted optimizer step, however many optimizers there are. An optimizer
that takes over from another one (it holds the same parameters, or the other one is gone or steps no more) goes on with
its count; of several that live side by side, the one that has stepped most often counts. Steps that a grad scaler skips
are normal; a scale that collapses is a failure.
"""

from __future__ import annotations

import collections
import itertools
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from reprokit.locate.quantity import number_of
from reprokit.series.detectors import Numbers
from reprokit.series.story import StepNumbers

TIMELINE_STEPS = 100
_MOST_SERIES = 4  # optimizers with a series of their own; more are parts of one, such as one for each parameter


class Turn(NamedTuple):
    """A step in numbers, and the ``id`` of the optimizer that made it; ``None``: it is not over."""

    numbers: StepNumbers
    optimizer: int | None


class Timeline:
    """Notes of the last `TIMELINE_STEPS` steps. ``loss`` and ``grad_norm`` are those of the step that is running.

    ``_grad_start`` is the number that the only call of `torch.autograd.grad` started from in it.
    """

    def __init__(self) -> None:
        self.loss: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | None = None
        self._grad_start: torch.Tensor | float | None = None
        self._num_grad_starts = 0
        self._noted: dict[str, float] = {}
        self._steps: collections.deque[Numbers] = collections.deque(maxlen=TIMELINE_STEPS)
        self._started = time.perf_counter()

    def end_step(
        self,
        place: int,
        number: int,
        rate: Any,
        scale: torch.Tensor | None,
        now: float,
        optimizer: weakref.ref[torch.optim.Optimizer] | None,
    ) -> None:
        """A step is over: the ``place``-th that any optimizer made, in iteration ``number``."""
        seconds = now - self._started
        noted, self._noted = self._noted, {}
        loss = self.likely_loss
        self._steps.append(Numbers(place, number, loss, rate, self.grad_norm, scale, seconds, optimizer, noted))
        self._started = now
        self.loss = self.grad_norm = self._grad_start = None
        self._num_grad_starts = 0

    @property
    def likely_loss(self) -> torch.Tensor | float | None:
        """The loss of the running step: without one, what its only call of `torch.autograd.grad` started from."""
        return self._grad_start if self.loss is None else self.loss

    def start_grad(self, number: torch.Tensor | float) -> None:
        """`torch.autograd.grad` starts from this number; of several none is known to be the loss, and none is kept."""
        self._num_grad_starts += 1
        self._grad_start = number if self._num_grad_starts == 1 else None

    def last(self) -> StepNumbers:
        """The step that has just ended."""
        return _turn(self._steps[-1]).numbers

    def after(self, place: int) -> list[Numbers]:
        """The steps behind the one at ``place``."""
        steps = self._steps
        return [steps[n] for n in range(-min(len(steps), steps[-1].place - place), 0)] if steps else []

    def note(self, numbers: Mapping[str, float]) -> None:
        """Add numbers of the loop's own to the running step; between two steps to the one before."""
        is_between = self.likely_loss is None and bool(self._steps)
        (self._steps[-1].noted if is_between else self._noted).update(numbers)

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._started += seconds

    def until(self, place: int, number: int, loss: float | None) -> list[Turn]:
        """The steps up to the one at ``place``, which is iteration ``number`` and may be running still."""
        steps = [_turn(step) for step in self._steps if step.place <= place]
        if any(step.place == place for step in self._steps):
            return steps
        running = StepNumbers(number, loss, grad_norm=number_of(self.grad_norm), noted=self._noted or None)
        return [*steps, Turn(running, None)]


def _turn(step: Numbers) -> Turn:
    loss, rate, norm, scale = map(number_of, (step.loss, step.rate, step.norm, step.scale))
    numbers = StepNumbers(step.step, loss, rate, norm, scale, round(step.seconds, 6), noted=step.noted or None)
    optimizer = step.optimizer() if step.optimizer is not None else None
    return Turn(numbers, id(step.optimizer if optimizer is None else optimizer) if step.optimizer is not None else None)


def with_optimizers(turns: Sequence[Turn], names: Mapping[int, str]) -> list[StepNumbers]:
    """The steps with the names of their optimizers where several take turns, else without.

    ``names`` are by ``id``. A step that is not over is given to the optimizer whose turn it should be.
    """
    order = [turn.optimizer for turn in turns if turn.optimizer is not None]
    if turns and turns[-1].optimizer is None and order:
        order.append(_next(order))
    num_turns = sum(one != other for one, other in itertools.pairwise(order))
    if not 1 < len(set(order)) <= min(num_turns, _MOST_SERIES):
        return [turn.numbers for turn in turns]
    known = {key: names.get(key, f"optimizer {number}") for number, key in enumerate(dict.fromkeys(order), 1)}
    return [replace(turn.numbers, optimizer=known.get(turn.optimizer or 0, known[order[-1]])) for turn in turns]


def _next(order: list[int]) -> int:
    """Whose turn it is: that of the optimizer that followed when the last turns were the same for the longest time."""
    for length in range(len(order) - 1, 0, -1):
        for end in range(len(order) - 1, length - 1, -1):
            if order[end - length : end] == order[-length:]:
                return order[end]
    return order[0]


class Iterations:
    """``completed`` iterations, and ``micro_step`` backward calls made in the one that is running."""

    def __init__(self) -> None:
        self.completed = 0
        self.micro_step = 0
        self.total = 0
        self._counts: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._parameters: dict[int, set[int]] = {}
        self._supposed: dict[int, tuple[int, int]] = {}  # who seems to have been replaced, and how far it was
        self._last: int | None = None

    def attempts(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps of this very optimizer were attempted."""
        known = self._optimizers.get(id(optimizer))
        return self._attempts[id(optimizer)] if known is not None and known() is optimizer else 0

    def attempted(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of ``optimizer`` ended or was skipped by a grad scaler."""
        key = id(optimizer)
        known = self._optimizers.get(key)
        if known is None or known() is not optimizer:
            own = {id(parameter) for parameter in parameters_of(optimizer)}
            inherited = [
                count
                for other, count in self._counts.items()
                if self._optimizers[other]() is None or own & self._parameters[other] or other == key
            ]
            self._counts[key], self._attempts[key] = max(inherited, default=0), 0
            self._optimizers[key], self._parameters[key] = weakref.ref(optimizer), own
        self._counts[key] += 1
        self._attempts[key] += 1
        self.total += 1
        if len(self._counts) > 1:
            self._notice_replacement(key)
        self._last = key
        if self._counts[key] > self.completed:
            self.completed = self._counts[key]
            self.micro_step = 0

    def _notice_replacement(self, key: int) -> None:
        """A new optimizer that steps twice in a row goes on for an older one, unless that one steps again."""
        for new, (old, count) in list(self._supposed.items()):
            if old == key:
                self._counts[new] -= count
                self.completed = max(self._counts.values())
                del self._supposed[new]
        is_new = self._attempts[key] == self._counts[key] == 2
        if is_new and self._last == key and key not in self._supposed:
            old = max((other for other in self._counts if other != key), key=self._counts.__getitem__)
            if list(self._counts).index(old) < list(self._counts).index(key):
                self._supposed[key] = (old, self._counts[old])
                self._counts[key] += self._counts[old]

    def updated_by_hand(self) -> None:
        """The loop changed parameters without an optimizer."""
        self.completed += 1
        self.total += 1
        self.micro_step = 0


COLLAPSED_SCALE = 1.0
SKIPPED_STREAK = 100


class ScalerWatch:
    """Counts the steps that a grad scaler leaves out in a row."""

    def __init__(self) -> None:
        self.is_used = False
        self.scale: torch.Tensor | None = None  # of the last loss
        self._skipped = 0

    def scaled(self, scaler: torch.amp.GradScaler) -> torch.Tensor | None:
        """A loss was scaled; a copy of the scale it was scaled with."""
        scale = scaler._scale
        self.is_used = self.is_used or scale is not None
        self.scale = scale.detach().clone() if scale is not None else None
        return self.scale

    def stepped(self) -> None:
        """The scaler let the optimizer step."""
        self._skipped = 0

    def skipped(self, scaler: torch.amp.GradScaler) -> bool:
        """The scaler left a step out; whether that is no longer its normal search for a scale."""
        self._skipped += 1
        return self._skipped >= SKIPPED_STREAK or (self._skipped > 1 and scaler.get_scale() < COLLAPSED_SCALE)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every parameter of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]
