"""Mismatch: the results of a candidate differ from those of a reference (`locate.differences`).

A reference is the same program in float64 or on the other kind of device (compiled: `locate.compiled`). Each runs a
candidate twice, as it is and in the other way, on the same inputs. Random calls run as they were recorded in both, on
inputs cast for them, because another dtype or device draws other numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from reprokit.errors import UsageError
from reprokit.locate.differences import MISMATCH, LoneCalls, Reference, compare, mismatch
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Outcome, run
from reprokit.program.ir import (
    Call,
    Device,
    Mode,
    Phase,
    Program,
    Ref,
    Symbol,
    iter_refs,
    map_leaves,
    substitute,
)
from reprokit.program.step import HasProgram, Step
from reprokit.shrink.signature import Ruling, SignatureCheck

_METHOD = "torch.Tensor."
_REAL = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_COMPLEX = frozenset({"complex32", "complex64", "complex128", "cfloat", "cdouble"})
_CASTS = {
    torch.float16: "torch.Tensor.half",
    torch.bfloat16: "torch.Tensor.bfloat16",
    torch.float32: "torch.Tensor.float",
    torch.float64: "torch.Tensor.double",
}


@dataclass(frozen=True, slots=True)
class Double:
    """The same calls in float64."""

    @property
    def name(self) -> str:
        """``fp64``."""
        return "fp64"

    def require(self) -> None:
        """Every machine can."""

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """As it is, and in float64."""
        actual = run(step.program, step.tensors, keep=keep)
        other = in_dtype(step, torch.float64)
        with default_dtype(torch.float64):
            return actual, run(other.program, other.tensors, keep=keep)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """The same calls on CUDA when they ran on the CPU, and the other way round."""

    @property
    def name(self) -> str:
        """``cpu-cuda``."""
        return "cpu-cuda"

    def require(self) -> None:
        """Look for a GPU."""
        if not torch.cuda.is_available():
            raise UsageError("`mismatch:cpu-cuda` needs CUDA, and this torch sees none", hint="run it on a GPU machine")

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """On CUDA, and on the CPU."""
        first, second = (on_device(step, kind) for kind in ("cuda", "cpu"))
        return run(first.program, first.tensors, keep=keep), run(second.program, second.tensors, keep=keep)


def in_dtype(candidate: HasProgram, dtype: torch.dtype) -> Step:
    """The candidate with everything that is a floating-point number in ``dtype``, and without autocast."""
    dtypes = _dtypes_read(candidate)

    def convert(leaf: Any) -> Any:
        return _converted_symbol(leaf, dtype) if isinstance(leaf, Symbol) else leaf

    def change(call: Call) -> Call:
        target = _CASTS[dtype] if call.target in _CASTS.values() else call.target
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), convert)
        return replace(call, target=target, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=()))

    def before(index: int, value: int) -> Symbol | None:
        read = dtypes.get((index, value))
        return Symbol(str(read)) if read is not None and read != _like(read, dtype) else None

    program = _converted(candidate.program, change, before, Symbol(str(dtype)))
    tensors = {value: tensor.to(_like(tensor.dtype, dtype)) for value, tensor in candidate.tensors.items()}
    return Step(program, tensors)


def on_device(candidate: HasProgram, kind: str) -> Step:
    """The candidate on the CPU or on CUDA; generator states stay what they are."""
    states = {item.value for item in candidate.program.inputs if item.role == "rng"}
    device = Device(kind)

    def change(call: Call) -> Call:
        args, kwargs = map_leaves(
            (call.args, dict(call.kwargs)), lambda leaf: device if isinstance(leaf, Device) else leaf
        )
        autocast = tuple((kind, dtype) for _, dtype in call.mode.autocast[:1])
        return replace(call, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=autocast))

    home = next((t.device.type for v, t in candidate.tensors.items() if v not in states), "cpu")
    program = _converted(candidate.program, change, lambda index, value: Device(home), device)
    tensors = {v: tensor if v in states else tensor.to(kind) for v, tensor in candidate.tensors.items()}
    return Step(program, tensors)


def _converted(
    program: Program,
    change: Callable[[Call], Call],
    before: Callable[[int, int], Symbol | Device | None],
    after: Symbol | Device,
) -> Program:
    """Every call changed; random calls stay, between casts of what they read and of what they return."""
    calls: list[Call] = []
    number = program.next_value()
    for index, call in enumerate(program.calls):
        if call.mode.rng is None:
            calls.append(change(call))
            continue
        casts: dict[int, Ref] = {}
        for value in dict.fromkeys(ref.value for ref in iter_refs((call.args, dict(call.kwargs)))):
            kind = before(index, value)
            if kind is not None:
                casts[value] = Ref(number)
                calls.append(_cast(Ref(value), kind, casts[value], call.mode))
                number += 1
        made = {value: Ref(number + place) for place, value in enumerate(call.output_refs())}
        number += len(made)
        args, kwargs = substitute(call.args, casts), substitute(dict(call.kwargs), casts)
        calls.append(replace(call, args=args, kwargs=kwargs, outputs=substitute(call.outputs, made)))
        calls += [_cast(raw, after, Ref(value), call.mode) for value, raw in made.items()]
    return replace(program, calls=tuple(calls))


def _cast(source: Ref, kind: Symbol | Device, target: Ref, mode: Mode) -> Call:
    return Call("torch.Tensor.to", (source, kind), outputs=target, mode=replace(mode, rng=None))


def _converted_symbol(symbol: Symbol, dtype: torch.dtype) -> Symbol:
    name = symbol.name.removeprefix("torch.")
    if name in _REAL | _COMPLEX:
        return Symbol(str(_like(getattr(torch, name), dtype)))
    return symbol


def _like(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a number of dtype ``found`` becomes. There is no complex bfloat16: complex64 stands for it."""
    if found.is_complex:
        return dtype.to_complex()
    return dtype if found.is_floating_point else found


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """An observer that notes the dtypes of what random calls read."""

    found: dict[tuple[int, int], torch.dtype]

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note dtypes."""
        if call.mode.rng is not None:
            self.found.update({(index, v): values[v].dtype for v in call.input_refs() if v != call.mode.rng.value})

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing more."""


def _dtypes_read(candidate: HasProgram) -> dict[tuple[int, int], torch.dtype]:
    """The dtypes of what random calls read, by call and value."""
    watch = _Dtypes({})
    if any(call.mode.rng is not None for call in candidate.program.calls):
        run(candidate.program, candidate.tensors, observer=watch, keep=frozenset())
    return watch.found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class MismatchCheck(SignatureCheck):
    """A difference from a reference. ``way`` of its failures is the reference's name, and whether numbers differ or one
    side has a NaN or infinity in their place: these are different failures."""

    reference: Reference = field(default_factory=Double)
    way: str = ""

    def recognises(self, failure: Failure) -> bool:
        """True if results differ."""
        return failure.kind == MISMATCH

    @property
    def spec(self) -> str:
        """``mismatch:fp64``."""
        return f"{MISMATCH}:{self.reference.name}"

    def observe(self, candidate: Step) -> Failure | None:
        """Compare the whole program, then single calls."""
        program = candidate.program
        found = compare(candidate, self.reference, self.way or None)
        if isinstance(found, Failure) or found is None:
            return found
        target = self.wanted.call if self.wanted is not None else None
        if self.wanted is None or target is not None:
            blamed = LoneCalls(self.reference, program, target, self.way or None).of(candidate)
            if blamed is not None:
                return blamed
        phase = Phase.BACKWARD if found.is_gradient else Phase.FORWARD
        return mismatch(found, self.reference, phase)

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole program."""
        return replace(super().adopted(failure, whole), way=failure.way)

    def judge(self, observation: Failure | None, candidate: Step) -> Ruling:
        """Like any check, and different numbers stay different numbers."""
        verdict = super().judge(observation, candidate)
        is_other_way = observation is not None and observation.way != self.way
        return Ruling.OTHER if verdict is Ruling.SAME and is_other_way else verdict
