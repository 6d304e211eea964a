"""A program in another dtype or on another device: the same calls on converted tensors.

Random calls stay as they were recorded, between casts, because another dtype or device draws other numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from reprokit import native
from reprokit.errors import UsageError, pass_on
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Device, Input, Mode, Program, Ref, Symbol, iter_refs, map_leaves, substitute
from reprokit.program.observe import Trace
from reprokit.program.step import HasProgram, Step

_REAL = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_COMPLEX = frozenset({"complex32", "complex64", "complex128", "cfloat", "cdouble"})
_CASTS = {
    torch.float16: "torch.Tensor.half",
    torch.bfloat16: "torch.Tensor.bfloat16",
    torch.float32: "torch.Tensor.float",
    torch.float64: "torch.Tensor.double",
}


def in_dtype(step: HasProgram, dtype: torch.dtype) -> Step:
    """The step with everything that is a floating-point number in ``dtype``, and without autocast."""
    random = {index for index, call in enumerate(step.program.calls) if call.mode.rng is not None}
    trace = Trace(step.program, lambda tensor: tensor.dtype, random)
    if random:
        trace.run(step.tensors)

    def convert(leaf: Any) -> Any:
        name = leaf.name.removeprefix("torch.") if isinstance(leaf, Symbol) else ""
        return Symbol(str(_like(getattr(torch, name), dtype))) if name in _REAL | _COMPLEX else leaf

    def change(call: Call) -> Call:
        target = _CASTS[dtype] if call.target in _CASTS.values() else call.target
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), convert)
        return replace(call, target=target, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=()))

    def before(index: int, value: int) -> Symbol | None:
        read = trace.reads.get(index, {}).get(value)
        return Symbol(str(read)) if read is not None and read != _like(read, dtype) else None

    tensors = {value: native.to(tensor, _like(tensor.dtype, dtype)) for value, tensor in step.tensors.items()}
    return Step(_converted(step.program, change, before, Symbol(str(dtype))), tensors)


def require_cuda() -> None:
    """Raise `UsageError` without a GPU."""
    if not native.cuda_is_available():
        raise UsageError("`mismatch:cpu-cuda` needs CUDA, and this torch sees none", hint="run it on a GPU machine")


def on_device(step: HasProgram, kind: str) -> Step:
    """The step on the CPU or on CUDA; generator states stay as they are. Raises `UsageError` without CUDA."""
    if kind == "cuda":
        require_cuda()
    states = {item.value for item in step.program.inputs if item.role == "rng"}
    device = Device(kind)

    def move(leaf: Any) -> Any:
        return device if isinstance(leaf, Device) else leaf

    def change(call: Call) -> Call:
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), move)
        autocast = tuple((kind, dtype) for _, dtype in call.mode.autocast[:1])
        return replace(call, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=autocast))

    home = next((t.device.type for v, t in step.tensors.items() if v not in states), "cpu")
    tensors = {v: tensor if v in states else native.to(tensor, kind) for v, tensor in step.tensors.items()}
    return Step(_converted(step.program, change, lambda index, value: Device(home), device), tensors)


def exact_results(
    call: Call, given: Mapping[int, torch.Tensor], made: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """What a call would have ``made`` (results, and what it wrote into) in float64 of what it was ``given``.

    Empty for random calls, which draw other numbers in float64, and where the kernel refuses.
    """
    if call.mode.rng is not None:
        return {}
    alone = Program((call,), tuple(Input(value, "x") for value in given), tuple(Ref(value) for value in made))
    try:
        wide = in_dtype(Step(alone, given), torch.float64)
        with default_dtype(torch.float64), native.no_grad():
            return run(wide.program, wide.tensors).values
    except Exception as error:  # kernels refuse in as many ways as there are functions
        pass_on(error)
        return {}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of new tensors."""
    before = native.get_default_dtype()
    native.set_default_dtype(dtype)
    try:
        yield
    finally:
        native.set_default_dtype(before)


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


def _like(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a number of dtype ``found`` after the conversion; complex64 stands for a complex bfloat16."""
    if found.is_complex:
        return dtype.to_complex()
    return dtype if found.is_floating_point else found
