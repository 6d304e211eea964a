"""Plain contents for tensors: what to try instead of recorded numbers.

Infinities that are wanted (a mask) stay where they are; only finite elements are replaced. The large constants
are meant for overflow: one that most functions with an exponential overflow at, one whose square overflows, and the
largest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reprokit.program.ir import Input
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import contents, shortened

_EXPONENTIAL = 100.0
_PRODUCT = {torch.float16: 300.0, torch.float64: 1e160}
_LARGE = {torch.float16: 10.0}
_LARGEST = {torch.float16: 6e4, torch.float64: 1e308}


def ladder(dtype: torch.dtype) -> tuple[float, ...]:
    """Large constants in ascending order."""
    return _EXPONENTIAL, _PRODUCT.get(dtype, 1e20), _LARGEST.get(dtype, 3e38)


def is_number(tensor: torch.Tensor) -> bool:
    """True if the tensor holds real floating-point or complex numbers in a plain layout, in a format that computes."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.dtype.itemsize > 1  # not float8
    return is_plain and tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def number_inputs(candidate: Candidate) -> list[Input]:
    """The inputs that hold numbers, generator states not included."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    return [item for item in items if is_number(candidate.tensors[item.value])]


def filled(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """The tensor with every finite element replaced, in the same memory layout."""
    plain = torch.full_like(tensor, number, requires_grad=False)
    infinite = contents(tensor).isinf().reshape(tensor.shape)
    return torch.where(infinite, tensor, plain) if bool(infinite.any()) else plain


def sign_of(tensor: torch.Tensor) -> float:
    """-1 when the element largest in size is negative, else 1."""
    values = contents(tensor)
    if values.is_complex():
        return 1.0
    finite = values[values.isfinite()]
    return -1.0 if finite.numel() and float(finite[finite.abs().argmax()]) < 0 else 1.0


def largest_of(tensor: torch.Tensor) -> float:
    """The largest size of a finite element."""
    return float(contents(tensor).abs().nan_to_num(posinf=0.0).max())


def rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """Every element with so many significant digits."""
    values = [shortened(number, digits, tensor.dtype) for number in contents(tensor).tolist()]
    found = torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape)
    return torch.empty_like(tensor).copy_(found)


def extremes(candidate: Candidate, kind: str, may_be_large: bool) -> Iterator[tuple[str, Candidate]]:
    """The candidate with all numbers replaced at once by extreme ones, the likeliest to fail in this way first.

    Incoming gradients stay as they are, since zeros there hide a failure and large ones make another. A NaN by overflow
    takes terms of both signs, and is no explanation when the recorded numbers were moderate.
    """
    items = [item for item in number_inputs(candidate) if item.role != "gradient"]
    values = [item.value for item in items]
    if not values:
        return
    signs = [sign_of(candidate.tensors[value]) for value in values]
    choices = {
        "zeros": [0.0] * len(values),
        "large constants": [1.0] * len(values),
        "large constants of recorded sign": signs,
        "large constants, the last one negative": [1.0] * (len(values) - 1) + [-1.0],
        "ones": None,
    }
    order = list(choices) if kind == "nan" else ["large constants", "zeros", "large constants of recorded sign", "ones"]
    for name in order:
        if may_be_large or "large" not in name:
            yield name, candidate.with_tensors(_chosen(candidate, values, choices[name]))


def holds_large(candidate: Candidate) -> bool:
    """True if any number is so large that an overflow may be near."""
    tensors = [candidate.tensors[item.value] for item in number_inputs(candidate)]
    return any(largest_of(tensor) > _LARGE.get(tensor.dtype, 1e3) for tensor in tensors)


def _chosen(candidate: Candidate, values: list[int], factors: list[float] | None) -> dict[int, torch.Tensor]:
    """Ones, or for each value so many times the largest constant."""
    tensors = [candidate.tensors[value] for value in values]
    numbers = factors and [factor * ladder(tensor.dtype)[-1] for factor, tensor in zip(factors, tensors, strict=True)]
    return {v: filled(t, number) for v, t, number in zip(values, tensors, numbers or [1.0] * len(values), strict=True)}
