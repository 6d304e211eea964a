"""Norms of gradients and weights of every parameter, measured while the training runs (`--record`).

Never more than a small share of the time on ``auto``: after every measurement it waits until its own cost is paid for.
One fused norm over all gradients and one over all weights; a device is waited for twice.
"""

from __future__ import annotations

import collections
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from reprokit.errors import UsageError, ignored_errors
from reprokit.locate.quantity import norms_of, numbers_of
from reprokit.locate.ways import local_part
from reprokit.series.story import RecordedStep, StepNumbers
from reprokit.series.timeline import parameters_of

AUTO_SHARE = 0.003  # of the time: with the work around it that stays below the 0.5% that is promised
_LEAST_STEPS, _MOST_STEPS = 10, 100  # the timeline has 100
_MOST_NUMBERS = 20_000  # of each kind in a file
_SHOWN = 6
FIRST_STEPS = 3  # a parameter that is used has a gradient in one of them
_FIRST_ON_AUTO = 1  # the first step of a training allocates the memory of gradients and kernels


@dataclass(frozen=True, slots=True)
class Pace:
    """When to measure: every ``every`` steps, or when the last time is paid for; ``pattern`` chooses parameters."""

    every: int | None = None
    pattern: str | None = None


def read_pace(text: str) -> Pace:
    """``auto``, ``N`` or ``N:PATTERN``; raises `UsageError`."""
    number, _, pattern = text.partition(":")
    if number != "auto" and not (number.isdigit() and int(number) >= 1):
        hint = "it is auto, a number of steps, or one with a pattern such as 10:h.0.*"
        raise UsageError(f"`record` cannot be {text!r}", hint=hint)
    return Pace(None if number == "auto" else int(number), pattern or None)


class NormMeter:
    """Measures the parameters of an optimizer right after its step, when the gradients are still there; gradients that
    the loop clips right before that.

    ``names`` gives the names of parameters by ``id``; it is asked again for a parameter that it did not know. ``say``
    prints the parameters that got no gradient, once. ``hand_over`` is given the numbers of a step that was measured.
    """

    def __init__(self, pace: Pace, names: Callable[[], Mapping[int, str]]) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self.hand_over: Callable[[StepNumbers, RecordedStep], None] = lambda numbers, row: None
        self.optimizer_names: Callable[[], Mapping[int, str]] = dict
        self.steps: collections.deque[RecordedStep] = collections.deque()
        self._pace = pace
        self._ask_names = names
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # an id may come back
        self._next = 0.0
        self._last_step = -1
        self._is_off = False
        self._met: dict[int, torch.Tensor] | None = {}  # parameters of the first steps
        self._with_gradient: set[int] = set()
        self._before: dict[int, Measured] = {}  # gradients before they were clipped, by the ``id`` of the parameter

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched: it pays for nothing."""
        self._next += seconds

    def forget(self) -> None:
        """Let go of the user's parameters."""
        self._met = None

    def before_clip(self, step: int, parameters: Any) -> None:
        """The loop is about to clip the gradients of these."""
        if not self._is_due(step):
            return
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        given = {id(p): p.grad for p in parameters if isinstance(p, torch.Tensor) and p.grad is not None}
        self._before |= dict(zip(given, _measured(list(given.values())), strict=True))

    def measure(self, step: int, optimizer: torch.optim.Optimizer) -> RecordedStep | None:
        """The numbers of an optimizer that has made its step, if it is to be measured. Waits for a device twice."""
        if self._met is not None:
            self._look_for_gradients(step, optimizer, self._met)
        before, self._before = self._before, {}
        if not (before or self._is_due(step)) or self._is_off:
            return None
        if is_capturing():  # a graph would replay the measuring, and reading a number ends its capture
            self._is_off = True
            self.say("`--record` is off: the optimizer steps inside of a CUDA graph")
            return None
        started = time.perf_counter()
        parameters = [p for p in parameters_of(optimizer) if not p.is_meta]
        named = {id(p): (name, p) for p in parameters if (name := self._name(p)) is not None}
        given = {id(p): p.grad for p in parameters if p.grad is not None}
        now = dict(zip(given, _measured(list(given.values())), strict=True))
        with torch.no_grad():
            weights = norms_of([local_part(p.detach()) for _, p in named.values()])
        found = {name: before.get(key, now[key]) for key, (name, _) in named.items() if key in now}
        ended = time.perf_counter()
        self._next, self._last_step = ended + (ended - started) / AUTO_SHARE, step
        return RecordedStep(
            step,
            dict(zip((name for name, _ in named.values()), weights, strict=True)),
            {name: one.norm for name, one in found.items()},
            {name: one.zeros for name, one in found.items()},
            math.hypot(*(before.get(key, one).norm for key, one in now.items())),
            math.hypot(*(one.norm for one in now.values())) if before else None,
        )

    def keep(self, row: RecordedStep, numbers: StepNumbers) -> None:
        """Remember the numbers of a step and hand them over; those of all optimizers of a step are one row."""
        self.hand_over(numbers, row)
        if self.steps and self.steps[-1].step == row.step:
            row = self.steps.pop().joined(row)
        if row.weight_norm or row.grad_norm:  # else no parameter of a step fits the pattern
            self.steps.append(row)
        if len(self.steps) > max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_NUMBERS // max(1, len(row.weight_norm)))):
            self.steps.popleft()

    def _is_due(self, step: int) -> bool:
        every = self._pace.every  # every optimizer of a step is measured, or none
        if every is not None:
            return step % every == 0
        return step == self._last_step or (step >= _FIRST_ON_AUTO and time.perf_counter() >= self._next)

    def _name(self, parameter: torch.Tensor) -> str | None:
        reference, name = self._names.get(id(parameter), (None, ""))
        if reference is None or reference() is not parameter:
            known: Mapping[int, str] = {}
            with ignored_errors():  # then the parameters have numbers for names
                known = self._ask_names()
            name = known.get(id(parameter), f"parameter {len(self._names)}")
            self._names[id(parameter)] = weakref.ref(parameter), name
        return name if self._pace.pattern is None or fnmatchcase(name, self._pace.pattern) else None

    def _look_for_gradients(self, step: int, optimizer: torch.optim.Optimizer, met: dict[int, torch.Tensor]) -> None:
        """After the first steps print the parameters that have got no gradient in any of them."""
        if step < FIRST_STEPS:
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            met |= {id(p): p for p in parameters}
            self._with_gradient |= {id(p) for p in parameters if p.grad is not None}
            return
        without = [p for key, p in met.items() if key not in self._with_gradient]
        names = [name for p in without if (name := self._name(p)) is not None]
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            self.say(f"no gradient in the first {FIRST_STEPS} steps: {shown}{more}")
        self._met = None


class Measured(NamedTuple):
    """A gradient: its norm, and the share of zeros among its elements."""

    norm: float
    zeros: float


def _measured(gradients: Sequence[torch.Tensor]) -> list[Measured]:
    with torch.no_grad():
        whole = [local_part(gradient.detach()) for gradient in gradients]
        # of a sparse gradient the elements that are stored; the others are zero
        given = [grad.coalesce().values() if grad.layout is torch.sparse_coo else grad for grad in whole]
        norms, counts = norms_of(given), numbers_of([gradient.count_nonzero() for gradient in given])
    return [
        Measured(norm, 1 - count / max(1, grad.numel())) for norm, count, grad in zip(norms, counts, given, strict=True)
    ]


def is_capturing() -> bool:
    """True while a CUDA graph is captured on the stream of now."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
