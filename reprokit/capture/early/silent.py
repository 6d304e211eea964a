"""Parameters that may learn nothing: their gradient is zero, or hooks may change it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def silent_or_hooked(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """The ids of the parameters of optimizers whose gradient is zero, or that have a hook on it.

    One fused norm over all gradients and one number per parameter; a device is waited for once.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    found = {id(p) for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks}
    dense = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel()]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in dense:
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    with torch.no_grad():
        for group in by_kind.values():
            gradients = [p.grad.detach() for p in group if p.grad is not None]
            norms = torch.stack(list(torch._foreach_norm(gradients))).tolist()
            found.update(id(p) for p, norm in zip(group, norms, strict=True) if norm == 0.0)
    return frozenset(found)
