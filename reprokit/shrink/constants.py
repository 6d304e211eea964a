"""Plain contents for tensors: what to try instead of recorded numbers.

Infinities that are wanted (a mask) stay where they are; only finite elements are replaced. The large constants are meant
for overflow: one that most functions with an exponential overflow at, one whose square overflows, and the largest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reprokit.program.ir import Input
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import contents, shortened

_EXPONENTIAL = 100.0
_PRODUCT = {torch.float16: 300.0, torch.float64: 1e160}
_LARGEST = {torch.float16: 6e4, torch.float64: 1e308}


def ladder(dtype: torch.dtype) -> tuple[float, ...]:
    """Large constants in ascending order."""
    return _EXPONENTIAL, _PRODUCT.get(dtype, 1e20), _LARGEST.get(dtype, 3e38)


def is_number(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds real floating-point or complex numbers in a plain layout."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def number_inputs(candidate: Candidate) -> list[Input]:
    """The inputs that hold numbers, generator states not included."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    return [item for item in items if is_number(candidate.tensors[item.value])]


def filled(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """The tensor with every finite element replaced."""
    plain = torch.full(tensor.shape, number, dtype=tensor.dtype)
    infinite = tensor.isinf()
    return torch.where(infinite, tensor, plain) if bool(infinite.any()) else plain


def sign_of(tensor: torch.Tensor) -> float:
    """-1 when the element largest in size is negative, else 1."""
    values = contents(tensor)
    if values.is_complex():
        return 1.0
    finite = values[values.isfinite()]
    return -1.0 if finite.numel() and float(finite[finite.abs().argmax()]) < 0 else 1.0


def rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """Every element with so many significant digits."""
    values = [shortened(number, digits, tensor.dtype) for number in contents(tensor).tolist()]
    return torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape)


def extremes(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """The candidate with all numbers replaced at once: zeros, the largest constants with recorded signs, ones.

    Incoming gradients stay as they are, since zeros there hide a failure and large ones make another.
    """
    items = [item for item in number_inputs(candidate) if item.role != "gradient"]
    tensors = {item.value: candidate.tensors[item.value] for item in items}
    for name, step in (("zeros", None), ("large constants", -1), ("constants whose product is large", -2)):
        plain = {
            value: filled(tensor, 0.0 if step is None else sign_of(tensor) * ladder(tensor.dtype)[step])
            for value, tensor in tensors.items()
        }
        yield name, candidate.with_tensors(plain)
    yield "ones", candidate.with_tensors({value: filled(tensor, 1.0) for value, tensor in tensors.items()})
