"""Is this step bad? Cheap screens over a loss, gradients and parameters, confirmed element by element on a hit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reprokit.locate.ways import ways_of

_HALVES = (torch.float16, torch.bfloat16)


def bad_tensor(tensors: Iterable[torch.Tensor]) -> int | None:
    """The position of the first tensor that holds a NaN or an infinity, or ``None``.

    One fused norm over all of them screens; a finite tensor whose norm overflows is a false hit and is cleared.
    """
    candidates = list(tensors)
    if not candidates or _is_finite_together(candidates):
        return None
    return next((number for number, tensor in enumerate(candidates) if ways_of(tensor)), None)


def _is_finite_together(tensors: list[torch.Tensor]) -> bool:
    """Whether one norm over all tensors is finite; ``False`` also when torch cannot compute it (mixed kinds of
    tensors)."""
    dtype = torch.float32 if tensors[0].dtype in _HALVES else None
    try:
        with torch.no_grad():
            norms = torch._foreach_norm(tensors, 2, dtype=dtype)
            return bool(torch.isfinite(torch.stack(list(norms)).sum()))
    except (RuntimeError, NotImplementedError):
        return False
