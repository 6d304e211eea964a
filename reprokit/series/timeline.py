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
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from reprokit import members, native, torch_private
from reprokit.compare.quantity import number_of
from reprokit.native import clock
from reprokit.series.story import StepNumbers

TIMELINE_STEPS = 100
_MOST_SERIES = 4  # optimizers with a series of their own; more are parts of one, such as one for each parameter
BY_HAND = -1  # the seat of updates that the loop makes itself
_TURNS = 4  # changes of the optimizer after which the next one is the same again, where three do not take equal turns
_MOST_TURNS = 1000
_LONGEST = 64  # steps in a row that are told apart: a critic may make some before the generator makes one
_COLLAPSED_SCALE = 1.0
_SKIPPED_STREAK = 100


@dataclass(eq=False, slots=True)
class Seat:
    """A place among the optimizers."""

    number: int
    # The parameters of all optimizers that have had it, by their ``id``
    owned: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    # The iteration of its last update
    last: int | None = None
    # Updates that it made in its last turn
    turn: int = 0
    # The number of the model that it trains; -1 for a seat that has not stepped yet
    model: int = -1

    @property
    def alive(self) -> set[int]:
        """The ``id``s of its parameters; that of one that is gone may come back."""
        return {key for key, reference in self.owned.items() if reference() is not None}


class Numbers(NamedTuple):
    """The numbers of one step as they are kept: tensors or numbers."""

    place: int  # among the steps of all optimizers
    step: int
    loss: Any
    rate: Any
    norm: Any
    scale: Any
    seconds: float
    seat: Seat  # of its optimizer
    noted: dict[str, float]  # by the loop

    @property
    def plain(self) -> StepNumbers:
        """The same without tensors."""
        loss, rate, norm, scale = map(number_of, (self.loss, self.rate, self.norm, self.scale))
        return StepNumbers(self.step, loss, rate, norm, scale, round(self.seconds, 6), noted=self.noted or None)


class Timeline:
    """Notes of the last `TIMELINE_STEPS` steps. ``loss`` and ``grad_norm`` are those of the step that is running; in a
    step without a backward call the loss is what its only call of `torch.autograd.grad` starts from."""

    def __init__(self) -> None:
        self.loss: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | float | None = None
        self._grad_start: torch.Tensor | float | None = None
        self._has_grad_start = False
        self._noted: dict[str, float] = {}
        self._steps: collections.deque[Numbers] = collections.deque(maxlen=TIMELINE_STEPS)
        self._started = clock.perf_counter()

    def end_step(self, place: int, number: int, rate: Any, scale: torch.Tensor | None, now: float, seat: Seat) -> None:
        """A step is over: the ``place``-th that any optimizer made, in iteration ``number``."""
        seconds, self._started = now - self._started, now
        self._steps.append(Numbers(place, number, self.loss, rate, self.grad_norm, scale, seconds, seat, self._noted))
        self.loss = self.grad_norm = self._grad_start = None
        self._has_grad_start, self._noted = False, {}

    def start_grad(self, number: torch.Tensor | float) -> None:
        """`torch.autograd.grad` starts from this number; of several none is known to be the loss, and none is kept."""
        if not self._has_grad_start and self.loss is None:
            self.loss = self._grad_start = number
        elif self.loss is self._grad_start:
            self.loss = self._grad_start = None
        self._has_grad_start = True

    def after(self, place: int) -> list[Numbers]:
        """The steps behind the one at ``place``."""
        steps = self._steps
        return [steps[n] for n in range(-min(len(steps), steps[-1].place - place), 0)] if steps else []

    def note(self, numbers: Mapping[str, float]) -> None:
        """Add numbers of the loop's own to the running step; between two steps to the one before."""
        (self._steps[-1].noted if self.loss is None and self._steps else self._noted).update(numbers)

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._started += seconds

    def last(self, names: Mapping[Seat, str]) -> StepNumbers:
        """The step that has just ended, with the name of its optimizer if ``names`` has one."""
        return replace(self._steps[-1].plain, optimizer=names.get(self._steps[-1].seat))

    def seat_of(self, place: int, running: Seat) -> Seat:
        """The seat of the optimizer that made the step at ``place``; ``running`` if that is not over."""
        return next((row.seat for row in reversed(self._steps) if row.place == place), running)

    def until(
        self, place: int, step: int, loss: float | None, seat: Seat, names: Mapping[Seat, str]
    ) -> list[StepNumbers]:
        """The steps of the model that is trained from a seat, up to its step at ``place``, which is iteration ``step``
        and may be running still. Where several optimizers take turns their steps have ``names``."""
        rows = [row for row in self._steps if row.place <= place and row.seat.model == seat.model]
        found, seats = [row.plain for row in rows], [row.seat for row in rows]
        if not any(row.place == place for row in rows):
            found.append(StepNumbers(step, loss, grad_norm=number_of(self.grad_norm), noted=self._noted or None))
            seats.append(seat)
        num_turns = sum(one is not other for one, other in itertools.pairwise(seats))
        if not 1 < len(set(seats)) <= min(num_turns, _MOST_SERIES):
            return found
        known = {one: names.get(one, f"optimizer {number}") for number, one in enumerate(dict.fromkeys(seats), 1)}
        return [replace(row, optimizer=known[one]) for row, one in zip(found, seats, strict=True)]


class Iterations:
    """``completed`` is the running iteration, ``micro_step`` the backward calls made in it, ``total`` all updates.

    ``completed`` supposes that the optimizer steps next which did so after the same turns before; `running` knows more
    of a step that failed.
    """

    def __init__(self) -> None:
        self.completed = self.micro_step = self.total = 0
        self._seats = {BY_HAND: Seat(BY_HAND)}
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], Seat]] = {}  # by the ``id`` of the optimizer
        self._met: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # parameters, and the updates before each
        self._idle: set[int] = set()  # parameters with a gradient that no optimizer has used
        self._only: weakref.ref[torch.optim.Optimizer] | None = None  # the only optimizer so far
        self._current = -1  # the last iteration with an update
        self._began: list[int] = []  # the first iteration of each model
        self._last: Seat | None = None  # that of the last update
        self._turns: tuple[tuple[int, int], ...] = ((BY_HAND, 0),)  # the last seats, and how many each made in a row
        self._after: dict[tuple[tuple[int, int], ...], Seat] = {}

    def meet(self, module: torch.nn.Module) -> None:
        """A module is called for the first time."""
        parameters: list[torch.Tensor] = [*members.parameters(module)]
        if parameters:  # those of models that are gone are forgotten
            self._met = {key: pair for key, pair in self._met.items() if pair[1]() is not None}
            self._met.update((id(parameter), (self.total, weakref.ref(parameter))) for parameter in parameters)
            self._idle.difference_update(map(id, parameters))

    def of(self, optimizer: torch.optim.Optimizer | None) -> tuple[int, Seat]:
        """The iteration that an update which is about to be made, or attempted, belongs to, and the seat of its
        optimizer; ``None``: the loop updates by itself."""
        if optimizer is not None and self._only is not None and self._only() is optimizer:  # as nearly always
            return self._current + 1, self._seats[0]
        return self._next(self._seat_of(optimizer))

    def attempted(self, optimizer: torch.optim.Optimizer | None) -> None:
        """A step of ``optimizer`` ended or was skipped by a grad scaler; ``None``: the loop updated by itself."""
        before, (number, count) = self._last, self._turns[-1]
        if before is not None and optimizer is not None and self._only is not None and self._only() is optimizer:
            self.total += 1
            self._current = before.last = self._current + 1
            self._turns = ((number, min(count + 1, _LONGEST)),)
            self.completed, self.micro_step = self._current + 1, 0
            return
        seat = self._seat_of(optimizer)
        step = self._next_of(seat)
        if seat.last is None:
            self._begin(seat, step)
        elif seat.model < len(self._began) - 1:  # what has begun since trains the same model, in the same iterations
            del self._began[seat.model + 1 :]
            for other in self._seats.values():
                other.model = min(other.model, seat.model)
        self._current = seat.last = step
        self.total += 1
        is_only = seat.number == 0 and sum(one.last is not None for one in self._seats.values()) == 1
        self._only = self._known[id(optimizer)][0] if is_only else None
        if len(self._after) > _MOST_TURNS:
            self._after.clear()
        self._after[self._turns] = self._after[self._turns[-1:]] = seat
        if before is not None and before is not seat:
            before.turn = count
        if before is seat:
            self._turns = (*self._turns[:-1], (number, min(count + 1, _LONGEST)))
        else:
            self._turns = (*self._turns, (seat.number, 1))[-_TURNS:]
        self._last = seat
        self.completed = self._next_of(self._following or seat)
        self.micro_step = self.micro_step if self.completed == self._current else 0

    def running(self, leaves: Iterable[int] = ()) -> tuple[int, Seat]:
        """The iteration of the running step, and the seat of the optimizer that would have made its update, which may
        be a new one; ``leaves`` are the ``id``s of parameters that it differentiates by."""
        behind, seats = set(leaves), list(self._seats.values())
        strangers = (behind & self._met.keys()).difference(self._idle, *(seat.alive for seat in seats))
        following = self._following
        is_by_hand = following is seats[0] and len(seats) == 1  # nobody says which parameters such updates are of
        if following is None or (strangers and not is_by_hand):
            return self._next(Seat(len(seats) - 1, {key: self._met[key][1] for key in strangers}))
        known = [seat for seat in seats if behind & seat.alive]
        return self._next(following if following in known or not known else known[-1])

    def began(self, seat: Seat, step: int) -> int:
        """The first iteration of the model that is trained from a seat in iteration ``step``."""
        return self._began[seat.model] if seat.model >= 0 else step

    def names(self, names: Mapping[int, str]) -> dict[Seat, str]:
        """Names of optimizers, given by ``id``, by their seats."""
        return {seat: names[key] for key, (_, seat) in self._known.items() if key in names}

    @property
    def has_several(self) -> bool:
        """True if several optimizers train one model, as far as is known."""
        model = self._last.model if self._last is not None else 0
        return 1 < sum(seat.model == model for seat in self._seats.values() if seat.owned) <= _MOST_SERIES

    @property
    def _following(self) -> Seat | None:
        """The seat that is supposed to make the next update."""
        return self._after.get(self._turns) or self._after.get(self._turns[-1:], self._last)

    def _seat_of(self, optimizer: torch.optim.Optimizer | None) -> Seat:
        """The seat of an optimizer; a new one takes that of one with its parameters."""
        if optimizer is None:
            return self._seats[BY_HAND]
        reference, seat = self._known.get(id(optimizer), (None, None))
        if seat is None or reference is None or reference() is not optimizer:
            own = {id(parameter): weakref.ref(parameter) for parameter in parameters_of(optimizer)}
            older = [seat for seat in self._seats.values() if seat.alive & own.keys()]
            seat = older[-1] if older else Seat(len(self._seats) - 1)
            seat.owned = {key: seat.owned[key] for key in seat.alive} | own
            self._seats[seat.number] = seat
            self._known[id(optimizer)] = weakref.ref(optimizer), seat
        return seat

    def _next(self, seat: Seat) -> tuple[int, Seat]:
        """The iteration of the next update of a seat; in one that has begun it trains the same model."""
        step, before = self._next_of(seat), self._last
        if seat.last is None and before is not None:
            seat.model = before.model if step == self._current else -1
        return step, seat

    def _next_of(self, seat: Seat) -> int:
        """The iteration of the next update of a seat. One that has never stepped belongs to the iteration of the last
        update if its parameters were there before, and no other optimizer has made several steps alone. Where each
        makes several in its turn, as the clients of federated training do, every update is an iteration."""
        if seat.last is not None and seat.last != self._current and min(seat.turn, self._turns[-1][1]) > 1:
            return self._current + 1
        if seat.last is not None:
            is_resumed = 0 <= seat.model < len(self._began) - 1  # what seemed to be another model takes turns with it
            return seat.last + 1 if is_resumed else self._current + (seat.last == self._current)
        joins = self._turns[-1][1] == 1 and not self._is_other_model(seat)
        return self._current + (self._current < 0 or not joins)

    def _is_other_model(self, seat: Seat) -> bool:
        own = seat.owned
        return bool(own) and all(key in self._met and self._met[key][0] >= self.total for key in own)

    def _begin(self, seat: Seat, step: int) -> None:
        """A seat is used for the first time: for the model of the update before, or for another one."""
        before = self._last
        if before is not None and not self._is_other_model(seat):
            seat.model = before.model
        else:
            seat.model = len(self._began)
            self._began.append(step)
        if seat.owned:
            unused = (self._met.keys() - self._idle).difference(*(other.alive for other in self._seats.values()))
            self._idle |= {key for key in unused if getattr(self._met[key][1](), "grad", None) is not None}


class ScalerWatch:
    """Counts the steps that a grad scaler leaves out in a row. ``scale`` is that of the last loss."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = None
        self.is_used = False
        self._skipped = 0

    def scaled(self, scaler: torch.amp.GradScaler) -> torch.Tensor | None:
        """A loss was scaled; a copy of the scale it was scaled with."""
        scale = torch_private.scale_of(scaler)
        self.is_used = self.is_used or scale is not None
        self.scale = native.clone(native.detach(scale)) if scale is not None else None
        return self.scale

    @property
    def num_skipped(self) -> int:
        """The steps that were left out since the last one that was not."""
        return self._skipped

    def stepped(self) -> None:
        """The scaler let the optimizer step."""
        self._skipped = 0

    def skipped(self, scaler: torch.amp.GradScaler) -> bool:
        """The scaler left a step out; whether that is no longer its normal search for a scale."""
        self._skipped += 1
        return self._skipped >= _SKIPPED_STREAK or (self._skipped > 1 and scaler.get_scale() < _COLLAPSED_SCALE)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
