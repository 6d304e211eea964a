"""Which inputs of a program hold recorded numbers, and which of these are too many for a script to spell out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from reprokit.errors import UsageError
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program
from reprokit.render.literals import MAX_LITERALS, literal
from reprokit.shrink.plainness import constant_of, ladder, num_digits
from reprokit.shrink.reduction import Reduction


def without_data(reduction: Reduction) -> Reduction:
    """The reduction without a piece of the model that holds recorded numbers; `UsageError` if the minimum does."""
    recorded = set(recorded_inputs(reduction.program, reduction.tensors))
    if recorded:
        names = ", ".join(f"`{item.name}`" for item in reduction.program.inputs if item.value in recorded)
        raise UsageError(
            f"the repro needs recorded numbers ({names}), and --no-data writes none",
            hint="look at them without --no-data, and share them only if they may be seen",
        )
    context = reduction.context
    if context is not None and set(recorded_inputs(context.program, context.tensors)) - set(context.drawn):
        return replace(reduction, context=None)
    return reduction


def recorded_inputs(program: Program, tensors: Tensors) -> list[int]:
    """The inputs whose contents tell something that was recorded, generator states aside."""
    return [item.value for item in program.inputs if item.role != "rng" and not is_plain(tensors[item.value])]


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the contents tell nothing: a power of ten, zero, infinity, a number the reducer chose."""
    if tensor.numel() == 0:
        return True
    constant = constant_of(tensor)
    if constant is not None:
        return _is_round(constant, tensor.dtype)
    found = literal(tensor, max_literals=0)
    return found is not None and found.function in ("arange", "eye")


def _is_round(number: float | complex | int | bool, dtype: torch.dtype) -> bool:
    if isinstance(number, bool):
        return True
    if isinstance(number, complex):
        return number in (0, 1)
    if number == 0 or not math.isfinite(number):
        return True
    if dtype.is_floating_point and abs(number) in ladder(dtype):
        return True
    return num_digits(number, dtype) == 1 and f"{abs(number):.0e}".startswith("1")


def beyond_limit(program: Program, tensors: Tensors) -> tuple[int, ...]:
    """The inputs that go to a side file so that a script spells out at most `MAX_LITERALS` recorded numbers."""
    kept = 0
    beyond = []
    for value in sorted(recorded_inputs(program, tensors), key=lambda value: tensors[value].numel()):
        found = literal(tensors[value])
        if found is not None and found.function == "tensor":
            kept += tensors[value].numel()
            if kept > MAX_LITERALS:
                beyond.append(value)
    return tuple(beyond)
