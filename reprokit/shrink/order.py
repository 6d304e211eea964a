"""The order in which steps are preferred: fewer calls, fewer elements, less to read, plainer values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from reprokit.program.ir import Input, Program, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.leaves import leaves
from reprokit.shrink.plainness import ONES, ZEROS, plainness, seed_of

Key = tuple[int, int, int, int]
_COMMON = (torch.float32, torch.int64, torch.bool)
_AUTOCAST_WEIGHT = 10
Found = TypeVar("Found")


def is_smaller(step: Step, other: Step) -> bool:
    """True if it has fewer calls, elements, settings, dimensions and whole numbers, or plainer values, in order."""
    if size_key(step) != size_key(other):
        return size_key(step) < size_key(other)
    return value_key(step) < value_key(other)


def _once_a_step(function: Callable[[Step], Found]) -> Callable[[Step], Found]:
    known: WeakKeyDictionary[Step, Found] = WeakKeyDictionary()

    def found(step: Step) -> Found:
        if step not in known:
            known[step] = function(step)
        return known[step]

    return found


@_once_a_step
def size_key(step: Step) -> Key:
    """Smaller is better: calls, elements, settings, dimensions and whole numbers."""
    shown = [step.tensors[item.value] for item in step.program.inputs if item.role != "rng"]
    return (
        step.num_calls,
        step.num_elements,
        num_settings(step.program, step.tensors),
        # the integers in arguments are sizes themselves more often than not
        sum(tensor.dim() + sum(tensor.shape) for tensor in shown)
        + sum(abs(leaf) for call in step.program.calls for _, leaf in leaves(call) if isinstance(leaf, int)),
    )


@_once_a_step
def value_key(step: Step) -> float:
    """Smaller is better: how plain the values of the inputs are. Costs as much as a check of a small program."""
    items = [item for item in step.program.inputs if item.role != "rng"]
    return round(sum(_plainness(item, step.tensors[item.value]) for item in items), 6)


def num_settings(program: Program, tensors: Mapping[int, torch.Tensor]) -> int:
    """How much there is to say besides calls and values: arguments, modes, inputs, unusual dtypes and layouts."""
    count = 0
    for call in program.calls:
        count += weight((call.args, dict(call.kwargs)))
        count += _AUTOCAST_WEIGHT * (len(call.mode.autocast) + call.mode.inference + (call.mode.rng is not None))
        count += not call.mode.grad
    for item in program.inputs:
        tensor = tensors[item.value]
        if item.role == "rng":
            count += seed_of(tensor) is None
            continue
        count += 1 + item.requires_grad + (tensor.device.type != "cpu") + (tensor.dtype not in _COMMON)
        count += tensor.layout is not torch.strided or not tensor.is_contiguous()
    return count


def weight(value: Any) -> int:
    """How much there is to read in arguments; flags that are off, 0, 1, ``None`` and short numbers weigh less."""
    if isinstance(value, Mapping):
        return sum(2 + weight(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(1 + weight(item) for item in value)
    if isinstance(value, bool):
        return 1 + value
    if value is None or value in (0, 1):
        return 1
    if isinstance(value, float):
        return 2 + (round_number(value) != value)
    return 2 + len(list(iter_refs(value)))


def round_number(number: float) -> float:
    """The number with at most three significant digits."""
    return float(f"{number:.3g}")


def _plainness(item: Input, tensor: torch.Tensor) -> float:
    """For a gradient ones are the plainest, because a sum hands them back."""
    found = plainness(tensor)
    return {ONES: ZEROS, ZEROS: ONES}.get(found, found) if item.role == "gradient" else found
