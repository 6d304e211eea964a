"""Ordinary inputs: finite and moderate numbers, with which a failure needs an explanation.

What counts as moderate depends on the format, because products of a few hundred overflow in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def uniform_rows(candidate: Candidate) -> dict[int, frozenset[float]]:
    """The numbers, 0 and 1, that fill whole rows of the buffers which hold masks: flags, or both 0 and 1 alone."""
    found = {}
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if item.role == "buffer" and tensor.dim() and tensor.layout is torch.strided and not tensor.is_quantized:
            rows = {number: (tensor == number).all(-1).any() for number in (0.0, 1.0)}
            if bool((tensor == 0).any()) and bool((tensor == 1).any()) and bool(((tensor == 0) | (tensor == 1)).all()):
                found[item.value] = frozenset(number for number, is_there in rows.items() if bool(is_there))
    return found


def keeps_masks(candidate: Candidate, known: Mapping[int, frozenset[float]]) -> bool:
    """True if no mask has got a row of zeros or ones unlike the ``known`` rows of the start: a causal mask that hides
    all of a row would be another cause than the one of the step."""
    return not any(
        bool((tensor == number).all(-1).any())
        for value, rows in known.items()
        if (tensor := candidate.tensors.get(value)) is not None and tensor.dim() and tensor.numel()
        for number in {0.0, 1.0} - rows
    )
