"""Ordinary inputs: finite and moderate numbers, with which a failure needs an explanation.

What counts as moderate depends on the format, because products of a few hundred overflow in half precision.
"""

from __future__ import annotations

import torch

from reprokit.shrink.candidate import Candidate

_LIMIT = 1e3
_LIMITS = {torch.float16: 128.0}


def is_ordinary(tensor: torch.Tensor) -> bool:
    """True if a tensor holds only finite, moderate numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    if tensor.layout is not torch.strided:
        return is_ordinary(tensor.to_dense())
    sizes = tensor.detach().abs()
    if sizes.dtype.itemsize == 1:  # float8 knows no maximum
        sizes = sizes.float()
    largest = float(sizes.max())  # a NaN among them makes it NaN
    return largest <= _LIMITS.get(tensor.dtype, _LIMIT)


def moderate(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros in place of what is not ordinary."""
    limit = _LIMITS.get(tensor.dtype, _LIMIT)
    return torch.where(tensor.abs() <= limit, tensor, torch.zeros((), dtype=tensor.dtype))


def extraordinary(candidate: Candidate) -> list[int]:
    """The inputs that are not ordinary."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    return [item.value for item in items if not is_ordinary(candidate.tensors[item.value])]
