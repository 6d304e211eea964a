"""Where two runs of a program differ: beyond the dtype's tolerances, and clearly above what eager runs differ by.

Tolerances are those of ``torch.testing.assert_close`` (its documentation lists them), so that a repro can assert with
it; where a program computes in half precision, half precision's hold for all that it returns. Infinities and NaNs that
both runs have are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.errors import ReprokitError
from reprokit.program.ir import AUTOGRAD_GRAD, Program, Symbol, iter_refs, map_leaves
from reprokit.program.run import Outcome, Tensors

MARGIN = 10.0  # how many times larger than the noise of eager runs a difference has to be
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_EXACT = (0.0, 0.0)
_HALVES = {"torch.float16": torch.float16, "torch.half": torch.float16, "torch.bfloat16": torch.bfloat16}
_CASTS = {"torch.Tensor.half": torch.float16, "torch.Tensor.bfloat16": torch.bfloat16}


class Incomparable(ReprokitError):
    """Two results that should be alike have different shapes, or one of them is missing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that differs: a value of the program or the ``.grad`` of one, where, and in how many elements.

    ``is_finite`` tells two different numbers from a number beside a NaN or an infinity.
    """

    value: int
    is_gradient: bool
    is_finite: bool
    element: tuple[int, ...]
    num_bad: int
    num_elements: int


def results_of(program: Program) -> list[int]:
    """The values that a comparison looks at: outputs, what differentiation starts from, its results, parameters."""
    found = dict.fromkeys(ref.value for ref in program.outputs)
    for call in program.calls:
        if call.is_differentiation:
            starts = call.args[0] if call.args else call.kwargs.get("tensors", call.kwargs.get("outputs"))
            found.update(dict.fromkeys(ref.value for ref in iter_refs(starts)))
        if call.target == AUTOGRAD_GRAD:
            found.update(dict.fromkeys(call.output_refs()))
        elif call.is_optimizer_step:
            found.update(dict.fromkeys(ref.value for ref in iter_refs(call.kwargs["params"])))
    return list(found)


def halves_in(program: Program, tensors: Tensors) -> frozenset[torch.dtype]:
    """The half-precision formats that a program computes in: inputs, casts, arguments and autocast."""
    found = {tensors[item.value].dtype for item in program.inputs}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Symbol) and leaf.name in _HALVES:
            found.add(_HALVES[leaf.name])
        return leaf

    for call in program.calls:
        map_leaves((call.args, dict(call.kwargs)), look)
        found.update(_HALVES[name] for _, name in call.mode.autocast if name in _HALVES)
        found.update(dtype for target, dtype in _CASTS.items() if target == call.target)
    return frozenset(found & set(_HALVES.values()))


def tolerances(dtype: torch.dtype, halves: frozenset[torch.dtype]) -> tuple[float, float]:
    """Relative and absolute tolerance for a result of a program that computes in these half-precision formats."""
    if dtype not in _TOLERANCES:
        return _EXACT
    return max(_TOLERANCES[known] for known in (dtype, *halves))


def differences(actual: Outcome, expected: Outcome, halves: frozenset[torch.dtype]) -> Iterator[Difference]:
    """Every result that differs beyond its tolerances, values before gradients."""
    for is_gradient, one, other in _paired(actual, expected):
        for value, tensor in one.items():
            if value not in other:
                raise Incomparable(f"value {value} is missing")
            found = _difference(value, is_gradient, tensor, other[value], tolerances(tensor.dtype, halves))
            if found is not None:
                yield found


def is_above_noise(found: Difference, actual: Outcome, expected: Outcome, eager: Sequence[Outcome]) -> bool:
    """True if the largest difference is clearly larger than any between eager runs of the same program."""
    runs = [_tensor(outcome, found) for outcome in eager]
    noise = max((_largest(first, second) for first in runs for second in runs), default=0.0)
    return _largest(_tensor(actual, found), _tensor(expected, found)) > MARGIN * noise


def _tensor(outcome: Outcome, found: Difference) -> torch.Tensor:
    return (outcome.gradients if found.is_gradient else outcome.values)[found.value]


def _paired(
    actual: Outcome, expected: Outcome
) -> tuple[tuple[bool, dict[int, torch.Tensor], dict[int, torch.Tensor]], ...]:
    return (False, actual.values, expected.values), (True, actual.gradients, expected.gradients)


def _difference(
    value: int, is_gradient: bool, actual: torch.Tensor, expected: torch.Tensor, allowed: tuple[float, float]
) -> Difference | None:
    one, other = _numbers(actual), _numbers(expected.to(actual.dtype))
    if one.shape != other.shape:
        raise Incomparable(f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    relative, absolute = allowed
    finite = one.isfinite() & other.isfinite()
    far = finite & ((one - other).abs() > absolute + relative * other.abs())
    unlike = ~finite & (one != other) & ~(one.isnan() & other.isnan())
    is_finite = bool(far.any())
    bad = far if is_finite else unlike
    if not bool(bad.any()):
        return None
    gaps = torch.where(bad, (one - other).abs() if is_finite else torch.ones_like(one), -1.0)
    worst = int(gaps.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), bad.shape)) if bad.dim() else ()
    num_bad = int((bad.any(dim=-1) if actual.is_complex() else bad).sum())
    return Difference(value, is_gradient, is_finite, place[: actual.dim()], num_bad, actual.numel())


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest gap between two results; infinite where only one of them is finite."""
    first, second = _numbers(one), _numbers(other.to(one.dtype))
    if first.shape != second.shape:
        return float("inf")
    equal = (first == second) | (first.isnan() & second.isnan())
    gaps = torch.where(equal, 0.0, (first - second).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(gaps.max()) if gaps.numel() else 0.0


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    return torch.view_as_real(plain.resolve_conj()).double() if plain.is_complex() else plain.double()
