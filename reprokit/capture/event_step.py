"""From an alarm to a file: go back to the step where it began, and find the call that is unlike the last healthy step.

The kept steps are played with their gradient norms and updates measured. An event begins with the first step in which
one of these, or the number that gave the alarm, is off its course for as long as the alarm lasts. That step and the
last healthy one become programs; comparing them shows the call, the input and the rows of the batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile

import torch

from reprokit.capture.calls import Backward, OptimizerStep, Unscale
from reprokit.capture.fidelity import Made
from reprokit.capture.meters import MeasuredStep, Meter
from reprokit.capture.replay import Replay, quiet_hooks
from reprokit.capture.save import Case, Describing, NotKept
from reprokit.capture.tape import Mark, Number, Op, Segment
from reprokit.capture.tensor_names import parameter_names
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.gains import blocked, explained
from reprokit.locate.let_through import let_through
from reprokit.locate.ways import bad_tensor
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program
from reprokit.program.step import Step
from reprokit.series.course import HIGH, LEAST_PLAYED, USUAL, Alarm, band_before, first_off, is_off
from reprokit.series.events import Finding

Explain = Callable[[Program, Tensors], Failure | None]

_PLAYED = 256  # steps, of those kept, that are looked at for parameters that learn nothing
_PLAYED_SECONDS = 1.0  # of CPU time for them; twice `LEAST_SILENT` steps are played however long they take
LEAST_SILENT = 20  # steps with a gradient of zeros
_MOSTLY = 0.5  # of the elements of a gradient
_SUDDEN = 8  # steps in which a layer dies that does not fade out by design
_ABOUT = 0.75  # of the usual share of a gradient that is not zero
_MOST_BESIDE = 4  # healthy steps that a failing one is compared with
_SEEN = {  # where a quantity shows
    "loss": (Phase.FORWARD, "loss"),
    "gradient norm": (Phase.BACKWARD, "gradient"),
    "update": (Phase.OPTIMIZER, "parameter"),
}


class EventStep(Describing):
    """Describes the step where an alarm began. Raises `NotKept`."""

    def made(self) -> Made:
        """The snapshot of that step."""
        alarm = self.verdict.alarm
        assert alarm is not None, "an event has an alarm"
        with self.kept() as steps:
            number = _position(steps, alarm.place)
            if number is None:
                raise NotKept(f"step {alarm.step} is no longer kept")
            quantity, explain = "gradient norm", None
            if isinstance(alarm, Finding):
                explain = self._blocked(steps, number, alarm)
            elif alarm.kind != "scale":
                number, quantity, explain = self._at_beginning_of(steps, alarm, number)
            with self._seen(steps, number, quantity) as case:
                made = self.make(replace(case, explain=explain))
            if isinstance(alarm, Finding) and made.snapshot.failure.call is None:
                raise NotKept(f"no call behind `{alarm.name}` keeps its gradient back")
            return made

    def find_silent(self, always: Set[int]) -> Finding | None:
        """A parameter that learns nothing: it gets no gradient from a step on.

        The parameters with an ``id`` in ``always`` had no gradient whenever somebody looked.
        """
        with self.kept() as steps:
            measured = self._measured(steps[:_PLAYED], _MeterWithLimit(self.loop.tape.alive()))
            return _silent(measured, parameter_names(self.loop.world.modules, self.verdict.frame), always)

    def _measured(self, steps: Sequence[Segment], meter: Meter) -> list[MeasuredStep]:
        """Play the steps and measure them; empty if a played loss differs from the one of training."""
        replay = self._replay(steps)
        with replay.going_back(), quiet_hooks(self.loop.world.modules, replay.leaves()), suppress(_OutOfTime):
            replay.play_until(len(steps), meter)
        return [] if replay.notes else meter.steps

    def _replay(self, steps: Sequence[Segment]) -> Replay:
        world = self.loop.world
        return Replay(world, self.loop.tape, steps, world.copies[0])

    def _blocked(self, steps: list[Segment], number: int, finding: Finding) -> Explain:
        """The failure of a step in which a parameter gets no gradient, or one of zeros."""
        parameters = (p for module in self.loop.world.modules for p in module.parameters())
        address = next(p.data_ptr() for p in parameters if id(p) == finding.key)
        before = steps[max(number - 1, 0)].mark.step
        event = Predicate("share of zeros", 1.0, 1.0, before, steps[number].mark.step, source=finding.name)

        def explain(program: Program, tensors: Tensors) -> Failure:
            owned = (item.value for item in program.inputs if item.role == "parameter")
            value = next((value for value in owned if tensors[value].data_ptr() == address), None)
            failure = Failure(Phase.BACKWARD, "dead", value=value, event=event)
            return blocked(Step(program, tensors), failure)

        return explain

    def _at_beginning_of(self, steps: list[Segment], alarm: Alarm, number: int) -> tuple[int, str, Explain]:
        """The position of the step in which a number has left its course, at ``number`` or before, the quantity that
        shows it, and the failure."""
        last = _position(steps, alarm.values[-1].place) or number
        measured = self._measured(steps[: max(number, last) + 1], Meter(self.loop.tape.alive()))
        begun, healthy, predicate = _beginning(steps, measured, alarm, number)
        quantity = predicate.quantity
        reference = self._program_of(steps, healthy, quantity)

        def explain(program: Program, tensors: Tensors) -> Failure:
            failure = Failure(_SEEN[quantity][0], alarm.kind, event=predicate)
            return explained(Step(program, tensors), reference, failure)

        return begun, quantity, explain

    def beside_healthy(self, made: Made) -> Made:
        """``made``, of which an input is bad, with what healthy steps before tell of that: see `let_through`."""
        snapshot = made.snapshot
        tensors = {v: tensor.to(made.devices.get(v, tensor.device)) for v, tensor in snapshot.tensors.items()}
        alive = self.loop.tape.alive()
        with self.kept() as steps:
            alike = [n for n, step in enumerate(steps) if step.mark.step < snapshot.step and _is_given_bad(step, alive)]
            for number in alike[::-1][:_MOST_BESIDE]:
                healthy = self._program_of(steps, number, "gradient norm")
                found = let_through(snapshot.failure, Step(snapshot.program, tensors), healthy)
                if found is not None:
                    return replace(made, snapshot=replace(snapshot, failure=found))
        return made

    def _program_of(self, steps: list[Segment], number: int, quantity: str) -> Step:
        recorded: list[Step] = []

        def keep(program: Program, tensors: Tensors) -> None:
            recorded.append(Step(program, {value: tensor.detach().clone() for value, tensor in tensors.items()}))

        with self._seen(steps, number, quantity) as case:
            self.replayed(replace(case, explain=keep))
        return recorded[0]

    @contextmanager
    def _seen(self, steps: list[Segment], number: int, quantity: str) -> Iterator[Case]:
        """A step of the past up to where a quantity shows; the live state is where it began."""
        with self.begun(steps[: number + 1], number, 0) as case:
            yield replace(case, where=_SEEN[quantity][1], ops=_until_seen(case.ops, quantity))


class _OutOfTime(Exception):
    """Steps were played for as long as was granted."""


class _MeterWithLimit(Meter):
    """Raises `_OutOfTime` at a step that begins after `_PLAYED_SECONDS`."""

    def __init__(self, alive: Mapping[Number, torch.Tensor]) -> None:
        super().__init__(alive)
        self._ends = time.process_time() + _PLAYED_SECONDS

    def before(self, mark: Mark, op: Op) -> None:
        is_new = len(self.steps) >= 2 * LEAST_SILENT and self.steps[-1].mark is not mark
        if is_new and time.process_time() > self._ends:
            raise _OutOfTime
        super().before(mark, op)


def _silent(measured: Sequence[MeasuredStep], named: Mapping[int, str], always: Set[int]) -> Finding | None:
    """The first parameter that gets no gradient from a step on, for enough steps that gave another one a gradient.

    In the step before less than half of it was zero, and of those that end with it: a layer may fade out by design,
    unit by unit, as under a decay. Without a step before it has to have been so ``always``. One that has a gradient in
    some steps and none in others may rest by design, as the head of a task does, so a gradient that is missing has to
    have been there in every step before.
    """
    found: list[Finding] = []
    faded: set[int] = set()  # the steps in which a layer ended by design
    for key, name in named.items():
        shares = [(one.mark, one.zeros[key]) for one in measured if one.norm and key in one.zeros]
        since = [mark for mark, _ in takewhile(lambda pair: pair[1] in (None, 1.0), reversed(shares))]
        before = [share for _, share in shares[: len(shares) - len(since)]]
        if since and before and _is_fading([share or 0.0 for share in before]):
            faded.add(since[-1].place)
        elif len(since) >= LEAST_SILENT and (before or key in always):
            is_missing = shares[-1][1] is None
            if not is_missing or (len(before) >= LEAST_PLAYED and all(share not in (None, 1.0) for share in before)):
                found.append(Finding(name, key, is_missing, len(since), since[-1].place, since[-1].step))
    return next((one for one in found if one.place not in faded), None)


def _is_fading(shares: Sequence[float]) -> bool:
    """True if at least half of the last gradient was zero, and there is no telling that this came suddenly.

    It did if `_SUDDEN` steps before the end the share of zeros was about what it usually was.
    """
    if shares[-1] < _MOSTLY or len(shares) <= 2 * _SUDDEN:
        return shares[-1] >= _MOSTLY
    then, usual = shares[-_SUDDEN], statistics.median(shares[:-_SUDDEN])
    return then >= _MOSTLY and 1.0 - then < _ABOUT * (1.0 - usual)


def _is_given_bad(step: Segment, alive: Mapping[Number, torch.Tensor]) -> bool:
    return bad_tensor(alive[n] for op in step.ops for n in op.ins if n in alive) is not None


def _position(steps: Sequence[Segment], place: int) -> int | None:
    return next((number for number, step in enumerate(steps) if step.mark.place == place), None)


def _until_seen(ops: list[Op], quantity: str) -> list[Op]:
    """The calls of a step up to where a quantity shows; gradients as they are before they are clipped."""
    kind = OptimizerStep if quantity == "update" else Backward
    last = max((n for n, op in enumerate(ops) if op.kind is kind), default=len(ops))
    later = ops[last + 1 :] if quantity != "update" else []
    return ops[: last + 1] + [op for op in later if op.kind is Unscale]


def _beginning(
    steps: list[Segment], measured: list[MeasuredStep], alarm: Alarm, number: int
) -> tuple[int, int, Predicate]:
    """Where an alarm begins: the positions of that step and of a healthy one among the kept ones, and the predicate.

    It is the alarm's own first step, or an earlier one that is off in a number that was not followed live.

    That number has to be off in every step from there up to the alarm's last. In the step right before the alarm it
    may be off alone, if the update is: a learning rate may be wrong once.
    """
    healthy = _position(steps, alarm.healthy.place)
    found = number, max(number - 1, 0) if healthy is None else healthy, Predicate(**alarm.numbers)
    own_turn = [n for n, played in enumerate(measured) if played.optimizer == measured[number].optimizer]
    norms, updates = [measured[n].norm for n in own_turn], [measured[n].update for n in own_turn]
    last = own_turn.index(number) - 1 if measured else -1  # before the alarm
    for quantity, numbers in (("gradient norm", norms), ("update", updates)):
        turn = first_off(numbers)
        if is_off(updates, last) and is_off(numbers, last):
            turn = last if turn is None else min(turn, last)
        band = band_before(numbers, turn) if turn is not None and own_turn[turn] < found[0] else None
        if turn is not None and band is not None:
            usual = (n for n in range(turn - 1, -1, -1) if (value := numbers[n]) and band.spreads(value) <= USUAL)
            first, before = own_turn[turn], own_turn[next(usual, turn - 1)]
            last_usual, step, limit = steps[before].mark.step, steps[first].mark.step, band.number(HIGH)
            predicate = Predicate(quantity, numbers[turn] or 0.0, limit, last_usual, step, band.number(0.0))
            found = first, before, predicate
    return found
