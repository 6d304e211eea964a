"""Signs in the arguments of the origin: how they compare, what they are made of, how many elements there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprokit.locate.calls import Slot, short_name, slot_of
from reprokit.locate.domains import compare
from reprokit.locate.scene import Scene, Seen
from reprokit.locate.signs.registry import Numbers, is_wanted, places, sign
from reprokit.program.ir import iter_refs

_TESTS = frozenset([
    "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "logical_xor", "isfinite", "isnan",
    "isinf", "bitwise_and", "bitwise_or", "bitwise_not", "one_hot", "tril", "triu", "ones_like", "zeros_like", "cat",
    "stack", "mul", "masked_fill", "where", "arange",
])  # fmt: skip


@sign
def has(scene: Scene, operand: Slot = "x", *, size: bool = False, **wanted: str | float) -> Numbers | None:
    """True if any element of an argument (or of the ``result``) compares as wanted; ``size``: its magnitude."""
    values = scene.tensor(operand)
    if values is None or values.is_complex() or values.dtype is torch.bool:
        return None
    mask = compare(values.abs() if size else values, wanted)
    if not bool(mask.any()):
        return None
    found = values[mask].double()
    return places(mask, operand=scene.name(operand), lowest=float(found.min()), highest=float(found.max()))


@sign
def is_negative_to_a_fraction(scene: Scene) -> Numbers | None:
    """True if a negative base meets an exponent that is not whole."""
    base, exponent = scene.tensor("base"), scene.tensor("exponent")
    if base is None or exponent is None:
        return None
    mask = (base < 0) & (exponent.double().frac() != 0)
    if not bool(mask.any()):
        return None
    bases, exponents = base.expand_as(mask)[mask], exponent.expand_as(mask)[mask]
    return places(mask, exponent=float(exponents[0]), lowest=float(bases.min()))


@sign
def option(scene: Scene, name: str, **wanted: float) -> Numbers | None:
    """True if an argument of the origin that is a number or flag is as wanted, given or by default."""
    value = scene.operand(name)
    return {name: value} if is_wanted(value, wanted) else None


@sign
def has_row_of(scene: Scene, value: float) -> Numbers | None:
    """True if some row along the call's ``dim`` holds nothing but this value."""
    x, dim = scene.tensor("x"), dimension(scene)
    if x is None or x.dim() == 0 or not x.numel():
        return None
    return places((x == value).all().reshape(1) if dim is None else (x == value).all(dim))


@sign
def follows(scene: Scene, calls: Sequence[str], operand: Slot = "x", through: Sequence[str] = ()) -> Numbers | None:
    """True if an argument comes from one of these calls: views, casts and what is named in ``through`` apart."""
    waiting = list(scene.makers(operand))
    for index, call in waiting:
        if short_name(call) in calls:
            return {"maker": short_name(call), "operand": scene.name(operand)}
        if short_name(call) in through:
            waiting += scene.makers_of((call.args, dict(call.kwargs)), index)
    return None


@sign
def counts_something(scene: Scene) -> Numbers | None:
    """True if the denominator is a count: a sum of flags or whole numbers, or a number of elements."""
    for index, call in scene.makers("denominator", 2):
        if short_name(call) in ("count_nonzero", "bincount", "histc"):
            return {"maker": short_name(call)}
        seen = scene.seen.get(index)
        if short_name(call) == "sum" and seen is not None and seen.args and _is_mask(scene, seen, index):
            return {"maker": short_name(call)}
    return None


def _is_mask(scene: Scene, seen: Seen, index: int) -> bool:
    """True if what a call reduces says which elements count: flags, whole numbers, or 0 and 1 from a comparison.

    What is divided itself is no mask, even if it is zero throughout.
    """
    counted, call = seen.args[0], scene.call
    if call is None or not isinstance(counted, torch.Tensor) or counted.is_complex():
        return False
    if not counted.is_floating_point():
        return True
    numerators = list(iter_refs([call.args[slot] for slot in [slot_of(call, "numerator")] if isinstance(slot, int)]))
    if bool(((counted != 0) & (counted != 1)).any()) or numerators == list(iter_refs(seen.call.args[:1])):
        return False
    makers = list(scene.makers_of(seen.call.args[:1], index))
    return not makers or any(short_name(call) in _TESTS for _, call in makers)


@sign
def reduces_nothing(scene: Scene) -> Numbers | None:
    """True if the argument has no elements, but the result does."""
    x, result = scene.tensor("x"), scene.tensor("result")
    if x is None or x.numel() or (result is not None and not result.numel()):
        return None
    return {"shape": _shape(x)}


@sign
def reduces_one(scene: Scene) -> Numbers | None:
    """True if every result of a reduction is made from a single element."""
    x, result = scene.tensor("x"), scene.tensor("result")
    if x is None or result is None or not x.numel() or x.numel() != result.numel():
        return None
    return {"shape": _shape(x)}


@sign
def holds_bad_values(scene: Scene) -> Numbers | None:
    """True if an argument is not finite already."""
    x = scene.tensor("x")
    return places(~x.isfinite(), operand=scene.name("x")) if x is not None else None


@sign
def weight_row_is_zero(scene: Scene) -> Numbers | None:
    """True if a whole row of a weight-normalised weight is zero."""
    weight, call = scene.tensor("x"), scene.call
    if weight is None or weight.dim() == 0 or call is None:
        return None
    dim = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)
    rows = (weight if dim == -1 else weight.movedim(dim, 0)).flatten(1) if weight.dim() > 1 else weight.reshape(-1, 1)
    return places((rows == 0).all(1))


def dimension(scene: Scene) -> int | None:
    """The ``dim`` the origin works along, ``None`` for all."""
    call, x = scene.call, scene.tensor("x")
    if call is None:
        return None
    if short_name(call) in ("cross_entropy", "nll_loss"):
        return 1 if x is not None and x.dim() > 1 else 0
    for name in ("dim", "axis"):
        try:
            dim = scene.operand(name)
        except KeyError:
            continue
        return _whole(dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim)
    return _whole(call.args[1]) if len(call.args) > 1 else None  # builtins have no signature


def _whole(number: object) -> int | None:
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
