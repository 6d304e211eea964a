"""Signs at the edges of functions: arguments where a value or a derivative does not exist, and what becomes of them."""

from __future__ import annotations

import torch

from reprokit.locate.calls import Slot, argument_at, short_name, slot_of
from reprokit.locate.domains import DOMAINS
from reprokit.locate.scene import Branch, Scene
from reprokit.locate.signs.registry import Numbers, places, sign
from reprokit.program.ir import Ref


def danger(scene: Scene) -> torch.Tensor | None:
    """Where the origin's argument is at or beyond the edge of what it, or its derivative, is defined for."""
    domain = DOMAINS.get(short_name(scene.call)) if scene.call is not None else None
    values = scene.tensor(domain.operand) if domain is not None else None
    if domain is None or values is None or not values.is_floating_point():
        return None
    mask = domain.places(values)
    exponent = scene.tensor("exponent") if domain.operand == "base" else None
    if exponent is not None:  # x ** 2 has a derivative everywhere
        mask = mask & ((exponent < 1) | (exponent != exponent.round()))
    return mask


@sign
def is_dangerous(scene: Scene) -> Numbers | None:
    """True if any element is at or beyond the edge of what the origin is defined for."""
    return places(danger(scene))


@sign
def dropped_later(scene: Scene) -> Numbers | None:
    """True if every dangerous element of the origin is dropped by a later ``where`` or mask."""
    mask, drop = danger(scene), scene.failure.drop
    if mask is None or not bool(mask.any()) or (drop is not None and drop.is_given):
        return None
    for branch in scene.branches:
        kept = _like(branch, mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool((kept & mask).any()):
            return places(mask, dropper=short_name(branch.call))
    return None


@sign
def is_gradient_of(scene: Scene, operand: Slot) -> Numbers | None:
    """True if the bad gradient is that of this argument."""
    call, value = scene.call, scene.failure.value
    if call is None or value is None:
        return None
    return {} if argument_at(call, slot_of(call, operand)) == Ref(value) else None


@sign
def drops_nan(scene: Scene, given: bool) -> Numbers | None:
    """True if the forward pass drops NaN values, which the data or the code marks missing numbers with (``given``) or
    the origin made."""
    drop, result = scene.failure.drop, scene.tensor("result")
    if drop is None or drop.is_given is not given:
        return None
    found = places(result.isnan()) if result is not None else None
    holder = f"`{scene.failure.input_name}`" if scene.failure.input_name else "the data"
    return {**(found or {}), "holder": holder, "dropper": drop.call.rpartition(".")[2]}


@sign
def meets_zero_factor(scene: Scene) -> Numbers | None:
    """True if the origin's infinities are multiplied by zeros later."""
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
    """True if the origin's result is divided, later, by a sum over itself."""
    index = scene.failure.call_index
    if index is None or scene.call is None:
        return None
    known, summed = set(scene.call.output_refs()), set[int]()
    for call in filter(scene.leads_to_loss, scene.program.calls[index + 1 :]):
        if short_name(call) in ("sum", "mean", "amax", "max") and known.intersection(call.input_refs()):
            summed.update(call.output_refs())
        elif short_name(call) == "div" and known & set(call.input_refs()) and summed & set(call.input_refs()):
            return {}
        elif known.intersection(call.input_refs()):
            known.update(call.output_refs())
        elif summed.intersection(call.input_refs()):
            summed.update(call.output_refs())
    return None
