"""Finds the cause of a failure: the steps since the oldest copy are played unchanged, then with one change at a time.

The unchanged play has to fail as training did, with the same losses bit for bit; else nothing is claimed. It also
reads what the steps were given, so that the failing one can be compared with those before. A change with which the
failing step and its loss are finite and usual *removes* the failure; that decides the class of the cause. The live
state is as it was afterwards.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reprokit.capture.calls import Backward, OptimizerStep, Root, ScaleLoss, gives_gradients, starts_of, unscaled
from reprokit.capture.replay import Player, PlayObserver, Replay, in_silence
from reprokit.capture.tape import Mark, Number, Op, Segment
from reprokit.capture.tensor_names import Names, root_names
from reprokit.compare.quantity import number_of, update_of
from reprokit.errors import pass_on
from reprokit.locate.ways import bad_tensor
from reprokit.program.sites import make_site, parts
from reprokit.series.cause import (
    Cause,
    Intervention,
    Reading,
    Unlike,
    divergence,
    drift,
    growth,
    jump,
    rate_words,
    usual_limit,
)
from reprokit.series.story import failing_series
from reprokit.series.timeline import parameters_of
from reprokit.words import number_words

if TYPE_CHECKING:
    from types import FrameType

    from reprokit.capture.loop import Loop
    from reprokit.snapshot.format import Snapshot

KINDS = frozenset({"nan", "inf", "spike", "explosion"})
_MOST_SECONDS = 30.0  # a longer wait for the file is not worth a cause
_TIMES = 20  # the seconds that the steps took in training
_LEAST_SECONDS = 2.0  # steps of a millisecond cost a replay more than they cost training
_MOST_KEPT = 2**24  # elements of the values of usual steps that are kept to be put in the place of odd ones
_LARGE_UPDATE = 0.3  # of the norm of the parameters in one step: a healthy update is below a hundredth
_RECENT = 3  # updates before the failure that count: the first ones of parameters that are zero are large
_TENTH = 0.1
_MOST_OF_A_KIND = 3  # changes: the same images may be read at many places
_MOST_NAME = 30  # characters of an expression that is a name

Slot = tuple[Any, int, int]  # the code and instruction of a call, and the position among its arguments


def find_cause(loop: Loop, segments: Sequence[Segment], snapshot: Snapshot, frame: FrameType | None) -> Cause | None:
    """The cause of the failure of ``snapshot``, which the last of ``segments`` shows; ``None`` where no value differs
    from the steps before, or these cannot be played again."""
    rows = failing_series(snapshot.timeline)
    losses = [(row.step, row.loss) for row in rows if row.loss is not None and row.step < snapshot.step]
    trained = sum(row.seconds for row in rows[-len(segments) :] if row.seconds is not None)
    if 2 * trained > _MOST_SECONDS:  # they are played unchanged and changed
        return None
    seconds, is_event = max(_LEAST_SECONDS, _TIMES * trained), snapshot.failure.event is not None
    return _Experiments(loop, segments, frame, losses, seconds, is_event=is_event).run()


@dataclass(frozen=True)
class _Plan:
    """A change, in words and as what is done: ``edit`` changes the calls before they are played, ``values`` stand for
    those of their slots from a step on, ``held`` are parameters with the value that they keep."""

    kind: str
    says: str
    text: str
    edit: Callable[[Op, Mark], Op] | None = None
    values: dict[Slot, torch.Tensor] = field(default_factory=dict)
    since: int = 0
    held: tuple[tuple[torch.Tensor, float], ...] = ()


@dataclass(frozen=True)
class _Played:
    """The result of a play. ``is_alike``: all losses were those of training; ``loss`` is the last one."""

    is_alike: bool
    is_bad: bool
    loss: float


class _Observer(PlayObserver):
    """Makes the change of a plan, and reads the loss that a step differentiates, without the factor of a scaler. Stops
    the play at the ``deadline``."""

    def __init__(self, player: Player, plan: _Plan | None, deadline: float) -> None:
        self.player, self._plan, self._deadline = player, plan, deadline
        self.loss = math.nan

    def begin(self, replay: Replay) -> bool:
        return time.monotonic() > self._deadline

    def before(self, replay: Replay, op: Op) -> bool:
        if op.kind is Backward and not gives_gradients(op):
            start, earlier = starts_of(op.args, op.kwargs)[0], replay.segment.ops[: replay.index]
            value = self.player.value(unscaled(earlier, start)) if isinstance(start, Number) else None
            loss = number_of(value)
            self.loss = math.nan if loss is None else loss
        if self._plan is not None and self._plan.values and replay.segment.mark.step >= self._plan.since:
            for slot, number in _given(op):
                if slot in self._plan.values:
                    self.player.replace(number, self._plan.values[slot])
        return False

    def after(self, replay: Replay, op: Op) -> bool:
        if self._plan is not None and op.kind is OptimizerStep:
            for parameter, value in self._plan.held:
                parameter.data.fill_(value)
        return False


def _given(op: Op) -> Iterator[tuple[Slot, Number]]:
    """The tensors that are an argument of a call themselves."""
    for position, value in enumerate((*op.args, *op.kwargs.values())):
        if isinstance(value, Number):
            yield (op.code, op.instruction, position), value


@dataclass
class _Series:
    """One value over the steps: its range in each, and what it held in some; ``op`` is the call that reads it."""

    role: str
    op: Op
    readings: list[Reading] = field(default_factory=list)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    number: Number | None = None


class _Watch(_Observer):
    """Reads, while the steps are played unchanged, what meets the model: data, and what earlier steps have left.

    What a step computes of its parameters is a consequence, and is not compared.
    """

    def __init__(self, player: Player, deadline: float, state: set[int], scalars: dict[str, torch.Tensor]) -> None:
        super().__init__(player, None, deadline)
        self.series: dict[Slot, _Series] = {}
        self.scalars = {name: (parameter, list[Reading]()) for name, parameter in scalars.items()}
        self.options: dict[tuple[int, int, str], list[Reading]] = {}
        self.updates: list[float] = []  # over the norm of the parameters
        self._state = state
        self._made_in: dict[Number, int] = {}  # the step in which something was computed of parameters
        self._seen: set[Number] = set()
        self._weights: list[torch.Tensor] = []
        self._num_kept = 0

    def begin(self, replay: Replay) -> bool:
        self._seen = set()
        for parameter, readings in self.scalars.values():
            readings.append(Reading(replay.segment.mark.step, *[float(parameter.detach())] * 2))
        return super().begin(replay)

    def before(self, replay: Replay, op: Op) -> bool:
        mark = replay.segment.mark
        if op.kind is OptimizerStep:
            self._weights = [parameter.detach().clone() for parameter in parameters_of(op.target)]
            for place, group in enumerate(op.note.options):
                for name, value in group.items():
                    if _is_number(value):
                        rows = self.options.setdefault((id(op.target), place, name), [])
                        rows.append(Reading(mark.step, value, value))
        elif op.kind.is_forward and self._meets_model(op):
            for slot, number in _given(op):
                is_own = self._is_state(number) or self._made_in.get(number) == mark.step
                if not is_own and number not in self._seen:
                    self._seen.add(number)
                    self._read(mark.step, slot, op, number)
        return super().before(replay, op)

    def after(self, replay: Replay, op: Op) -> bool:
        if op.kind.is_forward and self._meets_model(op):
            self._made_in.update(dict.fromkeys(op.outs, replay.segment.mark.step))
        elif op.kind is OptimizerStep:
            update = update_of(self._weights, [parameter.detach() for parameter in parameters_of(op.target)])
            self.updates += [update] if update is not None else []
            self._weights = []
        return False

    def _meets_model(self, op: Op) -> bool:
        return op.kind is Root or any(number in self._made_in or self._is_state(number) for number in op.ins)

    def _is_state(self, number: Number) -> bool:
        tensor = self.player.alive.get(number)
        return tensor is not None and id(tensor) in self._state

    def _read(self, step: int, slot: Slot, op: Op, number: Number) -> None:
        tensor = self.player.value(number)
        if tensor is None or tensor.numel() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
            return
        low, high = map(float, tensor.detach().aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            return  # a bad value is the failure itself
        series = self.series.setdefault(slot, _Series("carried" if number in self._made_in else "batch", op))
        if series.readings and series.readings[-1].step == step:  # one line may run several times in a step
            last = series.readings.pop()
            low, high = min(low, last.low), max(high, last.high)
        series.readings.append(Reading(step, low, high))
        series.number = number
        if self._num_kept + tensor.numel() <= _MOST_KEPT:
            self._num_kept += tensor.numel()
            series.values[step] = tensor.detach().clone()


class _Experiments:
    """The plays of one failure. ``losses`` are those of the steps before it; so many ``seconds`` may be used."""

    def __init__(
        self,
        loop: Loop,
        segments: Sequence[Segment],
        frame: FrameType | None,
        losses: Sequence[tuple[int, float]],
        seconds: float,
        *,
        is_event: bool,
    ) -> None:
        self._loop, self._segments, self._frame = loop, segments, frame
        self._is_event = is_event  # then no value is bad, and a smaller step makes any loss more usual
        self._diverged, self._limit = divergence(losses), usual_limit(losses)
        self._deadline = time.monotonic() + min(_MOST_SECONDS, seconds)
        self._longest = 0.0
        modules = loop.world.modules
        named = (item for module in modules for item in module.named_parameters())
        self._scalars: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in named if parameter.numel() == 1
        }

    def run(self) -> Cause | None:
        """Play unchanged, compare, and try what may have led to the failure, likeliest first."""
        watches: list[_Watch] = []

        def watching(replay: Replay) -> _Observer:
            watches.append(_Watch(replay.player, self._deadline, self._loop.world.state_ids(), self._scalars))
            return watches[0]

        control = self._play(None, watching)
        if control is None or not (control.is_alike and control.is_bad):
            return None
        odd = list(self._odd(watches[0]))
        evidence = [one.text for one, _ in odd[:_MOST_OF_A_KIND]]
        if self._diverged is not None:
            evidence.insert(0, self._diverged.text)
        tried: list[Intervention] = []
        for plan in self._plans(watches[0], odd):
            if time.monotonic() + self._longest > self._deadline:
                break
            played = self._play(plan, partial(self._changing, plan))
            if played is None:
                continue
            removes = not played.is_bad
            loss = played.loss if math.isfinite(played.loss) else None
            num_steps = len({segment.mark.step for segment in self._segments})  # of which one may have several updates
            tried.append(Intervention(plan.text, removes, loss, num_steps))
            if removes:
                if not any(plan.says.startswith(line) for line in evidence):
                    evidence.append(plan.says.removesuffix("."))
                shown = tried[-1].words(is_event=self._is_event)
                return Cause(plan.kind, f"{plan.says} {shown}", tuple(evidence), tuple(tried))
        if not evidence:
            return None
        why = "no experiment has decided why" if tried else "no experiment could be made"
        return Cause("unknown", f"{evidence[0]}; {why}.", tuple(evidence), tuple(tried))

    def _changing(self, plan: _Plan, replay: Replay) -> _Observer:
        return _Observer(replay.player, plan, self._deadline)

    def _play(self, plan: _Plan | None, observing: Callable[[Replay], _Observer]) -> _Played | None:
        """Play the steps from the oldest copy; ``None`` where that is not possible, or takes too long."""
        world, started, segments = self._loop.world, time.monotonic(), self._segments
        if plan is not None and plan.edit is not None:
            edit = plan.edit
            segments = [Segment([edit(op, mark) for op in ops], mark) for ops, mark in segments]
        replay = Replay(world, self._loop.tape, segments, world.copies[0])
        try:
            with replay.going_back(), in_silence():
                observer = observing(replay)
                if replay.play(observer):
                    return None
                is_scaled = any(op.kind is ScaleLoss for op in segments[-1].ops)  # gradients may be infinite on purpose
                gradients = [leaf.grad for leaf in replay.leaves() if leaf.grad is not None and not is_scaled]
                is_bad = not (math.isfinite(observer.loss) and abs(observer.loss) <= self._limit)
                is_bad = is_bad or bad_tensor(gradients) is not None or world.newly_bad() is not None
                return _Played(not replay.other_losses, is_bad, observer.loss)
        except Exception as error:  # of the user's code, which a change may not suit
            pass_on(error)
            return None
        finally:
            self._longest = max(self._longest, time.monotonic() - started)

    # -- what is unlike the steps before -------------------------------------------------------------------------

    def _odd(self, watch: _Watch) -> Iterator[tuple[Unlike, Slot]]:
        """Values that differ from the steps before, in the order in which the failing step reads them."""
        names, last = self._names(), self._segments[-1].mark.step
        for slot, series in watch.series.items():
            readings = series.readings
            if readings[-1].step == last:
                name = self._name(names, series, slot)
                found = growth(name, readings) if series.role == "carried" else jump(name, "batch", readings)
                if found is not None:
                    yield self._with_rows(found, series), slot

    def _with_rows(self, found: Unlike, series: _Series) -> Unlike:
        """With the rows of the first odd batch that are beyond what was before, if these are some of them."""
        tensor = series.values.get(found.since)
        if tensor is None or not tensor.dim() or series.role != "batch":
            return found
        beyond = tensor.double().abs().flatten(1).amax(1) if tensor.dim() > 1 else tensor.double().abs()
        rows = (beyond > max(map(abs, found.before))).nonzero().flatten().tolist()
        return replace(found, rows=tuple(rows)) if len(rows) < len(tensor) else found

    def _names(self) -> Names:
        modules = self._loop.world.modules
        roots, ops = root_names(modules, self._frame), self._segments[-1].ops
        return Names(self._loop.tape.alive(), modules, roots, {}, ops, self._frame, [])

    def _name(self, names: Names, series: _Series, slot: Slot) -> str:
        """As the line that reads it calls it, else the variable that holds it."""
        op, position = series.op, slot[2]
        for part in parts(make_site(op.code, op.instruction)) if op.code is not None else ():
            operands = _operands(part, len(op.args))
            if position < len(operands) and len(text := ast.unparse(operands[position])) <= _MOST_NAME:
                return text
        number = series.number
        tensor = number() if number is not None else None
        found = names.describe(number, tensor) if tensor is not None else None
        return found.name if found is not None and found.role != "opaque" else "input"

    # -- what is tried -------------------------------------------------------------------------------------------

    def _plans(self, watch: _Watch, odd: Sequence[tuple[Unlike, Slot]]) -> Iterator[_Plan]:
        """Changes, likeliest first: of what is unlike the steps before, then of what may have driven the run away."""
        for one, slot in odd[:_MOST_OF_A_KIND]:
            values, step = watch.series[slot].values, one.first if one.role == "carried" else one.since - 1
            usual, now = values.get(step), values.get(self._segments[-1].mark.step)
            if usual is not None and now is not None and usual.shape == now.shape and usual.dtype == now.dtype:
                kind, text = "data" if one.role == "batch" else "state", f"`{one.name}` of step {step} in its place"
                yield _Plan(kind, f"{one.text}.", text, values={slot: usual}, since=step + 1)
        yield from self._other_options(watch)
        drifts = ((parameter, drift(name, readings)) for name, (parameter, readings) in watch.scalars.items())
        for parameter, one_way in [pair for pair in drifts if pair[1] is not None][:_MOST_OF_A_KIND]:
            assert one_way is not None
            value = one_way.before[0]
            text = f"`{one_way.name}` held at {number_words(value)}"
            yield _Plan("state", f"{one_way.text}.", text, held=((parameter, value),))
        steps = (op for ops, _ in self._segments for op in ops if op.kind is OptimizerStep)
        rates = [group["lr"] for op in steps for group in op.note.options if _is_number(group.get("lr"))]
        update = max(watch.updates[-_RECENT:], default=0.0) if not self._is_event else 0.0
        if rates and (self._diverged is not None or update > _LARGE_UPDATE):
            says = rate_words(self._diverged, update, min(rates), max(rates))
            yield _Plan(
                "setting", says, "a tenth of the learning rate", edit=partial(_with_options, _with_smaller_rate, 0)
            )

    def _other_options(self, watch: _Watch) -> Iterator[_Plan]:
        """Options of optimizers that have jumped, as they were before."""
        found: dict[str, tuple[Unlike, dict[tuple[int, int], float]]] = {}
        for (optimizer, place, name), readings in watch.options.items():
            one = jump(name, "option", readings, least=1)
            if one is not None:
                found.setdefault(name, (one, {}))[1][optimizer, place] = one.before[1]
        for name, (one, values) in found.items():
            is_single = len(set(values.values())) == 1
            text = f"`{name}` at {number_words(one.before[1])} as before" if is_single else f"`{name}` as before"
            change = partial(_as_before, name, values)
            yield _Plan("setting", f"{one.text}.", text, edit=partial(_with_options, change, one.since))


def _operands(part: ast.AST, number: int) -> Sequence[ast.expr]:
    """The expressions of the arguments of a call, if there are so many."""
    found: Sequence[ast.expr] = ()
    if isinstance(part, ast.Call) and not part.keywords:
        found = part.args
        if len(found) == number - 1 and isinstance(part.func, ast.Attribute):
            found = [part.func.value, *found]
    elif isinstance(part, ast.BinOp):
        found = [part.left, part.right]
        if isinstance(part.left, ast.Constant):  # a reflected method is given the tensor first
            found.reverse()
    return found if len(found) == number else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Group = dict[str, Any]


def _with_options(change: Callable[[int, int, Group], Group], since: int, op: Op, mark: Mark) -> Op:
    """A step of an optimizer with the options that ``change`` makes of each group (optimizer's id, place, options)."""
    if op.kind is not OptimizerStep or mark.step < since:
        return op
    options = [change(id(op.target), place, group) for place, group in enumerate(op.note.options)]
    return op._replace(note=replace(op.note, options=options))


def _as_before(name: str, values: Mapping[tuple[int, int], float], optimizer: int, place: int, group: Group) -> Group:
    return {**group, name: values.get((optimizer, place), group[name])} if name in group else group


def _with_smaller_rate(optimizer: int, place: int, group: Group) -> Group:
    return {**group, "lr": group["lr"] * _TENTH} if _is_number(group.get("lr")) else group
