"""The last steps in numbers (loss, learning rate, gradient norm, scale, seconds), and the count of iterations.

Losses, norms and scales are kept as the tensors they are and turned into numbers only when somebody asks.

An iteration is what a person would count, however many optimizers there are: it ends before an optimizer steps a second
time. An optimizer that holds parameters of an older one takes its seat. One whose parameters no module had before the
last update trains another model: a process may train several, one after the other, and the timeline shows that of one.
Steps that a grad scaler skips are normal; a scale that collapses is a failure.
"""

from __future__ import annotations

import collections
import itertools
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from reprokit import torch_private
from reprokit.locate.quantity import number_of
from reprokit.series.detectors import Numbers
from reprokit.series.story import StepNumbers

TIMELINE_STEPS = 100
_MOST_SERIES = 4  # optimizers with a series of their own; more are parts of one, such as one for each parameter
BY_HAND = -1  # the seat of updates that the loop makes itself
_LONGEST = 64  # steps in a row that are told apart: a critic may make some before the generator makes one


class Timeline:
    """Notes of the last `TIMELINE_STEPS` steps. ``loss`` and ``grad_norm`` are those of the step that is running.

    ``_grad_start`` is the number that the only call of `torch.autograd.grad` started from in it.
    """

    def __init__(self) -> None:
        self.loss: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | float | None = None
        self._grad_start: torch.Tensor | float | None = None
        self._num_grad_starts = 0
        self._noted: dict[str, float] = {}
        self._steps: collections.deque[Numbers] = collections.deque(maxlen=TIMELINE_STEPS)
        self._started = time.perf_counter()

    def end_step(self, place: int, number: int, rate: Any, scale: torch.Tensor | None, now: float, seat: int) -> None:
        """A step is over: the ``place``-th that any optimizer made, in iteration ``number``."""
        seconds = now - self._started
        noted, self._noted = self._noted, {}
        loss = self.likely_loss
        self._steps.append(Numbers(place, number, loss, rate, self.grad_norm, scale, seconds, seat, noted))
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

    def last(self, names: Mapping[int, str]) -> StepNumbers:
        """The step that has just ended, with the name of its optimizer if ``names`` by seat has one."""
        return replace(_plain(self._steps[-1]), optimizer=names.get(self._steps[-1].seat))

    def seat_of(self, place: int, running: int) -> int:
        """The seat of the optimizer that made the step at ``place``; ``running`` if that is not over."""
        return next((row.seat for row in reversed(self._steps) if row.place == place), running)

    def until(
        self, place: int, step: int, loss: float | None, running: int, kin: Collection[int], names: Mapping[int, str]
    ) -> list[StepNumbers]:
        """The steps of optimizers in the seats ``kin`` up to the one at ``place``, which is iteration ``step``.

        That may be running still, for the optimizer in the seat ``running``. Where several optimizers take turns their
        steps have ``names``, by seat.
        """
        rows = [row for row in self._steps if row.place <= place and row.seat in kin]
        found, seats = [_plain(row) for row in rows], [row.seat for row in rows]
        if not any(row.place == place for row in rows):
            found.append(StepNumbers(step, loss, grad_norm=number_of(self.grad_norm), noted=self._noted or None))
            seats.append(running)
        num_turns = sum(one != other for one, other in itertools.pairwise(seats))
        if not 1 < len(set(seats)) <= min(num_turns, _MOST_SERIES):
            return found
        known = {seat: names.get(seat, f"optimizer {number}") for number, seat in enumerate(dict.fromkeys(seats), 1)}
        return [replace(row, optimizer=known[seat]) for row, seat in zip(found, seats, strict=True)]


def _plain(row: Numbers) -> StepNumbers:
    loss, rate, norm, scale = map(number_of, (row.loss, row.rate, row.norm, row.scale))
    return StepNumbers(row.step, loss, rate, norm, scale, round(row.seconds, 6), noted=row.noted or None)


class Iterations:
    """``completed`` is the running iteration, ``micro_step`` the backward calls made in it, ``total`` all updates.

    Every optimizer has a seat, a small number. ``completed`` supposes that the optimizer steps next which did so after
    the same turns before; `running` knows more of a step that failed.
    """

    def __init__(self) -> None:
        self.completed = self.micro_step = self.total = 0
        self._seats: dict[int, int] = {BY_HAND: BY_HAND}  # by the ``id`` of the optimizer
        self._refs: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._attempts: dict[int, int] = {}
        self._owned: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # parameters by seat
        self._met: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # parameters, and the updates before each
        self._idle: set[int] = set()  # parameters with a gradient that no optimizer has used
        self._only: weakref.ref[torch.optim.Optimizer] | None = None  # the only optimizer so far
        self._current, self._stepped = -1, set[int]()  # the last iteration with an update, and the seats that made some
        self._last: dict[int, int] = {}  # iteration of the last update, by seat
        self._models: dict[int, int] = {BY_HAND: 0}  # the number of the model that a seat trains
        self._began: dict[int, int] = {0: 0}  # its first iteration
        self._supposed: int | None = None  # a seat that seems to have begun something new, and the turns so far
        self._turn: tuple[int | None, int, int | None] = (None, 0, None)  # seat, how many times, the seat before
        self._after: dict[tuple[int | None, int, int | None], int] = {}

    def meet(self, module: torch.nn.Module) -> None:
        """A module is called for the first time."""
        parameters: list[torch.Tensor] = list(module.parameters())
        if parameters:  # those of models that are gone are forgotten
            self._met = {key: pair for key, pair in self._met.items() if pair[1]() is not None}
            self._met.update((id(parameter), (self.total, weakref.ref(parameter))) for parameter in parameters)
            self._idle.difference_update(map(id, parameters))

    def attempts(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps of this very optimizer were attempted."""
        return self._attempts[id(optimizer)] if self._knows(optimizer) else 0

    def seat(self, optimizer: torch.optim.Optimizer | None) -> int:
        """The seat of an optimizer, ``None`` for updates by hand; a new one takes that of one with its parameters."""
        if optimizer is None:
            return BY_HAND
        if self._knows(optimizer):
            return self._seats[id(optimizer)]
        own = {id(parameter): weakref.ref(parameter) for parameter in parameters_of(optimizer)}
        self._owned = {seat: self._owned[seat] if self._alive(seat) else {} for seat in self._owned}
        older = [seat for seat in self._owned if self._alive(seat) & own.keys()]
        seat = older[-1] if older else len(self._owned)
        self._seats[id(optimizer)], self._refs[id(optimizer)] = seat, weakref.ref(optimizer)
        self._owned[seat] = self._owned.get(seat, {}) | own
        self._attempts[id(optimizer)] = 0
        return seat

    def of(self, optimizer: torch.optim.Optimizer | None) -> int:
        """The iteration that an update which is about to be made, or attempted, belongs to."""
        if optimizer is not None and self._only is not None and self._only() is optimizer:
            return self._current + 1
        seat = self.seat(optimizer)
        return self._of(seat, self._owned.get(seat, ()))

    def attempted(self, optimizer: torch.optim.Optimizer | None) -> None:
        """A step of ``optimizer`` ended or was skipped by a grad scaler; ``None``: the loop updated by itself."""
        if optimizer is not None and self._only is not None and self._only() is optimizer:  # as nearly always
            self.total += 1
            self._attempts[id(optimizer)] += 1
            self._current += 1
            self._last[0] = self._current
            self._turn = (0, min(self._turn[1] + 1, _LONGEST), None)
            self.completed, self.micro_step = self._current + 1, 0
            return
        seat = self.seat(optimizer)
        step, is_new = self._of(seat, self._owned.get(seat, ())), seat not in self._last
        if is_new and seat != BY_HAND:
            self._suppose(seat, step)
        elif self._supposed not in (None, seat):
            self._suppose_nothing(seat)
        if step != self._current or seat in self._stepped:
            self._stepped.clear()
        self._current = self._last[seat] = step
        self._stepped.add(seat)
        if optimizer is not None:
            self._attempts[id(optimizer)] += 1
        self.total += 1
        self._only = self._refs.get(id(optimizer)) if len(self._last) == 1 and seat == 0 else None
        before, count, earlier = self._turn
        if before is not None:
            self._after[self._turn] = self._after[before, count, None] = seat
        self._turn = (seat, min(count + 1, _LONGEST), earlier) if before == seat else (seat, 1, before)
        following = self._following
        completed = self._of(seat if following is None else following, ())
        self.micro_step = self.micro_step if completed == self._current else 0
        self.completed = completed

    def running(self, leaves: Iterable[int] = ()) -> tuple[int, int]:
        """The iteration of the running step, and the seat of the optimizer that would have made its update, which may
        be a new one; ``leaves`` are the ``id``s of parameters that it differentiates by."""
        behind = set(leaves)
        strangers = (behind & self._met.keys()).difference(self._idle, *map(self._alive, self._owned))
        following = self._following
        is_by_hand = following == BY_HAND and not self._owned  # nobody says which parameters such updates are of
        if following is None or (strangers and not is_by_hand):
            seat = len(self._owned)
            return self._of(seat, strangers), seat
        known = [seat for seat in self._owned if behind & self._alive(seat)]
        seat = following if following in known or not known else known[-1]
        return self._of(seat, ()), seat

    def kin(self, seat: int, step: int) -> set[int]:
        """The seats of the optimizers that train the same model as the one in ``seat``, whose update is iteration
        ``step``."""
        model = self._models.get(seat)
        if model is None:  # it has not stepped yet
            model = self._models[self._turn[0]] if self._turn[0] is not None and step == self._current else None
        return {seat, *(other for other, number in self._models.items() if number == model and model is not None)}

    def began(self, seat: int, step: int) -> int:
        """The first iteration of the model that is trained from a seat in iteration ``step``."""
        models = [self._models[other] for other in self.kin(seat, step) if other in self._models]
        return min((self._began[model] for model in models), default=step)

    def names(self, names: Mapping[int, str]) -> dict[int, str]:
        """Names of optimizers, given by ``id``, by their seats."""
        return {seat: names[key] for key, seat in self._seats.items() if key in names}

    @property
    def has_several(self) -> bool:
        """True if several optimizers train one model, as far as is known."""
        model = self._models.get(self._turn[0] or 0)
        return 1 < sum(self._models.get(seat) == model for seat in self._owned) <= _MOST_SERIES

    def _knows(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._refs.get(id(optimizer))
        return known is not None and known() is optimizer

    @property
    def _following(self) -> int | None:
        """The seat that is supposed to make the next update."""
        seat, count, _ = self._turn
        return self._after.get(self._turn, self._after.get((seat, count, None), seat))

    def _alive(self, seat: int) -> set[int]:
        return {key for key, reference in self._owned[seat].items() if reference() is not None}  # an id may come back

    def _of(self, seat: int, own: Collection[int]) -> int:
        if seat in self._last:
            if self._supposed not in (None, seat):  # what seemed to be new takes turns with this one
                return self._last[seat] + 1
            return self._current + (seat in self._stepped)
        return self._current + (self._current < 0 or not self._joins(own))

    def _joins(self, own: Collection[int]) -> bool:
        """True if an optimizer that has never stepped belongs to the iteration of the last update: its parameters were
        there before, and no other optimizer has made several steps alone."""
        return self._turn[1] == 1 and not self._is_other_model(own)

    def _is_other_model(self, own: Collection[int]) -> bool:
        return bool(own) and all(key in self._met and self._met[key][0] >= self.total for key in own)

    def _suppose(self, seat: int, step: int) -> None:
        """An optimizer steps for the first time: for the model of the one before, or for another one."""
        before = self._turn[0]
        is_other = self._current >= 0 and self._is_other_model(self._owned[seat])
        self._models[seat] = len(self._began) if is_other else self._models[before] if before is not None else 0
        unused = (self._met.keys() - self._idle).difference(*map(self._alive, self._owned))
        self._idle |= {key for key in unused if getattr(self._met[key][1](), "grad", None) is not None}
        self._began.setdefault(self._models[seat], step)
        self._supposed = seat if step > self._current >= 0 else None

    def _suppose_nothing(self, seat: int) -> None:
        """An older optimizer steps again: those that have begun since train the same model, in the same iterations."""
        model, last = self._models[seat], self._last[seat]
        later = {number for other, number in self._models.items() if self._last.get(other, -1) > last}
        self._models.update({other: model for other, number in self._models.items() if number in later})
        self._supposed = None


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
        scale = torch_private.scale_of(scaler)
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
