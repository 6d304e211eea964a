"""Reads the inputs of the kept steps while they are played unchanged: values, settings, state, updates, gradients.

A value is compared where it meets the model: data, and what earlier steps have left. What a step computes of its
parameters is a consequence, and is not compared.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import torch

from reprokit.capture.calls import (
    Backward,
    CompiledStep,
    Function,
    OptimizerStep,
    Root,
    Transform,
    gives_gradients,
    name_of,
    starts_of,
    unscaled,
)
from reprokit.capture.replay import PlayObserver, Replay
from reprokit.capture.structure import iter_leaves, iter_tensors
from reprokit.capture.tape import Number, Op
from reprokit.capture.tensor_names import Names
from reprokit.compare.quantity import norm_of, number_of, update_of
from reprokit.locate.ways import HALVES
from reprokit.program.functions import written_argument
from reprokit.program.sites import make_site, parts
from reprokit.series.cause import Reading, Unlike, changed, course, emptied_state, growth, unlike, written
from reprokit.series.timeline import parameters_of
from reprokit.words import user_path

_MOST_KEPT = 2**24  # elements of the values of usual steps that are kept to be put in the place of odd ones
UNNAMED = "input"
_COMMUTATIVE = frozenset({"add", "mul"})
_FACTORS = frozenset({"mul", "rmul", "div", "rdiv", "truediv", "rtruediv"})  # calls whose single numbers are settings
_MOST_NAME = 30  # characters of an expression that is a name

Slot = tuple[Any, int, int | str]  # the code and instruction of a call, and the position or name of an argument
States = dict[torch.Tensor, dict[str, Any]]  # of optimizers, by parameter
Key = tuple[Any, Any, Any]  # of a setting: an argument's slot; an optimizer, group and name; a root, part and name


class LossWatch(PlayObserver):
    """Reads the loss that a step differentiates, without the factor of a scaler. Stops at the ``deadline``."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.loss = math.nan

    def begin(self, replay: Replay) -> bool:
        return time.monotonic() > self._deadline

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
        return unlike(name, self.role, self.readings, num_past)


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
        is_own = self.tensor.numel() == 1 or not self.is_stepped
        return is_own and self.tensor.is_floating_point()


@dataclass(frozen=True)
class Setting:
    """A number that is no tensor: its readings where it changed, and the ``values`` themselves."""

    name: str
    is_flag: bool
    readings: list[Reading] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def before(self, step: int) -> Any:
        """Its value before a step, else the first one."""
        place = next((n for n, one in enumerate(self.readings) if one.step >= step), len(self.values))
        return self.values[max(0, place - 1)]


class InputWatch(LossWatch):
    """Reads what the steps were given. ``parts`` are parameters and buffers by ``id``; of these some are
    ``followed``."""

    def __init__(
        self, deadline: float, state: set[int], parts: Mapping[int, StatePart], frame: FrameType | None
    ) -> None:
        super().__init__(deadline)
        self._spaces = spaces_of(frame)
        self.series: dict[Slot, Series] = {}
        self.settings: dict[Key, Setting] = {}
        self.followed = [part for part in parts.values() if part.is_followed]
        self.written: list[tuple[Unlike, torch.Tensor, torch.Tensor]] = []  # with what it was
        self.lost: list[tuple[Unlike, States]] = []  # states of optimizers, with what their last step has left
        self.updates: list[float] = []  # over the norm of the parameters
        self.norms: list[float] = []  # of gradients
        self.halves: set[str] = set()  # half precisions of what the last step has made
        self._parts, self._state = parts, state
        self._made_in: dict[Number, int] = {}  # the step in which something was computed of parameters
        self._seen: set[Number] = set()
        self._random: set[Number] = set()
        self._derived: set[Number] = set()  # computed of data
        self._noted: dict[int, Any] = {}  # attributes of root modules
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, or what is written
        self._left: States = {}  # by the last update of each parameter
        self._lines: dict[int, str] = {}  # that wrote into tensors, by their ``id``
        self._num_kept = 0

    def begin(self, replay: Replay) -> bool:
        self._seen, self.halves = set(), set()
        for part in self.followed:
            if not part.readings:
                part.first = part.tensor.detach().clone()
            _add(part.readings, read(replay.segment.mark.step, part.tensor))
        return super().begin(replay)

    def before(self, replay: Replay, op: Op) -> bool:
        step = replay.segment.mark.step
        if op.kind is OptimizerStep:
            changed = list(parameters_of(op.target))
            self._compare_states(step, op.target)
            norm = norm_of(parameter.grad for parameter in changed if parameter.grad is not None)
            self.norms += [norm] if norm is not None else []
            for place, group in enumerate(op.note.options):
                for name, value in group.items():
                    self._set((op.target, place, name), name, step, value)
        else:
            changed = list(self._written(replay, op))
        self._before = [(tensor, tensor.detach().clone()) for tensor in changed]
        if op.kind.is_forward:
            for argument, value in arguments_of(op):
                self._set((op.code, op.instruction, argument), "", step, value, op)
            if self._meets_model(replay, op):
                self._read_all(replay, op)
        if op.kind is Root and op.note.attributes is not None and op.mode.grad:
            self._read_attributes(step, op)
        return super().before(replay, op)

    def after(self, replay: Replay, op: Op) -> bool:
        step = replay.segment.mark.step
        made = [value for number in op.outs if (value := replay.player.value(number)) is not None]
        self.halves.update(str(value.dtype).removeprefix("torch.") for value in made if value.dtype in HALVES)
        if (op.kind.is_forward and self._meets_model(replay, op)) or op.kind is Backward:
            self._made_in.update(dict.fromkeys(op.outs, step))
        elif op.kind is Function:
            self._derived.update(() if all(self._is_plain(replay, number) for number in op.ins) else op.outs)
            is_drawn = op.note is not None and op.note.rng is not None
            self._random.update(op.outs if is_drawn or not self._random.isdisjoint(op.ins) else ())
        if op.kind is OptimizerStep:
            update = update_of([old for _, old in self._before], [tensor.detach() for tensor, _ in self._before])
            self.updates += [update] if update is not None else []
            self._left.update(states_of(op.target))
        else:
            site = make_site(op.code, op.instruction) if self._before and op.code is not None else None
            where = f"{site.file}:{site.line}" if site is not None else ""
            for tensor, old in self._before:
                was, now, part = read(step, old), read(step, tensor), self._parts.get(id(tensor))
                self._lines[id(tensor)] = where
                if part is None or was is None or now is None or not tensor.is_floating_point():
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

    def _meets_model(self, replay: Replay, op: Op) -> bool:
        is_whole = op.kind in (Root, Transform, CompiledStep)  # with parameters that are no arguments
        return is_whole or any(number in self._made_in or self._is_state(replay, number) for number in op.ins)

    def _is_state(self, replay: Replay, number: Number) -> bool:
        tensor = replay.player.alive.get(number)
        return tensor is not None and id(tensor) in self._state

    def _is_plain(self, replay: Replay, number: Number) -> bool:
        """True for a single number that the loop has made a tensor of, such as a coefficient, and no loader."""
        value, is_made = replay.player.value(number), number not in self._derived and number not in self._random
        return is_made and value is not None and value.dim() == 0 and getattr(number, "batch", None) is None

    def _read_all(self, replay: Replay, op: Op) -> None:
        step = replay.segment.mark.step
        for slot, number in given_to(op):
            is_own = self._is_state(replay, number) or self._made_in.get(number) == step
            tensor = replay.player.value(number)
            if is_own or number in self._seen or tensor is None:
                continue
            self._seen.add(number)
            is_factor = name_of(op).rpartition(".")[2].strip("_") in _FACTORS and self._is_plain(replay, number)
            role = "carried" if number in self._made_in else "setting" if is_factor else "batch"
            series = self.series.setdefault(slot, Series(role, op, number in self._random))
            _add(series.readings, read(step, tensor))
            series.numbers.setdefault(step, []).append(number)
            if self._num_kept + tensor.numel() <= _MOST_KEPT:
                self._num_kept += tensor.numel()
                series.values.setdefault(step, []).append(tensor.detach().clone())

    def _set(self, key: Key, name: str, step: int, value: Any, op: Op | None = None) -> None:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        if key not in self.settings:
            name = name or (argument_name(op, key[2], self._spaces) if op is not None else "")
            self.settings[key] = Setting(name, isinstance(value, bool))
        known = self.settings[key]
        reading = Reading(step, float(value), float(value))
        if known.readings and known.readings[-1].step == step:
            _add(known.readings, reading)
        elif not known.readings or not known.readings[-1].low <= value <= known.readings[-1].high:
            known.readings.append(reading)
            known.values.append(value)

    def _read_attributes(self, step: int, op: Op) -> None:
        """Those of a root that have changed."""
        noted = op.note.attributes
        if self._noted.get(id(op.target)) is noted:
            return
        self._noted[id(op.target)] = noted
        paths = {id(vars(module)): path for path, module in op.target.named_modules()}
        for (space, name), value in noted.items():
            if id(space) in paths:
                path = ".".join(filter(None, [user_path(paths[id(space)]), name]))
                self._set((op.target, id(space), name), path, step, value)


def states_of(optimizer: torch.optim.Optimizer) -> States:
    """Copies of what an optimizer keeps of each parameter."""
    states = [(parameter, optimizer.state.get(parameter)) for parameter in parameters_of(optimizer)]
    return {
        parameter: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
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
    if tensor.numel() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
        return None
    try:
        low, high = map(float, tensor.detach().aminmax())
        zeros = 1 - int(tensor.detach().count_nonzero()) / tensor.numel()
    except (RuntimeError, NotImplementedError):  # of a type that torch cannot compare, or without memory
        return None
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    rows, dtype = len(tensor) if tensor.dim() else 0, str(tensor.dtype).removeprefix("torch.")
    return Reading(step, low, high, tensor.numel(), zeros, rows, dtype)


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
            return text
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
