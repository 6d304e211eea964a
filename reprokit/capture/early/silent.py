"""Parameters that may learn nothing: they get no gradient or one of zeros, or hooks may change it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reprokit.locate.quantity import norms_of


def silent(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of optimizers that are trained and whose gradient is missing or zero.

    One fused norm over all gradients and one number per parameter; a device is waited for once.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    found = [p for p in parameters if p.grad is None and p.requires_grad]
    dense = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel()]
    with torch.no_grad():
        norms = norms_of([p.grad.detach() for p in dense if p.grad is not None])
    return found + [p for p, norm in zip(dense, norms, strict=True) if norm == 0.0]


def hooked(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of optimizers that have a hook on their gradient."""
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
