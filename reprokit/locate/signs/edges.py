"""Signs at the edges of functions: where a value or a derivative does not exist, matrices without an inverse."""

from __future__ import annotations

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.domains import DOMAINS, SPECTRA, spectrum_of
from reprokit.locate.scene import Branch, Scene
from reprokit.locate.signs import Numbers, places, sign


def danger(scene: Scene) -> torch.Tensor:
    """A mask of the origin's argument: at or beyond the edge of what it, or its derivative, is defined for."""
    domain = DOMAINS[short_name(scene.origin.call)]
    values = scene.tensor(domain.operand)
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    mask = domain.places(values)
    exponent = scene.tensor_if_given("exponent") if domain.operand == "base" else None
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
    if not bool(mask.any()) or (drop is not None and drop.is_given):
        return None
    for branch in scene.branches:
        kept = _like(branch, mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool((kept & mask).any()):
            return places(mask, dropper=short_name(branch.call))
    return None


@sign
def drops_nan(scene: Scene, given: bool) -> Numbers | None:
    """True if the forward pass drops NaN values, which the data or the code marks missing numbers with (``given``) or
    the origin made."""
    drop, result = scene.failure.drop, scene.tensor_if_given("result")
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
        kept = _like(branch, result) if short_name(branch.call) == "mul" else None
        if kept is not None and bool((result.isinf() & ~kept).any()):
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
    calls = scene.program.calls[scene.index :]
    known, summed = set(calls[0].output_refs()), set[int]()
    for call in filter(scene.leads_to_loss, calls[1:]):
        if short_name(call) in ("sum", "mean", "amax", "max") and known.intersection(call.input_refs()):
            summed.update(call.output_refs())
        elif short_name(call) == "div" and known & set(call.input_refs()) and summed & set(call.input_refs()):
            return {}
        elif known.intersection(call.input_refs()):
            known.update(call.output_refs())
        elif summed.intersection(call.input_refs()):
            summed.update(call.output_refs())
    return None


@sign
def equal_values(scene: Scene) -> Numbers | None:
    """True if a decomposition has eigenvalues or singular values that are equal, or zero, up to rounding."""
    name = short_name(scene.origin.call)
    found = spectrum_of(name, scene.tensor("x"))
    if not found:
        return None
    values = SPECTRA[name][0]
    words = f"one of the {values} is zero" if found == "zero" else f"some {values} are equal up to rounding"
    return {"values": values, "spectrum": words}


@sign
def is_not_positive(scene: Scene) -> Numbers | None:
    """True if a symmetric matrix has an eigenvalue that is not above zero."""
    x, exception = scene.tensor("x"), scene.failure.exception
    is_about_shape = exception is not None and "LinAlgError" not in exception[0]
    if is_about_shape or x.dim() < 2 or x.shape[-1] != x.shape[-2] or not x.numel() or not bool(x.isfinite().all()):
        return None
    lowest = float(torch.linalg.eigvalsh(x.detach().double()).min())
    eps = torch.finfo(x.dtype).eps * float(x.abs().max()) * x.shape[-1]
    return {"lowest": lowest, "size": x.shape[-1]} if lowest <= eps else None
