"""The scene of a failure: what the origin call was given, what it made of it, and what surrounded it.

One run of the program is observed. Only the calls near the origin keep their tensors (copies, without gradient); of all
others a peak is noted, the largest finite magnitude, from which growth over depth is read.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from reprokit.locate.failure import Failure
from reprokit.locate.ways import PLUS, ways_of
from reprokit.program.functions import UnknownFunction, display_name, function_named, is_in_place
from reprokit.program.ir import Call, Program, Ref, iter_refs
from reprokit.program.run import Tensors, bind_arguments, run

Slot = int | str
_ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rsub": "sub", "float_power": "pow",
    "arccos": "acos", "arcsin": "asin", "arccosh": "acosh", "arctanh": "atanh", "arctan2": "atan2", "inverse": "inv",
    "softmax2d": "softmax", "special_expit": "sigmoid",
}  # fmt: skip
_ROLES = {
    "div": ("numerator", "denominator"),
    "pow": ("base", "exponent"),
    "reciprocal": ("denominator",),
    "fmod": ("numerator", "denominator"),
    "remainder": ("numerator", "denominator"),
}
_POSITIVE = ("exp", "exp2", "softmax", "sigmoid")  # never zero but by underflow
_FIRST = ("input", "self", "tensor", "x", "A")
_REVERSED = ("__rtruediv__", "__rdiv__", "__rpow__", "__rsub__", "rsub", "__rmod__")
VIEWS = frozenset([
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "flatten", "unflatten",
    "contiguous", "t", "__get__", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type_as",
    "movedim", "chunk", "split", "unbind", "__getitem__", "select", "narrow", "repeat",
])  # fmt: skip


class Step(Protocol):
    """What a diagnosis is made from; a snapshot is one."""

    @property
    def program(self) -> Program:
        """The calls of the step."""

    @property
    def tensors(self) -> Mapping[int, torch.Tensor]:
        """The inputs of the program by value number."""

    @property
    def failure(self) -> Failure:
        """What went wrong."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The determinism switches."""

    @property
    def timeline(self) -> Sequence[Mapping[str, Any]]:
        """The steps before, in numbers."""


def short_name(call: Call) -> str:
    """The function in a word that all its spellings share: ``div`` for ``/=``, ``acos`` for ``arccos``."""
    last = display_name(call.target).rpartition(".")[2]
    last = last.removeprefix("special_")
    if is_in_place(call.target) and last.endswith("_"):
        last = last.rstrip("_")
    return _ALIASES.get(last, last)


def slot_of(call: Call, role: Slot) -> Slot:
    """Where an argument stands: a position, or the name of a keyword argument.

    ``role`` is a position, ``x`` or ``y`` for the first and second operand, a role such as ``denominator``, or the name
    that the function's signature gives; raises `KeyError`.
    """
    if isinstance(role, int):
        return role
    if role in call.kwargs:
        return role
    position = _position(call, role)
    if position < len(call.args):
        return position
    if position == 0:
        return next(name for name in (*_FIRST, *call.kwargs) if name in call.kwargs)
    if position == 1 and "other" in call.kwargs:
        return "other"
    raise KeyError(role)


def _position(call: Call, role: str) -> int:
    roles = _ROLES.get(short_name(call), ())
    if role in roles:
        position = roles.index(role)
        return len(roles) - 1 - position if call.name in _REVERSED else position
    if role in ("x", "y"):
        return "xy".index(role)
    try:
        names = list(inspect.signature(function_named(call.target)).parameters)
    except (TypeError, ValueError, UnknownFunction):
        raise KeyError(role) from None
    if role not in names:
        raise KeyError(role)
    return names.index(role)


def argument_at(call: Call, slot: Slot) -> Any:
    """The argument in a slot."""
    return call.args[slot] if isinstance(slot, int) else call.kwargs[slot]


@dataclass(frozen=True, slots=True)
class Seen:
    """A call with the real arguments it was run with, and its results by value number."""

    call: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def argument(self, role: Slot) -> Any:
        """One argument; raises `KeyError`."""
        slot = slot_of(self.call, role)
        return self.args[slot] if isinstance(slot, int) else self.kwargs[slot]

    @property
    def result(self) -> torch.Tensor | None:
        """The first tensor that came out."""
        return next(iter(self.results.values()), None)


@dataclass(frozen=True, slots=True)
class Branch:
    """A later call that drops elements of the origin's result: ``kept`` is true where they go on."""

    call: Call
    kept: torch.Tensor


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest finite magnitude in a call's results, and their dtype."""

    value: float
    dtype: torch.dtype


@dataclass
class Scene:
    """What one run showed. ``call`` and ``origin`` are ``None`` when an input was bad before the first call.

    ``infinite`` has the calls that divide by an infinity (true), and those that made one of finite arguments (false).
    ``zeros`` counts the zeros that calls made which cannot give any but by underflow.
    """

    program: Program
    tensors: Tensors
    failure: Failure
    timeline: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)
    peaks: dict[int, Peak] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    infinite: dict[int, bool] = field(default_factory=dict)
    zeros: dict[int, int] = field(default_factory=dict)

    @property
    def call(self) -> Call | None:
        """The origin."""
        return self.program.calls[self.failure.call_index] if self.failure.call_index is not None else None

    @property
    def origin(self) -> Seen | None:
        """The origin with its real arguments."""
        return self.seen.get(self.failure.call_index) if self.failure.call_index is not None else None

    def operand(self, role: Slot) -> Any:
        """An argument of the origin; raises `KeyError`."""
        if self.origin is None:
            raise KeyError(role)
        try:
            return self.origin.argument(role)
        except (StopIteration, IndexError):
            raise KeyError(role) from None

    def tensor(self, role: Slot) -> torch.Tensor | None:
        """An argument of the origin as a tensor of numbers; ``None`` when it is neither tensor nor number."""
        try:
            found = self.operand(role)
        except KeyError:
            return None
        if isinstance(found, torch.Tensor):
            return found
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return torch.tensor(float(found), dtype=torch.float64) if is_number else None

    def name(self, role: Slot) -> str:
        """What to call an argument of the origin: the input's name in backticks, or a word for its role."""
        call = self.call
        with contextlib.suppress(KeyError, StopIteration, IndexError):
            argument = argument_at(call, slot_of(call, role)) if call is not None else None
            for item in self.program.inputs:
                if isinstance(argument, Ref) and item.value == argument.value:
                    return f"`{item.name}`"
        return {"x": "the argument", "y": "the second argument"}.get(str(role), f"the {role}")

    def writer(self, value: int, before: int) -> int | None:
        """The last call before ``before`` whose output this value is."""
        for index in range(before - 1, -1, -1):
            if value in self.program.calls[index].output_refs():
                return index
        return None

    def hidden_overflow(self) -> int | None:
        """The call whose overflow made the origin's zeros, by way of a division by infinity."""
        call, index = self.call, self.failure.call_index
        if call is None or index is None or short_name(call) != "div" or self.failure.kind != "nan":
            return None
        behind = self._behind(call, index)
        if not any(self.infinite.get(number) for number in behind):
            return None
        return min((number for number in behind if self.infinite.get(number) is False), default=None)

    def _behind(self, call: Call, index: int) -> set[int]:
        """The calls that a call depends on."""
        needed, found = set(call.input_refs()), set[int]()
        for number in range(index - 1, -1, -1):
            earlier = self.program.calls[number]
            if needed.intersection(earlier.output_refs()):
                found.add(number)
                needed.update(earlier.input_refs())
        return found

    def makers(self, role: Slot, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of the origin comes from, views and casts skipped, up to ``depth`` back."""
        index, call = self.failure.call_index, self.call
        if index is None or call is None:
            return
        with contextlib.suppress(KeyError, StopIteration, IndexError):
            yield from self.makers_of(argument_at(call, slot_of(call, role)), index, depth)

    def makers_of(self, argument: Any, before: int, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of call number ``before`` comes from, in the same way."""
        for ref in iter_refs(argument):
            index = self.writer(ref.value, before)
            if index is None:
                continue
            call = self.program.calls[index]
            is_view = short_name(call) in VIEWS
            if not is_view:
                yield index, call
            if is_view:
                yield from self.makers_of(call.args[:1], index, depth)
            elif depth > 1:
                yield from self.makers_of((call.args, dict(call.kwargs)), index, depth - 1)


class _Watch:
    """Observes the run for a scene."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._near = _near(scene)
        self._downstream: set[int] = set()
        self._was_finite = True

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what the calls near the origin are given."""
        if index in self._near:
            args, kwargs = bind_arguments(call, values)
            self._scene.seen[index] = Seen(call, _copied(args), _copied(kwargs))
        if self._downstream.intersection(call.input_refs()):
            self._note_branch(call, values)
        if short_name(call) == "div" and _divides_by_infinity(call, values):
            self._scene.infinite[index] = True
        else:
            self._was_finite = all(not _has_infinity(values[v]) for v in call.input_refs() if v in values)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note peaks, and results near the origin."""
        made = {value: values[value] for value in call.output_refs() if value in values}
        if index in self._near:
            self._scene.seen[index].results.update(_copied(made))
        if index == self._scene.failure.call_index or self._downstream.intersection(call.input_refs()):
            self._downstream.update(made)
        if index not in self._scene.infinite and self._was_finite and any(map(_has_infinity, made.values())):
            self._scene.infinite[index] = False
        if short_name(call) in _POSITIVE:
            count = sum(int((tensor == 0).sum()) for tensor in made.values())
            self._scene.zeros.update({index: count} if count else {})
        peak = _peak(made.values())
        if peak is not None:
            self._scene.peaks[index] = peak

    def _note_branch(self, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        for kept in _kept(call, values, self._downstream):
            self._scene.branches.append(Branch(call, kept.detach().clone()))


def observe(step: Step) -> Scene:
    """The scene of a step's failure, from one run."""
    scene = Scene(step.program, step.tensors, step.failure, step.timeline, step.settings)
    run(step.program, step.tensors, observer=_Watch(scene))
    return scene


def recompute(seen: Seen) -> torch.Tensor | None:
    """The first result of a call if it had been made in float64; ``None`` where that cannot be had."""
    if short_name(seen.call) in ("half", "to", "bfloat16", "type_as", "float"):
        first = seen.args[0] if seen.args else None
        return first.double() if isinstance(first, torch.Tensor) and first.is_floating_point() else None
    try:
        args, kwargs = _doubled(seen.args), {k: v for k, v in _doubled(dict(seen.kwargs)).items() if k != "dtype"}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function_named(seen.call.target)(*args, **kwargs)
    except Exception:  # kernels refuse in as many ways as there are functions
        return None
    while isinstance(result, (list, tuple)) and result:
        result = result[0]
    return result if isinstance(result, torch.Tensor) else None


def _near(scene: Scene) -> set[int]:
    """The origin, and the calls that its arguments come from."""
    index, call = scene.failure.call_index, scene.call
    if index is None or call is None:
        return set()
    found = {index}
    if not call.is_optimizer_step:
        found.update(number for number, _ in scene.makers_of((call.args, dict(call.kwargs)), index, 2))
    return found


def _kept(call: Call, values: Mapping[int, torch.Tensor], downstream: set[int]) -> Iterator[torch.Tensor]:
    """Where a call keeps elements of a value that is downstream of the origin, if it is one that drops some."""

    def is_downstream(argument: Any) -> bool:
        return isinstance(argument, Ref) and argument.value in downstream

    def real(argument: Any) -> Any:
        return values.get(argument.value) if isinstance(argument, Ref) else argument

    name, args = short_name(call), [*call.args, *call.kwargs.values()]
    if name == "where" and len(args) == 3:
        chosen, condition, other = (
            (args[0], args[1], args[2]) if "Tensor" in call.target else (args[1], args[0], args[2])
        )
        mask = real(condition)
        if isinstance(mask, torch.Tensor):
            if is_downstream(chosen):
                yield mask.bool()
            if is_downstream(other):
                yield ~mask.bool()
    elif name == "masked_fill" and len(args) >= 3 and is_downstream(args[0]):
        yield ~real(args[1]).bool()
    elif name == "mul" and len(args) == 2:
        for one, other in (args, args[::-1]):
            factor = real(other)
            if is_downstream(one) and isinstance(factor, torch.Tensor) and bool((factor == 0).any()):
                yield factor != 0
    elif call.name == "__getitem__" and is_downstream(args[0]):
        mask = real(args[1])
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
            yield mask


def _has_infinity(tensor: torch.Tensor) -> bool:
    return PLUS in ways_of(tensor)


def _divides_by_infinity(call: Call, values: Mapping[int, torch.Tensor]) -> bool:
    """Whether a division makes zeros of finite numbers, because its divisor is infinite."""
    try:
        divisor = argument_at(call, slot_of(call, "denominator"))
    except (KeyError, StopIteration, IndexError):
        return False
    tensor = values.get(divisor.value) if isinstance(divisor, Ref) else None
    return tensor is not None and _has_infinity(tensor)


def _peak(tensors: Any) -> Peak | None:
    best: Peak | None = None
    for tensor in tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.layout is not torch.strided:
            continue
        sizes = tensor.detach().abs()
        value = float(sizes.max())
        if value != value or value == float("inf"):
            finite = sizes[sizes.isfinite()]
            value = float(finite.max()) if finite.numel() else 0.0
        if best is None or value > best.value:
            best = Peak(value, tensor.dtype)
    return best


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_doubled(item) for item in value)
    if isinstance(value, list):
        return [_doubled(item) for item in value]
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    return value
