"""Signs at the edges of functions: arguments where a value or a derivative does not exist, and what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.scene import Branch, Scene
from reprokit.locate.signs.registry import Numbers, places, sign


def _too_large(base: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Beyond the logarithm of the largest number of the dtype."""
    return lambda x: x.abs() > math.log(torch.finfo(x.dtype).max, base)


EDGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), ("x", lambda x: x <= 0)),
    "log1p": ("x", lambda x: x <= -1),
    **dict.fromkeys(("acos", "asin", "atanh"), ("x", lambda x: x.abs() >= 1)),
    "acosh": ("x", lambda x: x <= 1),
    **dict.fromkeys(("div", "reciprocal"), ("denominator", lambda x: x == 0)),
    "pow": ("base", lambda x: x <= 0),
    **dict.fromkeys(("exp", "expm1"), ("x", lambda x: (x > 0) & _too_large(math.e)(x))),
    "exp2": ("x", lambda x: (x > 0) & _too_large(2.0)(x)),
    **dict.fromkeys(("sinh", "cosh"), ("x", _too_large(math.e))),
}


def danger(scene: Scene) -> torch.Tensor | None:
    """Where the origin's argument is at or beyond the edge of what it, or its derivative, is defined for."""
    call = scene.call
    bounds = EDGES.get(short_name(call)) if call is not None else None
    if bounds is None:
        return None
    role, test = bounds
    values = scene.tensor(role)
    return test(values) if values is not None and values.is_floating_point() else None


@sign
def is_dangerous(scene: Scene) -> Numbers | None:
    """Whether any element is at or beyond the edge of what the origin is defined for."""
    return places(danger(scene))


@sign
def dropped_later(scene: Scene) -> Numbers | None:
    """Whether every dangerous element of the origin is dropped by a later ``where`` or mask."""
    mask = danger(scene)
    if mask is None or not bool(mask.any()):
        return None
    for branch in scene.branches:
        kept = _like(branch, mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool((kept & mask).any()):
            return places(mask, dropper=short_name(branch.call))
    return None


@sign
def meets_zero_factor(scene: Scene) -> Numbers | None:
    """Whether the origin's infinities are multiplied by zeros later."""
    result = scene.tensor("result")
    for branch in scene.branches:
        kept = _like(branch, result) if result is not None and short_name(branch.call) == "mul" else None
        if result is not None and kept is not None and bool((result.isinf() & ~kept).any()):
            return {"zeros": int((result.isinf() & ~kept).sum())}
    return None


def _like(branch: Branch, mask: torch.Tensor) -> torch.Tensor | None:
    try:
        return branch.kept.expand(mask.shape)
    except RuntimeError:
        return None


@sign
def is_normalised_later(scene: Scene) -> Numbers | None:
    """Whether the origin's result is divided, later, by a sum over itself."""
    index = scene.failure.call_index
    if index is None or scene.call is None:
        return None
    known, summed = set(scene.call.output_refs()), set[int]()
    for call in scene.program.calls[index + 1 :]:
        if short_name(call) in ("sum", "mean", "amax", "max") and known.intersection(call.input_refs()):
            summed.update(call.output_refs())
        elif short_name(call) == "div" and known & set(call.input_refs()) and summed & set(call.input_refs()):
            return {}
        elif known.intersection(call.input_refs()):
            known.update(call.output_refs())
        elif summed.intersection(call.input_refs()):
            summed.update(call.output_refs())
    return None
