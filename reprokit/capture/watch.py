"""Is this step bad? Cheap screens over a loss, gradients and parameters, confirmed element by element on a hit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reprokit.locate.ways import ways_of


def bad_tensor(tensors: Iterable[torch.Tensor]) -> int | None:
    """The position of the first tensor that holds a NaN or an infinity, or ``None``.

    One fused float32 norm per group of tensors screens; a finite tensor whose norm overflows is a false hit and is
    cleared.
    """
    numbered = [(n, t.detach()) for n, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    plain = [(n, t) for n, t in numbered if t.layout is torch.strided and t.numel()]
    if not _screen([t for _, t in plain]):
        numbered = [(n, t) for n, t in numbered if t.layout is not torch.strided]
    return next((number for number, tensor in numbered if ways_of(tensor)), None)


def _screen(tensors: list[torch.Tensor]) -> bool:
    """Whether something may be bad."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return any(not _is_finite(group) for group in groups.values())


def _is_finite(group: list[torch.Tensor]) -> bool:
    half = group[0].dtype in (torch.float16, torch.bfloat16)
    norms = torch._foreach_norm(group, 2, dtype=torch.float32 if half else None)
    return bool(torch.isfinite(torch.stack(list(norms)).sum()))
