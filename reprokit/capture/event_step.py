"""From an alarm to a file: go back to the step where it began, and find the call that is unlike the last healthy step.

The kept steps are played with their gradient norms and updates measured. An event begins with the first step in which
one of these, or the number that gave the alarm, is off its course for as long as the alarm lasts. That step and the
last healthy one become programs; comparing them shows the call, the input and the rows of the batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from reprokit.capture.calls import Backward, OptimizerStep, Unscale
from reprokit.capture.fidelity import Made
from reprokit.capture.meters import MeasuredStep, OutOfTime, StepMeter
from reprokit.capture.replay import Replay, quiet_hooks
from reprokit.capture.save import Case, Describing, NotKept
from reprokit.capture.tape import Mark, Number, Op, Segment
from reprokit.capture.tensor_names import parameter_names
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.gains import Step, blocked, explained
from reprokit.locate.let_through import let_through
from reprokit.locate.ways import bad_tensor
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program
from reprokit.series.course import HIGH, LEAST_PLAYED, USUAL, band_before, first_off, is_off
from reprokit.series.detectors import Alarm, Finding
from reprokit.series.events import QUANTITIES

_PLAYED = 256  # steps, of those kept, that are looked at for parameters that learn nothing
_PLAYED_SECONDS = 1.0  # of CPU time for them; twice `LEAST_SILENT` steps are played however long they take
LEAST_SILENT = 20  # steps with a gradient of zeros
_MOSTLY = 0.5  # of the elements of a gradient
_SUDDEN = 8  # steps in which a layer dies that does not fade out by design
_ABOUT = 0.75  # of the usual share of a gradient that is not zero
_MOST_BESIDE = 4  # healthy steps that a failing one is compared with
_PHASES = {"loss": Phase.FORWARD, "gradient norm": Phase.BACKWARD, "update": Phase.OPTIMIZER}
_OBSERVED = {"loss": "loss", "gradient norm": "gradient", "update": "parameter"}


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
            if isinstance(alarm, Finding):
                return self._without_gradient(steps, number, alarm)
            if alarm.kind == "scale":
                with self._seen(steps, number, "gradient norm") as case:
                    return self.make(case)
            return self._at_beginning_of(steps, alarm, number)

    def find_silent(self, always: Set[int] = frozenset()) -> Finding | None:
        """A parameter that learns nothing: it gets no gradient from a step on.

        The parameters with an ``id`` in ``always`` had no gradient whenever somebody looked.
        """
        world = self.loop.world
        with self.kept() as steps:
            played = steps[:_PLAYED]
            alive = self.loop.tape.alive()
            meter, replay = StepMeter(alive, seconds=_PLAYED_SECONDS, least=2 * LEAST_SILENT), self._replay(played)
            with replay.going_back(), quiet_hooks(world.modules, replay.leaves()), suppress(OutOfTime):
                replay.play_until(len(played), meter)
            if replay.notes:
                return None  # other losses than those of training
            named = parameter_names(world.modules, self.verdict.frame)
            return _silent(meter.steps, named, always)

    def _replay(self, steps: Sequence[Segment]) -> Replay:
        world = self.loop.world
        return Replay(world, self.loop.tape, steps, world.copies[0])

    def _without_gradient(self, steps: list[Segment], number: int, finding: Finding) -> Made:
        """The snapshot of a step in which a parameter gets no gradient, or one of zeros."""
        parameters = (p for module in self.loop.world.modules for p in module.parameters())
        address = next(p.data_ptr() for p in parameters if id(p) == finding.key)
        before = steps[max(number - 1, 0)].mark.step
        event = Predicate("share of zeros", 1.0, 1.0, before, steps[number].mark.step, source=finding.name)

        def explain(program: Program, tensors: Tensors) -> Failure:
            owned = (item.value for item in program.inputs if item.role == "parameter")
            value = next((value for value in owned if tensors[value].data_ptr() == address), None)
            failure = Failure(Phase.BACKWARD, "dead", value=value, event=event)
            return blocked(Step(program, tensors), failure)

        with self._seen(steps, number, "gradient norm") as case:
            made = self.make(replace(case, explain=explain))
        if made.snapshot.failure.call is None:
            raise NotKept(f"no call behind `{finding.name}` keeps its gradient back")
        return made

    def _at_beginning_of(self, steps: list[Segment], alarm: Alarm, number: int) -> Made:
        """The snapshot of the step in which a number has left its course, at ``number`` or before."""
        last = _position(steps, alarm.departure.values[-1].place)
        replay, meter = self._replay(steps), StepMeter(self.loop.tape.alive())
        with replay.going_back(), quiet_hooks(self.loop.world.modules, replay.leaves()):
            replay.play_until((number if last is None else max(number, last)) + 1, meter)
        measured = [] if replay.notes else meter.steps  # a played loss that is not that of training dates nothing
        begun, healthy, predicate = _beginning(steps, measured, alarm, number)
        quantity = predicate.quantity
        reference = self._program_of(steps, healthy, quantity)

        def explain(program: Program, tensors: Tensors) -> Failure:
            failure = Failure(_PHASES[quantity], alarm.kind, event=predicate)
            return explained(Step(program, tensors), reference, failure)

        with self._seen(steps, begun, quantity) as case:
            return self.make(replace(case, explain=explain))

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
            yield replace(case, where=_OBSERVED[quantity], ops=_until_seen(case.ops, quantity))


def _silent(measured: Sequence[MeasuredStep], named: Mapping[int, str], always: Set[int]) -> Finding | None:
    """The first parameter that gets no gradient from a step on, for enough steps that gave another one a gradient.

    In the step before less than half of it was zero, and of those that end with it: a layer may fade out by design,
    unit by unit, as under a decay. Without a step before it has to have been so ``always``. One that has a gradient in
    some steps and none in others may rest by design, as the head of a task does, so a gradient that is missing has to
    have been there in every step before.
    """
    series = {key: _Shares.of(measured, key) for key in named}
    faded = {one.since[-1].place for one in series.values() if one.since and one.before and one.is_fading}
    for key, name in named.items():
        one = series[key]
        if len(one.since) < LEAST_SILENT or one.since[-1].place in faded or not (one.before or key in always):
            continue
        has_learned = len(one.before) >= LEAST_PLAYED and all(share not in (None, 1.0) for share in one.before)
        if not one.is_missing or has_learned:
            way = "none" if one.is_missing else "zeros"
            return Finding("dead", name, way, len(one.since), one.since[-1].place, one.since[-1].step, key)
    return None


@dataclass(frozen=True)
class _Shares:
    """The shares of zeros in the gradient of one parameter ``before`` the steps ``since``, latest first, in which it
    has no other elements. ``None``: it has no gradient, which ``is_missing`` says of the last step."""

    before: list[float | None]
    since: list[Mark]
    is_missing: bool

    @classmethod
    def of(cls, measured: Sequence[MeasuredStep], key: int) -> _Shares:
        """Those in the steps that gave any parameter a gradient."""
        shares = [(one.mark, one.zeros[key]) for one in measured if one.norm and key in one.zeros]
        since = [step for step, _ in takewhile(lambda pair: pair[1] in (None, 1.0), reversed(shares))]
        before = [share for _, share in shares[: len(shares) - len(since)]]
        return cls(before, since, bool(shares) and shares[-1][1] is None)

    @property
    def is_fading(self) -> bool:
        """True if at least half of the last gradients was zero, and there is no telling that this came suddenly.

        It did if `_SUDDEN` steps before the end the share was about what it usually was.
        """
        shares = [share or 0.0 for share in self.before]
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
    departure = alarm.departure
    healthy = _position(steps, departure.healthy.place)
    own = Predicate(
        QUANTITIES[alarm.kind],
        departure.began.number,
        departure.limit,
        departure.healthy.step,
        departure.began.step,
        departure.usual,
    )
    found = number, healthy if healthy is not None else max(number - 1, 0), own
    own_turn = [n for n, one in enumerate(measured) if one.optimizer == measured[number].optimizer]
    series = {name: [getattr(measured[n], name) for n in own_turn] for name in ("norm", "update")}
    last = own_turn.index(number) - 1 if measured else -1  # before the alarm
    is_by_update = is_off(series["update"], last)
    for quantity, numbers in zip(("gradient norm", "update"), series.values(), strict=True):
        turn = first_off(numbers)
        if is_by_update and is_off(numbers, last):
            turn = last if turn is None else min(turn, last)
        if turn is not None and own_turn[turn] < found[0]:
            band = band_before(numbers, turn)
            assert band is not None, "it is off it"
            usual = (n for n in range(turn - 1, -1, -1) if (value := numbers[n]) and band.spreads(value) <= USUAL)
            first, before = own_turn[turn], own_turn[next(usual, turn - 1)]
            predicate = Predicate(
                quantity,
                numbers[turn] or 0.0,
                band.number(HIGH),
                steps[before].mark.step,
                steps[first].mark.step,
                band.number(0.0),
            )
            found = first, before, predicate
    return found
