"""Detectors: read the numbers that a step has left anyway and say when one of them has left its course.

They look at the loss, the norm that the loop clips its gradients by, and the scale of a grad scaler; nothing is
computed for them, and a device is not waited for: numbers that are on one are sent to the host in batches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from reprokit.capture.early.alarm import EventKind
from reprokit.capture.early.course import Course, Departure, Value
from reprokit.locate.quantity import number_of

_BATCH = 8  # steps whose numbers are sent to the host together
_NORMS_IN_A_ROW = 5  # of gradients: their norm varies more than the loss
_LEAST_RATIO_OF_NORMS = 0.3
_FALLS = 6  # of a scale in a row; a scaler that has grown its scale once too often makes one or two
_SETTLED = 20  # steps in which a grad scaler looks for its first scale


class Numbers(NamedTuple):
    """The numbers of one step as they are kept: tensors or numbers."""

    place: int
    step: int
    loss: Any
    norm: Any
    scale: Any
    rate: Any
    optimizer: weakref.ref[torch.optim.Optimizer] | None


class Alarm(NamedTuple):
    """A departure from its course, and what kind of an event it is."""

    kind: EventKind
    departure: Departure

    @property
    def place(self) -> int:
        """The place of the step where it began, among those of all optimizers."""
        return self.departure.began.place

    @property
    def step(self) -> int:
        """The step where it began."""
        return self.departure.began.step


class Finding(NamedTuple):
    """A parameter (its name and ``id``) that learns nothing, and the first ``step`` that shows it; ``num_steps`` played
    ones do.

    ``way`` is ``zeros`` if its gradient is zero from there on, ``none`` if it has none any more, ``nan`` if a hook
    makes it finite in that step.
    """

    kind: EventKind
    name: str
    way: str
    num_steps: int
    place: int
    step: int
    key: int


class Detectors:
    """Follows the numbers of a run and calls ``on_alarm`` with an alarm as soon as there is one.

    ``kinds`` are those that are looked for. Each optimizer has numbers of its own.
    """

    def __init__(self, kinds: Collection[EventKind], on_alarm: Callable[[Alarm], None]) -> None:
        self._kinds = frozenset(kinds)
        self._on_alarm = on_alarm
        self._losses: dict[weakref.ref[torch.optim.Optimizer] | None, Course] = {}
        self._norms: dict[weakref.ref[torch.optim.Optimizer] | None, Course] = {}
        self._scale = _ScaleFalls()
        self._waiting: list[Numbers] = []
        self._sent: list[tuple[list[Numbers], torch.Tensor, Any]] = []

    def see(self, numbers: Numbers) -> None:
        """The numbers of a step that is over."""
        loss, norm, scale = numbers.loss, numbers.norm, numbers.scale
        if _is_far(loss) or _is_far(norm) or _is_far(scale) or self._waiting or self._sent:
            self._wait(numbers)
        else:
            self._follow(numbers, number_of(loss), number_of(norm), number_of(scale))

    @property
    def pending(self) -> Alarm | None:
        """The alarm that a failure of now stands for: numbers are off their course, though not for long enough."""
        for kind, courses in (("spike", self._losses), ("explosion", self._norms)):
            found = [course.pending for course in courses.values()]
            first = min((one for one in found if one is not None), key=lambda one: one.began.place, default=None)
            if first is not None:
                return Alarm(kind, first)  # type: ignore[arg-type]
        return None

    def forget(self) -> None:
        """Let go of tensors."""
        self._waiting, self._sent = [], []

    def _follow(self, numbers: Numbers, loss: float | None, norm: float | None, scale: float | None) -> None:
        place, step, key = numbers.place, numbers.step, numbers.optimizer
        rate = numbers.rate if numbers.rate.__class__ is float else None
        if loss is not None and "spike" in self._kinds:
            course = self._losses.get(key)
            if course is None:
                course = self._losses[key] = Course()
            departure = course.add(place, step, loss, rate)
            if departure is not None:
                self._on_alarm(Alarm("spike", departure))
        is_skipped = scale is not None and norm is not None and not math.isfinite(norm)  # a scaler looks for its scale
        if norm is not None and norm != 0.0 and not is_skipped and "explosion" in self._kinds:
            course = self._norms.get(key)
            if course is None:
                course = self._norms[key] = Course(_NORMS_IN_A_ROW, _LEAST_RATIO_OF_NORMS)
            departure = course.add(place, step, norm, rate)
            if departure is not None:
                self._on_alarm(Alarm("explosion", departure))
        if scale is not None and "scale" in self._kinds:
            departure = self._scale.add(Value(place, step, scale))
            if departure is not None:
                self._on_alarm(Alarm("scale", departure))

    def _wait(self, numbers: Numbers) -> None:
        """Keep numbers until they are on the host."""
        self._waiting.append(numbers)
        if len(self._waiting) >= _BATCH:
            self._send()
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            self._arrive()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        rows = [value for numbers in waiting for value in (numbers.loss, numbers.norm, numbers.scale)]
        far = [value for value in rows if _is_far(value)]
        event, host = None, torch.empty(0)
        if far:
            with torch.cuda.device(far[0].device), torch.no_grad():
                together = torch.stack([value.detach().to(far[0].device, torch.float32).reshape(()) for value in far])
                host = torch.empty(len(far), pin_memory=True)
                host.copy_(together, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        self._sent.append((waiting, host, event))

    def _arrive(self) -> None:
        waiting, host, _ = self._sent.pop(0)
        arrived = iter(host.tolist())
        for numbers in waiting:
            values = (numbers.loss, numbers.norm, numbers.scale)
            loss, norm, scale = (next(arrived) if _is_far(value) else number_of(value) for value in values)
            self._follow(numbers, loss, norm, scale)


class _ScaleFalls:
    """A scale that falls many times in a row after it had settled. The first of the ``_falls`` is the step before it,
    whose gradients have overflowed."""

    def __init__(self) -> None:
        self._last: Value | None = None
        self._healthy: Value | None = None
        self._falls: list[Value] = []
        self._num_steps = 0

    def add(self, value: Value) -> Departure | None:
        """Take the scale of a step."""
        last, self._last = self._last, value
        self._num_steps += 1
        if last is None or value.number >= last.number or self._num_steps <= _SETTLED:
            self._healthy, self._falls = last, []
            return None
        self._falls.append(last)
        if len(self._falls) != _FALLS:
            return None
        first = self._falls[0]
        return Departure("error", (*self._falls, value), first.number, first.number, self._healthy or first)


def _is_far(value: Any) -> bool:
    """True for a number on a CUDA device."""
    return value.__class__ is not float and isinstance(value, torch.Tensor) and value.is_cuda
