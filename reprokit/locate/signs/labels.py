"""Signs of labels, indexes and lengths that do not fit, and of exceptions."""

from __future__ import annotations

import re

import torch

from reprokit.locate.failure import EXCEPTION
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, dtype_name, sign


@sign
def raises(scene: Scene, pattern: str) -> Numbers | None:
    """True if the exception's type and message match."""
    if scene.failure.kind != EXCEPTION or scene.failure.exception is None:
        return None
    kind, message = scene.failure.exception
    lines = message.strip().splitlines() or [""]
    return {"exception": f"{kind}: {lines[0]}"} if re.search(pattern, f"{kind}: {message}", re.IGNORECASE) else None


@sign
def dtypes_differ(scene: Scene) -> Numbers | None:
    """The floating-point dtypes of the origin's tensors if there are several."""
    names = list(dict.fromkeys(dtype_name(item) for item in scene.arguments() if item.is_floating_point()))
    return {"dtypes": " and ".join(names)} if len(names) > 1 else None


@sign
def ignores_all_targets(scene: Scene) -> Numbers | None:
    """True if every target of a loss is the one it ignores."""
    target = scene.tensor("target")
    if target.is_floating_point() or not target.numel():
        return None
    ignored = scene.operand("ignore_index")
    return {"count": target.numel(), "ignored": ignored} if bool((target == ignored).all()) else None


@sign
def target_is_longer(scene: Scene) -> Numbers | None:
    """True if a target of ``ctc_loss`` needs more steps than its input has (repeats need one more)."""
    targets = scene.tensor("targets")
    lengths = (torch.as_tensor(scene.operand(f"{name}_lengths")).flatten().tolist() for name in ("input", "target"))
    start = 0
    for number, (available, length) in enumerate(zip(*lengths, strict=False)):
        row = targets[number] if targets.dim() == 2 else targets[start : start + length]
        start += length
        labels = row[:length]
        needed = length + int((labels[1:] == labels[:-1]).sum())
        if needed > available:
            return {"needed": needed, "available": available, "sample": number}
    return None
