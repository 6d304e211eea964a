"""Rendering without training data: recorded values give way to plain ones where the failure does not depend on them.

Every replacement is re-run and has to fail with the same signature. What cannot be replaced is withheld: the repro
then loads it from a file that is not handed out, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from reprokit.errors import ReprokitError, UsageError
from reprokit.locate.blame import locate
from reprokit.locate.failure import EXCEPTION
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Input, Program
from reprokit.program.memory import contents
from reprokit.render.literals import MAX_LITERALS, literal
from reprokit.shrink.plainness import constant_of, filled, is_number, ladder, num_digits
from reprokit.shrink.reduction import Reduction
from reprokit.shrink.signature import Signature, same

_KINDS = ("nan", "inf", EXCEPTION)


def without_data(reduction: Reduction) -> tuple[Reduction, tuple[int, ...]]:
    """The reduction with plain values, and the inputs whose recorded values the failure needs.

    What was found out about the recorded values (the nearest variant that passes, the piece of the model) goes.
    """
    recorded = recorded_inputs(reduction.program, reduction.tensors)
    context = reduction.context
    if context is not None and set(recorded_inputs(context.program, context.tensors)) - set(context.drawn):
        context = None
    if recorded and reduction.failure.kind not in _KINDS:
        raise UsageError(
            "a reduction by such a check cannot be written without its recorded values", hint="leave out --no-data"
        )
    if not recorded:
        return replace(reduction, context=context), ()
    tensors = _replaced(reduction, recorded)
    left = tuple(value for value in recorded if tensors[value] is reduction.tensors[value])
    return replace(reduction, tensors=tensors, context=context, nearest=None), left


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
    listed = [value for value in recorded_inputs(program, tensors) if _is_listed(tensors[value])]
    kept = 0
    beyond = []
    for value in sorted(listed, key=lambda value: tensors[value].numel()):
        kept += tensors[value].numel()
        if kept > MAX_LITERALS:
            beyond.append(value)
    return tuple(beyond)


def _is_listed(tensor: torch.Tensor) -> bool:
    found = literal(tensor)
    return found is not None and found.function == "tensor"


def _replaced(reduction: Reduction, recorded: Sequence[int]) -> dict[int, torch.Tensor]:
    """The tensors with plain contents wherever the failure stays the same; all together, then one by one, twice."""
    best = dict(reduction.tensors)
    items = {item.value: item for item in reduction.program.inputs if item.value in recorded}
    for together in zip(*(_fills(best[value], items[value]) for value in recorded), strict=False):
        proposal = {**best, **dict(zip(recorded, together, strict=True))}
        if _fails_the_same(reduction, proposal):
            return proposal
    for _ in range(2):
        for value in recorded:
            if best[value] is not reduction.tensors[value]:
                continue
            proposals = ({**best, value: fill} for fill in _fills(best[value], items[value]))
            best = next((proposal for proposal in proposals if _fails_the_same(reduction, proposal)), best)
    return best


def _fails_the_same(reduction: Reduction, tensors: Tensors) -> bool:
    try:
        found = locate(reduction.program, tensors)
    except (ReprokitError, RuntimeError, ValueError, TypeError, IndexError):
        return False
    wanted = Signature.of(reduction.failure, reduction.program)
    return found is not None and same(Signature.of(found, reduction.program), wanted)


def _fills(tensor: torch.Tensor, item: Input) -> Iterator[torch.Tensor]:
    """Plain contents of the same shape, plainest first; infinities of a mask by pattern, not by place."""
    if not is_number(tensor) or tensor.is_complex():
        yield torch.zeros_like(tensor)
        yield torch.ones_like(tensor)
        yield from _counted(tensor)
        return
    numbers = (1.0, 0.0, -1.0) if item.role == "gradient" else (0.0, 1.0, -1.0)
    for number in (*numbers, *_round_numbers(tensor), *ladder(tensor.dtype)):
        yield filled(tensor, number)
    yield from _counted(tensor)
    for way in (float("-inf"), float("inf")):
        if bool((tensor == way).any()):
            yield filled(tensor, way)
            yield _masked(tensor, way)


def _round_numbers(tensor: torch.Tensor) -> Iterator[float]:
    """Powers of ten around the largest number, of either sign."""
    sizes = contents(tensor).abs().double()
    largest = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0
    if largest == 0:
        return
    exponent = math.floor(math.log10(largest))
    for number in (10.0**exponent, 10.0 ** (exponent + 1), 10.0 ** (exponent - 1), 10.0 ** (exponent + 2)):
        if number < torch.finfo(tensor.dtype).max:
            yield from (number, -number)


def _counted(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """0, 1, 2, ... in the tensor's shape."""
    if tensor.dtype is not torch.bool and tensor.numel() < 2**11:
        yield torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)


def _masked(tensor: torch.Tensor, way: float) -> torch.Tensor:
    """Zeros with the infinity at the end."""
    changed = torch.zeros_like(tensor)
    changed.reshape(-1)[-1:] = way
    return changed
