"""Detectors: read the numbers that a step has left anyway and say when one of them has left its course.

They look at the loss, the norm that the loop clips its gradients by, and the scale of a grad scaler; nothing is
computed for them, and a device is not waited for. Numbers are looked at in batches of steps: between the kernels of a
step the caches are cold, so that one look at many costs little more than at one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from reprokit.locate.quantity import number_of
from reprokit.series.course import OF_NORMS, Course, Departure, Value
from reprokit.series.events import EventKind

BATCH = 32  # steps whose numbers are looked at together
_NORMS_IN_A_ROW = 5  # of gradients: their norm varies more than the loss
_FALLS = 6  # of a scale in a row; a scaler that has grown its scale once too often makes one or two
_SETTLED = 20  # steps in which a grad scaler looks for its first scale


_NEAR = (float, type(None))  # most values, known without a look
_Courses = dict[int, Course]


class Numbers(NamedTuple):
    """The numbers of one step as they are kept: tensors or numbers. ``seat`` is that of its optimizer, ``noted`` are
    the loop's own."""

    place: int
    step: int
    loss: Any
    rate: Any
    norm: Any
    scale: Any
    seconds: float
    seat: int
    noted: dict[str, float]


class Alarm(NamedTuple):
    """A departure from its course, and what kind of an event it is. ``shown_by`` is the step whose number shows it."""

    kind: EventKind
    departure: Departure
    shown_by: int

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

    ``way`` is ``zeros`` if its gradient is zero from there on, ``none`` if it has none any more.
    """

    kind: EventKind
    name: str
    way: str
    num_steps: int
    place: int
    step: int
    key: int


class Detectors:
    """Follows the numbers of a run and calls ``on_alarm`` with an alarm as soon as a number shows one.

    ``kinds`` are those that are looked for. Each optimizer has numbers of its own.
    """

    def __init__(self, kinds: Collection[EventKind], on_alarm: Callable[[Alarm], None]) -> None:
        self._kinds = frozenset(kinds)
        self._on_alarm = on_alarm
        self._losses: _Courses = {}
        self._norms: _Courses = {}
        self._scale = _ScaleFalls()
        self._sent: list[_Sent] = []

    def see(self, steps: Sequence[Numbers]) -> None:
        """The numbers of the next steps. Those on a device are sent to the host, for `arrive` to look at."""
        values = [value for numbers in steps for value in (numbers.loss, numbers.norm, numbers.scale)]
        far = [value for value in values if value.__class__ not in _NEAR and _is_far(value)]
        if far or self._sent:
            self._sent.append(_Sent(steps, values, *_send(far)))
        else:
            self._follow(steps, map(number_of, values))

    def arrive(self, *, waits: bool) -> None:
        """Look at the numbers that have come from a device; with ``waits`` at all that were sent."""
        while self._sent and (waits or self._sent[0].event is None or self._sent[0].event.query()):
            steps, values, host, event = self._sent.pop(0)
            if event is not None:
                event.synchronize()
            arrived = iter(host.tolist())
            self._follow(steps, (next(arrived) if _is_far(value) else number_of(value) for value in values))

    @property
    def is_waiting(self) -> bool:
        """True if numbers were sent that have not been looked at."""
        return bool(self._sent)

    @property
    def pending(self) -> Alarm | None:
        """The alarm that a failure of now stands for: numbers are off their course, though not for long enough."""
        kinds: tuple[tuple[EventKind, Iterable[Course]], ...]
        kinds = (("spike", self._losses.values()), ("explosion", self._norms.values()))
        for kind, courses in kinds:
            found = [one for course in courses if (one := course.pending) is not None]
            if found:
                first = min(found, key=lambda one: one.began.place)
                return Alarm(kind, first, first.values[-1].step)
        return None

    def forget(self) -> None:
        """Let go of tensors."""
        self._sent = []

    def _follow(self, steps: Iterable[Numbers], values: Iterator[float | None]) -> None:
        """Steps, and for each of them the loss, the norm and the scale."""
        kinds, losses, norms = self._kinds, self._losses, self._norms
        for numbers, loss, norm, scale in zip(steps, values, values, values, strict=False):
            place, step, key = numbers.place, numbers.step, numbers.seat
            rate = numbers.rate if numbers.rate.__class__ is float else None
            if loss is not None and "spike" in kinds:
                course = losses.get(key)
                if course is None:
                    course = losses[key] = Course()
                departure = course.add(place, step, loss, rate)
                if departure is not None:
                    self._on_alarm(Alarm("spike", departure, step))
            is_skipped = (
                scale is not None and norm is not None and not math.isfinite(norm)
            )  # a scaler looks for its scale
            if norm is not None and norm != 0.0 and not is_skipped and "explosion" in kinds:
                course = norms.get(key)
                if course is None:
                    course = norms[key] = Course(_NORMS_IN_A_ROW, OF_NORMS)
                departure = course.add(place, step, norm, rate)
                if departure is not None:
                    self._on_alarm(Alarm("explosion", departure, step))
            if scale is not None and "scale" in kinds:
                departure = self._scale.add(Value(place, step, scale))
                if departure is not None:
                    self._on_alarm(Alarm("scale", departure, step))


class _Sent(NamedTuple):
    """Steps, their values, those of them that are on a device on their way to the ``host``, and when they are there."""

    steps: Sequence[Numbers]
    values: list[Any]
    host: torch.Tensor
    event: Any  # of CUDA


def _send(far: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Send numbers on a device to the host together, without waiting for them."""
    if not far:
        return torch.empty(0), None
    with torch.cuda.device(far[0].device), torch.no_grad():
        together = torch.stack([value.detach().to(far[0].device, torch.float32).reshape(()) for value in far])
        host = torch.empty(len(far), pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return host, event


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
    return isinstance(value, torch.Tensor) and value.is_cuda
