"""Reads the inputs of the kept steps while they are played unchanged: values, settings, state, updates, gradients.

A value is compared where it meets the model: data, and what earlier steps have left. What a step computes of its
parameters is a consequence, and is not compared.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from reprokit import members, native
from reprokit.capture.calls import (
    Backward,
    Clip,
    CompiledStep,
    Function,
    OptimizerStep,
    Root,
    Transform,
    ZeroGrad,
    gives_gradients,
    name_of,
    starts_of,
    unscaled,
)
from reprokit.capture.replay import Player, PlayObserver, Replay
from reprokit.capture.structure import iter_leaves, iter_tensors
from reprokit.capture.tape import Number, Op, Segment
from reprokit.capture.tensor_names import Names, names_of, parameter_names, root_names
from reprokit.compare.quantity import norm_of, number_of, numbers_of, update_of
from reprokit.locate.ways import HALVES
from reprokit.program.functions import written_argument
from reprokit.program.sites import make_site, parts
from reprokit.series.timeline import parameters_of
from reprokit.series.unlike import Reading, Unlike, Value, changed, course, emptied_state, growth, unlike, written
from reprokit.words import quoted, quoted_unless_name, user_path

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

_MOST_KEPT = 2**24  # elements of the values of usual steps that are kept to be put in the place of odd ones
UNNAMED = "input"
_COMMUTATIVE = frozenset({"add", "mul"})
_FACTORS = frozenset({"mul", "rmul", "div", "rdiv", "truediv", "rtruediv"})  # calls whose single numbers are settings
_MOST_NAME, _MOST_WORDS = 30, 60  # characters of an expression that is a name, and of one that has a number in it

S = TypeVar("S")
Slot = tuple[Any, int, int | str]  # the code and instruction of a call, and the position or name of an argument
States = dict[torch.Tensor, dict[str, Any]]  # of optimizers, by parameter
Key = tuple[Any, ...]  # of a setting: its kind, whose it is, and its name


class Inputs:
    """Finds what the calls that use the ``state`` are given besides, call by call: data, and what earlier steps have
    made of the state. What a step itself makes of the state is a consequence."""

    def __init__(self, state: Set[int]) -> None:
        self._state = state
        self._made_in: dict[Number, int] = {}  # the step in which something was computed of the state
        self._seen: set[Number] = set()
        self._random: set[Number] = set()
        self._derived: set[Number] = set()  # computed of data

    def begin(self, player: Player | None = None) -> None:
        """A step begins; a ``player`` plays it."""
        self._seen = set()
        self.alive: Callable[[Number], torch.Tensor | None] = (
            player.alive.get if player is not None else Number.__call__
        )
        self.value = player.value if player is not None else Number.__call__

    def given(self, step: int, op: Op) -> Iterator[tuple[Slot, Number]]:
        """The values that a call meets the state with, each once in a step; before the call is `made`."""
        for slot, number in given_to(op) if self.meets(op) else ():
            if not (self._is_state(number) or self._made_in.get(number) == step or number in self._seen):
                self._seen.add(number)
                yield slot, number

    def made(self, step: int, op: Op) -> None:
        """A call is over."""
        if op.kind is Backward or self.meets(op):
            self._made_in.update(dict.fromkeys(op.outs, step))
        elif op.kind is Function:
            self._derived.update(() if all(map(self.is_plain, op.ins)) else op.outs)
            is_drawn = op.note is not None and op.note.rng is not None
            self._random.update(op.outs if is_drawn or not self._random.isdisjoint(op.ins) else ())

    def over(self, step: int, ops: Iterable[Op]) -> Iterator[tuple[Slot, Number, Op]]:
        """The values that the calls of a step are given, each with the call."""
        for op in ops:
            yield from ((slot, number, op) for slot, number in self.given(step, op))
            self.made(step, op)

    def is_random(self, number: Number) -> bool:
        """True for what was made of what the loop has drawn."""
        return number in self._random

    def is_plain(self, number: Number) -> bool:
        """True for a single number that the loop has made a tensor of, such as a coefficient, and no loader."""
        tensor = self.value(number)
        is_made = number not in self._derived and number not in self._random and getattr(number, "batch", None) is None
        return is_made and tensor is not None and native.dim(tensor) == 0

    def role(self, op: Op, number: Number) -> str:
        """``carried``, ``setting`` or ``batch``: the role of an argument of a call."""
        is_factor = name_of(op).rpartition(".")[2].strip("_") in _FACTORS and self.is_plain(number)
        return "carried" if number in self._made_in else "setting" if is_factor else "batch"

    def meets(self, op: Op) -> bool:
        """True if a call uses the state, or what was made of it."""
        is_whole = op.kind in (Root, Transform, CompiledStep)  # with parameters that are no arguments
        return op.kind.is_forward and (is_whole or any(n in self._made_in or self._is_state(n) for n in op.ins))

    def _is_state(self, number: Number) -> bool:
        tensor = self.alive(number)
        return tensor is not None and (id(tensor) in self._state or isinstance(tensor, torch.nn.Parameter))


class LossWatch(PlayObserver):
    """Reads the loss that a step differentiates, without the factor of a scaler."""

    def __init__(self) -> None:
        self.loss = math.nan

    def before(self, replay: Replay, op: Op) -> bool:
        if op.kind is Backward and not gives_gradients(op):
            start, earlier = starts_of(op.args, op.kwargs)[0], replay.segment.ops[: replay.index]
            value = replay.player.value(unscaled(earlier, start)) if isinstance(start, Number) else None
            loss = number_of(value)
            self.loss = math.nan if loss is None else loss
        return False


@dataclass
class Series:
    """One value over the steps: its range in each, the tensors that had it, and what they held as far as that is kept;
    ``op`` reads it. ``is_random``: it was made of what the loop has drawn."""

    role: str
    op: Op
    is_random: bool
    readings: list[Reading] = field(default_factory=list)
    numbers: dict[int, list[Number]] = field(default_factory=dict)
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def unlike(self, name: str, num_past: int) -> Unlike | None:
        """How its last reading is unlike those before, or one of so many before it."""
        if self.role == "carried":
            return growth(name, self.role, self.readings)
        if self.role == "setting":
            changes = [one for n, one in enumerate(self.readings) if not n or one.limits != self.readings[n - 1].limits]
            gone = course(name, changes)
            gone = replace(gone, since=gone.first + 1) if gone is not None else None
            return changed(name, changes, is_flag=False) or gone
        return unlike(name, self.role, self.readings, num_past=num_past)


@dataclass
class StatePart:
    """A part of the state, of the module ``root`` where there are several: its ``readings`` where the steps begin and
    where the loop writes it, and what it held first."""

    name: str
    root: str
    tensor: torch.Tensor
    is_stepped: bool
    readings: list[Reading] = field(default_factory=list)
    first: torch.Tensor = field(init=False)

    @property
    def is_followed(self) -> bool:
        """True for single numbers, and what no optimizer steps: what others hold follows from the gradients."""
        is_own = native.numel(self.tensor) == 1 or not self.is_stepped
        return is_own and native.is_floating_point(self.tensor)


class InputWatch(LossWatch):
    """Reads what the steps were given. ``parts`` are parameters and buffers by ``id``; of these some are
    ``followed``."""

    def __init__(self, state: set[int], parts: Mapping[int, StatePart]) -> None:
        super().__init__()
        self.series: dict[Slot, Series] = {}
        self.followed = [part for part in parts.values() if part.is_followed]
        self.written: list[tuple[Unlike, torch.Tensor, torch.Tensor]] = []  # with what it was
        self.lost: list[tuple[Unlike, States]] = []  # states of optimizers, with what their last step has left
        self.updates: list[float] = []  # over the norm of the parameters
        self.norms: list[float] = []  # of gradients
        self.halves: set[str] = set()  # half precisions of what the last step has made
        self._parts = parts
        self._inputs = Inputs(state)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, or what is written
        self._left: States = {}  # by the last update of each parameter
        self._lines: dict[int, str] = {}  # that wrote into tensors, by their ``id``
        self._num_kept = 0

    def begin(self, replay: Replay) -> bool:
        self._inputs.begin(replay.player)
        self.halves = set()
        for part in self.followed:
            if not part.readings:
                part.first = native.clone(native.detach(part.tensor))
            _add(part.readings, read(replay.segment.mark.step, part.tensor))
        return super().begin(replay)

    def before(self, replay: Replay, op: Op) -> bool:
        step = replay.segment.mark.step
        if op.kind is OptimizerStep:
            changed = list(parameters_of(op.target))
            self._compare_states(step, op.target)
            norm = norm_of(parameter.grad for parameter in changed if parameter.grad is not None)
            self.norms += [norm] if norm is not None else []
        else:
            changed = list(self._written(replay, op))
        self._before = [(tensor, native.clone(native.detach(tensor))) for tensor in changed]
        self._read_all(replay, op)
        return super().before(replay, op)

    def after(self, replay: Replay, op: Op) -> bool:
        step = replay.segment.mark.step
        made = [value for number in op.outs if (value := replay.player.value(number)) is not None]
        self.halves.update(str(value.dtype).removeprefix("torch.") for value in made if value.dtype in HALVES)
        self._inputs.made(step, op)
        if op.kind is OptimizerStep:
            update = update_of([old for _, old in self._before], [native.detach(tensor) for tensor, _ in self._before])
            self.updates += [update] if update is not None else []
            self._left.update(states_of(op.target))
        else:
            site = make_site(op.code, op.instruction) if self._before and op.code is not None else None
            where = f"{site.file}:{site.line}" if site is not None else ""
            for tensor, old in self._before:
                was, now, part = read(step, old), read(step, tensor), self._parts.get(id(tensor))
                self._lines[id(tensor)] = where
                if part is None or was is None or now is None or not native.is_floating_point(tensor):
                    continue
                earlier = [reading for reading in part.readings if reading.step < step]
                _add(part.readings, now)
                found = written(f"`{part.name}`", was, now, where, earlier)
                self.written += [(found, tensor, old)] if found is not None else []
        self._before = []
        return False

    def _written(self, replay: Replay, op: Op) -> Iterator[torch.Tensor]:
        """The state that a call of the loop writes."""
        if op.kind is Function and op.kind.writes_state(op):
            given = replay.player.given(op)
            for tensor in iter_tensors(written_argument(name_of(op), *given)):
                owner = replay.world.owner_of(tensor)
                yield owner if owner is not None else tensor

    def _compare_states(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Find out if an optimizer's state is another one than the last updates of its parameters have left."""
        left = {parameter: self._left[parameter] for parameter in parameters_of(optimizer) if parameter in self._left}
        found = next(filter(None, (self._odd_state(step, optimizer, *item) for item in left.items())), None)
        self.lost += [(found, left)] if found is not None else []

    def _odd_state(
        self, step: int, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, left: dict[str, Any]
    ) -> Unlike | None:
        """How the state of a parameter was lost, or written."""
        now, part = optimizer.state.get(parameter, {}), self._parts.get(id(parameter))
        if left and not now:
            return emptied_state(type(optimizer).__name__, step)
        own = f"`{part.name}`" if part is not None else "a parameter"
        for name, tensor in now.items():
            if isinstance(tensor, torch.Tensor) and isinstance(old := left.get(name), torch.Tensor):
                was, new, where = read(step, old), read(step, tensor), self._lines.get(id(tensor), "")
                if was and new and (found := written(f"`{name}` of {own}", was, new, where, may_fall=False)):
                    return found
        return None

    def _read_all(self, replay: Replay, op: Op) -> None:
        step, inputs = replay.segment.mark.step, self._inputs
        for slot, number in inputs.given(step, op):
            self._take(step, op, slot, number, replay.player.value(number))

    def read_held(self, segments: Iterable[Segment], saved: Mapping[Number, torch.Tensor]) -> None:
        """Read what the steps were given as far as it is still there, where they cannot be played; ``saved`` are
        values from before something wrote into them."""
        for ops, mark in segments:
            self._inputs.begin()
            for slot, number, op in self._inputs.over(mark.step, ops):
                self._take(mark.step, op, slot, number, saved[number] if number in saved else number())

    def read_data(self, replay: Replay) -> None:
        """Read the data that the steps were given, where these cannot be played: only calls that make data of data
        are."""

        def makes_data(op: Op) -> bool:
            step, inputs = replay.segment.mark.step, self._inputs
            if replay.index == 0:
                inputs.begin(replay.player)
            for slot, number in inputs.given(step, op):
                self._take(step, op, slot, number, replay.player.value(number))
            is_of_data = op.kind is Function and op.kind.is_pure(op) and not inputs.meets(op)
            inputs.made(step, op)
            return is_of_data

        replay.play_some(makes_data)

    def _take(self, step: int, op: Op, slot: Slot, number: Number, tensor: torch.Tensor | None) -> None:
        """A call was given a value."""
        if tensor is None:
            return
        inputs = self._inputs
        series = self.series.setdefault(slot, Series(inputs.role(op, number), op, inputs.is_random(number)))
        _add(series.readings, read(step, tensor))
        series.numbers.setdefault(step, []).append(number)
        if self._num_kept + native.numel(tensor) <= _MOST_KEPT:
            self._num_kept += native.numel(tensor)
            series.values.setdefault(step, []).append(native.clone(native.detach(tensor)))


def states_of(optimizer: torch.optim.Optimizer) -> States:
    """Copies of what an optimizer keeps of each parameter."""
    states = [(parameter, optimizer.state.get(parameter)) for parameter in parameters_of(optimizer)]
    return {
        parameter: {
            name: native.clone(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
        }
        for parameter, state in states
        if isinstance(state, dict)
    }


def _add(readings: list[Reading], reading: Reading | None) -> None:
    """Add one; one line may run several times in a step, whose readings are joined."""
    if reading is not None and readings and readings[-1].step == reading.step:
        readings[-1] = readings[-1].joined(reading)
    elif reading is not None:
        readings.append(reading)


def read(step: int, tensor: torch.Tensor) -> Reading | None:
    """The range of a tensor; ``None`` of one that has none, or a bad value, which is the failure itself."""
    return next(iter(read_all(step, [(None, tensor)]).values()), None)


def read_all(step: int, given: Iterable[tuple[S, torch.Tensor]]) -> dict[S, Reading]:
    """The values of a step; what one line read several times as one. Waits for a device once."""
    known, parts = list[tuple[S, torch.Tensor]](), list[torch.Tensor]()
    for slot, one in given:
        with (
            native.no_grad(),
            suppress(RuntimeError, NotImplementedError, TypeError),
        ):  # of a type that has no such call
            if one.layout is torch.strided and not native.is_complex(one) and native.numel(one):
                parts += [*native.aminmax(one), native.count_nonzero(one), native.sum(one, dtype=torch.double)]
                known.append((slot, one))
    numbers, found = iter(numbers_of(parts)), dict[S, Reading]()
    for slot, one in known:
        low, high, count, total = (next(numbers) for _ in range(4))
        if all(map(math.isfinite, (low, high, total))):
            rows, dtype = one.shape[0] if native.dim(one) else 0, str(one.dtype).removeprefix("torch.")
            reading = Reading(step, low, high, native.numel(one), 1 - count / native.numel(one), rows, dtype, total)
            found[slot] = found[slot].joined(reading) if slot in found else reading
    return found


def arguments_of(op: Op) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call by their position or name."""
    yield from enumerate(op.args)
    yield from op.kwargs.items()


def given_to(op: Op) -> Iterator[tuple[Slot, Number]]:
    """The tensors among the arguments of a call: those that are one themselves, and those inside of one."""
    for place, value in arguments_of(op):
        if isinstance(value, Number):
            yield (op.code, op.instruction, place), value
        else:
            for inner, number in enumerate(iter_leaves(value, Number)):
                yield (op.code, op.instruction, f"{place}[{inner}]"), number


def settings_of(ops: Sequence[Op], *, of_all: bool = False) -> dict[Key, Value]:
    """The numbers, flags and words that a step ran with: arguments of calls, ``of_all`` or of those that gradients are
    made of, options, attributes of its roots; that it made the calls which belong to a step. An evaluation comes before
    the step, whose own ones stay."""
    used = {n for n, op in enumerate(ops) if op.kind.is_forward} if of_all else _used_by_gradients(ops)
    found = dict[Key, Any]()
    for place, op in enumerate(ops):
        if op.kind in (OptimizerStep, ZeroGrad, Clip):
            owner = op.target if op.kind is OptimizerStep else op.args[0] if op.kind is ZeroGrad else None
            found["call", op.kind, id(owner)] = True
        if op.kind is OptimizerStep:
            options = ((n, name, value) for n, group in enumerate(op.note.options) for name, value in group.items())
            for n, name, value in options:
                parts = enumerate(value) if isinstance(value, tuple) else [(0, value)]
                found.update({("option", id(op.target), n, part, name): one for part, one in parts})
        elif place in used:
            found.update({("argument", op.code, op.instruction, name): value for name, value in arguments_of(op)})
        if op.kind is Root and op.note.attributes is not None and op.mode.grad:
            noted, parameters = op.note.attributes, op.note.attributes.layout.parameters
            found.update({("attribute", id(space), name): value for (space, name), value in noted.items()})
            flags = zip(parameters, noted.values[len(noted.values) - len(parameters) :], strict=True)
            found.update({("flag", id(parameter)): flag for parameter, flag in flags})
    return {key: value for key, value in found.items() if is_plain(value)}


def _used_by_gradients(ops: Sequence[Op]) -> set[int]:
    """The positions of the calls that gradients are made of, or that are made of gradients, and of writes."""
    needed, of_gradients, found = set[Number](), set[Number](), set[int]()
    for place in range(len(ops) - 1, -1, -1):
        if ops[place].kind.differentiates or (ops[place].kind.is_forward and not needed.isdisjoint(ops[place].outs)):
            found.add(place)
            needed.update(ops[place].ins)
    for place, op in enumerate(ops):
        if (
            op.kind is Clip
            or op.kind.writes_state(op)
            or op.kind.reads_gradients(op)
            or not of_gradients.isdisjoint(op.ins)
        ):
            found.add(place)
            of_gradients.update(op.outs)
    return found


def is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def settings_over(segments: Iterable[Segment], *, of_all: bool = False) -> dict[Key, list[tuple[int, Value]]]:
    """The settings of steps, each with the steps that ran with one."""
    found: dict[Key, list[tuple[int, Value]]] = {}
    for ops, mark in segments:
        for key, value in settings_of(ops, of_all=of_all).items():
            found.setdefault(key, []).append((mark.step, value))
    return found


def setting_name(key: Key, loop: Loop, frame: FrameType | None) -> tuple[str, str | None]:
    """The name of a setting as the user knows it, in words, and the module that it is of."""
    kind, *where = key
    modules, ops = loop.world.modules, loop.tape.ops()
    if kind == "call":
        found = names_of([op.target for op in ops if id(op.target) == where[1]][:1], frame)
        names = {OptimizerStep: f"{found.get(where[1], 'optimizer')}.step", ZeroGrad: "zero_grad"}
        return f"`{names.get(where[0], 'clip_grad_norm_')}`", None
    if kind == "argument":
        op = next((op for op in reversed(ops) if (op.code, op.instruction) == (where[0], where[1])), None)
        name = argument_name(op, where[2], spaces_of(frame)) if op is not None else ""
        site = make_site(where[0], where[1]) if where[0] is not None and not name else None
        text = ast.unparse(next(iter(parts(site)))) if site is not None and parts(site) else ""
        other = f"a number{quoted(f' in `{text}`')}" if 0 < len(text) < _MOST_WORDS else "a number"
        return f"`{name}`" if name else other, None
    if kind == "flag":
        name = parameter_names(modules, frame).get(where[0], "")
        return f"`{name}.requires_grad`", name.rpartition(".")[0] or None
    roots = root_names(modules, frame)
    known = ((roots.get(id(root)), *one) for root in modules for one in members.named_modules(root))
    owner = next((one for one in known if id(members.space_of_module(one[2])) == where[0]), (None, "", None))
    place = ".".join(filter(None, [owner[0], user_path(owner[1])]))
    return f"`{'.'.join(filter(None, [place, where[-1]]))}`", place or None


Spaces = Mapping[CodeType, Mapping[str, Any]]  # the variables of running functions


def spaces_of(frame: FrameType | None) -> Spaces:
    """The variables of the functions that run in a frame and around it."""
    found: dict[CodeType, Mapping[str, Any]] = {}
    while frame is not None:
        found.setdefault(frame.f_code, {**frame.f_globals, **frame.f_locals})
        frame = frame.f_back
    return found


def slot_name(names: Names, series: Series, slot: Slot, spaces: Spaces) -> str:
    """As the line that reads a value calls it, else the variable that holds it."""
    text = argument_name(series.op, slot[2], spaces)
    if text:
        return text
    number = next(iter(series.numbers.get(series.readings[-1].step, ())), None)
    tensor = number() if number is not None else None
    found = names.describe(number, tensor) if tensor is not None else None
    return found.name if found is not None and found.role != "opaque" else UNNAMED


def argument_name(op: Op, place: object, spaces: Spaces) -> str:
    """The expression that is an argument of a call, where the call is written; empty if that is not known or long."""
    for part in parts(make_site(op.code, op.instruction)) if op.code is not None else ():
        text = ""
        if isinstance(place, str) and isinstance(part, ast.Call):
            given = {one.arg: one.value for one in part.keywords}
            text = ast.unparse(given[place]) if place in given else ""
        elif isinstance(place, int) and place < len(operands := _operands(part, op, spaces)):
            text = ast.unparse(operands[place])
        if text and len(text) <= _MOST_NAME:
            return quoted_unless_name(text, f"an argument of {name_of(op).rpartition('.')[2] or 'a call'}")
    return ""


def _operands(part: ast.AST, op: Op, spaces: Spaces) -> list[ast.expr]:
    """The expressions of the arguments of a call, if there are so many and their order is known."""
    number, found = len(op.args), list[ast.expr]()
    if isinstance(part, ast.Call):
        found = list(part.args)
        if len(found) == number - 1 and isinstance(part.func, ast.Attribute):
            found = [part.func.value, *found]
    elif isinstance(part, ast.BinOp):
        found = [part.left, part.right]
        space, name = spaces.get(op.code, {}) if op.code is not None else {}, name_of(op).rpartition(".")[2]
        are_numbers = [isinstance(side, ast.Constant) or _is_number_name(side, space) for side in found]
        has_number = sum(isinstance(value, Number) for value in op.args) == 1
        if name.startswith("__r") or are_numbers == [True, False]:  # such a method is given the tensor first
            found.reverse()
        elif has_number and name in _COMMUTATIVE and are_numbers != [False, True]:
            return []
    return found if len(found) == number else []


def _is_number_name(expression: ast.expr, space: Mapping[str, Any]) -> bool:
    return isinstance(expression, ast.Name) and isinstance(space.get(expression.id), (int, float))
