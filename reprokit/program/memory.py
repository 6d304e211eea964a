"""The memory of tensors: copies that keep strides and what tensors share, and equality bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def copy_of(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A copy with the same strides, so that kernels take the same path; on another device if one is named."""
    if device is not None and tensor.device.type != device:
        return tensor.to(device)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.clone()
    return tensor.clone(memory_format=torch.preserve_format)


def copies_of(tensors: Mapping[int, torch.Tensor], device: str | None = None) -> dict[int, torch.Tensor]:
    """Copies that share memory with each other where the originals overlap, and with nothing else."""
    copies: dict[int, torch.Tensor] = {}
    for group in overlapping(tensors):
        copies.update(_copies_of_group({value: tensors[value] for value in group}, device))
    return copies


def _copies_of_group(group: Mapping[int, torch.Tensor], device: str | None = None) -> dict[int, torch.Tensor]:
    if len(group) == 1:
        return {value: copy_of(tensor, device) for value, tensor in group.items()}
    begin, end = min(t.storage_offset() for t in group.values()), max(map(_end, group.values()))
    memory = copy_of(next(iter(group.values())).as_strided((end - begin,), (1,), begin), device)
    storage = memory.untyped_storage()
    places = {value: (t.storage_offset() - begin, t.shape, t.stride()) for value, t in group.items()}
    return {value: memory.new_empty(0).set_(storage, *place) for value, place in places.items()}


def overlapping(tensors: Mapping[int, torch.Tensor]) -> Iterator[list[int]]:
    """The value numbers in groups: tensors of one group overlap in memory, those of two groups do not."""
    places: dict[Any, list[int]] = {}
    for value, tensor in tensors.items():
        places.setdefault(_memory_of(tensor) or value, []).append(value)
    for values in places.values():
        if len(values) == 1:
            yield values
            continue
        group: list[int] = []
        reach = 0
        for value in sorted(values, key=lambda value: tensors[value].storage_offset()):
            if group and tensors[value].storage_offset() >= reach:
                yield group
                group = []
            group.append(value)
            reach = max(reach, _end(tensors[value]))
        yield group


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A key shared by tensors with the same memory and dtype; ``None`` without memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return None
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device


def _end(tensor: torch.Tensor) -> int:
    """The position in its memory behind the last element of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in steps)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if shape, dtype and every bit agree; a NaN equals any NaN at the same place, 0.0 does not equal -0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = _numbers(first), _numbers(second).to(first.device)
    if a.numel() == 0:
        return True
    differ = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.numel(), -1).any(dim=1)
    if not a.dtype.is_floating_point:
        return not bool(differ.any())
    return bool((a[differ].double().isnan() & b[differ].double().isnan()).all())


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, real and imaginary parts as elements of their own."""
    plain = tensor.detach()
    dense = (plain if plain.layout is torch.strided else plain.to_dense()).resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)


def is_bad(tensor: torch.Tensor) -> bool:
    """True if an element is nan or inf."""
    with torch.DisableTorchFunction():
        has_bad_values = tensor.is_floating_point() or tensor.is_complex()
        return has_bad_values and not bool(tensor.detach().isfinite().all())


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row, as numbers that torch computes with: it can hardly do anything with an 8-bit float."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.is_floating_point() and plain.element_size() == 1:
        plain = plain.float()
    return plain.resolve_conj().resolve_neg().reshape(-1)
