"""Predicates that several rules ask for: values of the origin's operands, and what made them.

Each returns the numbers it saw, which the texts of a rule are worded with, or ``None`` when it does not hold. A
predicate about an argument that the origin does not have does not hold.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from reprokit import native
from reprokit.locate.domains import COMPARISONS, DOMAINS, compare
from reprokit.locate.spelling import Slot, short_name
from reprokit.program.dataflow import needed_calls
from reprokit.program.ir import iter_refs
from reprokit.program.observe import Trace, copied
from reprokit.rules.rule import Numbers, of_scene
from reprokit.rules.scene import ObservedCall, Scene


def places(mask: torch.Tensor, **more: Any) -> Numbers | None:
    """The count of elements in a mask, its size, and ``more`` numbers; ``None`` for an empty mask."""
    count = int(native.sum(mask))
    return {"count": count, "total": native.numel(mask), **more} if count else None


def is_wanted(number: Any, wanted: Mapping[str, float]) -> bool:
    """True if a plain number compares as wanted."""
    return isinstance(number, (int, float)) and all(COMPARISONS[name](number, wanted[name]) for name in wanted)


def dtype_name(tensor: torch.Tensor) -> str:
    """``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> str:
    """``2x3``."""
    return "x".join(map(str, tensor.shape)) or "scalar"


def _compared(values: torch.Tensor, *, size: bool = False, **wanted: str | float) -> torch.Tensor:
    return compare(native.abs(values) if size else values, wanted)


@of_scene
def has(scene: Scene, /, role: Slot = "x", *, size: bool = False, **wanted: str | float) -> Numbers | None:
    """True if any element of an argument (or of the ``result``) compares as wanted; ``size``: its magnitude."""
    values = scene.tensor(role)
    if native.is_complex(values) or values.dtype is torch.bool:
        return None
    mask = _compared(values, size=size, **wanted)
    if not bool(native.any(mask)):
        return None
    found = native.double(values[mask])
    return places(mask, lowest=float(native.min(found)), highest=float(native.max(found)))


@of_scene
def meet(scene: Scene, /, **wanted: Mapping[str, Any]) -> Numbers | None:
    """True if operands of the origin compare as wanted at one place, each as in `has`."""
    masks = (_compared(scene.tensor(name), **bounds) for name, bounds in wanted.items())
    return places(functools.reduce(native.logical_and, masks))


ZERO_BY_ZERO = meet(numerator={"equal": 0.0}, denominator={"equal": 0.0})


@of_scene
def option(scene: Scene, /, name: str, **wanted: float) -> Numbers | None:
    """True if an argument of the origin that is a number or flag is as wanted, given or by default."""
    value = scene.operand(name)
    return {name: value} if is_wanted(value, wanted) else None


@of_scene
def has_row_of(scene: Scene, value: float) -> Numbers | None:
    """True if some row along the call's ``dim`` holds nothing but this value."""
    x, call = scene.tensor("x"), scene.origin.call
    given = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    dim = tuple(given) if isinstance(given, (list, tuple)) and given else _dimension(scene)
    if not native.numel(x):
        return None
    return places(
        native.reshape(native.all(x == value), 1) if dim is None or native.dim(x) == 0 else native.all(x == value, dim)
    )


def _dimension(scene: Scene) -> int | None:
    """The ``dim`` the origin works along, ``None`` for all."""
    call, x = scene.origin.call, scene.tensor_if_given("x")
    if short_name(call) in ("cross_entropy", "nll_loss"):
        return 1 if x is not None and native.dim(x) > 1 else 0
    dim = call.args[1] if len(call.args) > 1 else None  # builtins have no signature
    for name in ("axis", "dim"):
        with suppress(KeyError):
            dim = scene.operand(name)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None


@of_scene
def follows(scene: Scene, calls: str, role: Slot = "x", *, through: str = "") -> Numbers | None:
    """True if an argument comes from one of these calls: views, casts and what is named in ``through`` apart."""
    found = _maker(scene, calls, role, through)
    return {"maker": short_name(scene.program.calls[found])} if found is not None else None


def _maker(scene: Scene, calls: str, role: Slot, through: str) -> int | None:
    waiting = list(scene.makers(role))
    for index, call in waiting:
        if short_name(call) in calls.split():
            return index
        if short_name(call) in through.split():
            waiting += scene.makers_of((call.args, dict(call.kwargs)), index)
    return None


@of_scene
def follows_underflow(scene: Scene, calls: str, role: Slot = "x", *, through: str = "") -> Numbers | None:
    """As `follows`, of a call with results that are zero; all of them by rounding, so none of an argument of -inf."""
    index = _maker(scene, calls, role, through)
    if index is None:
        return None
    call, trace = scene.program.calls[index], Trace(scene.program, copied, {index})
    only = needed_calls(scene.program.calls, {index})
    trace.run(scene.tensors, only=range(index + 1) if only is None else only)
    given, made = (next(iter_refs(found)).value for found in (call.args, call.outputs))
    zeros = trace.writes[index][made] == 0
    is_rounded = bool(native.any(zeros)) and bool(native.all(native.isfinite(trace.reads[index][given][zeros])))
    return {"maker": short_name(call)} if is_rounded else None


@of_scene
def raises(scene: Scene, pattern: str) -> Numbers | None:
    """True if the exception's type and message match."""
    if not scene.failure.kind.raises or scene.failure.exception is None:
        return None
    kind, message = scene.failure.exception
    lines = message.strip().splitlines() or [""]
    return {"exception": f"{kind}: {lines[0]}"} if re.search(pattern, f"{kind}: {message}", re.IGNORECASE) else None


def ignored_by(loss: ObservedCall) -> Numbers | None:
    """The targets of a loss, if it ignores all of them."""
    target, ignored = loss.argument("target"), loss.argument("ignore_index")
    if native.is_floating_point(target) or not native.numel(target):
        return None
    return {"count": native.numel(target), "ignored": ignored} if bool(native.all(target == ignored)) else None


def turns_bad(scene: Scene) -> Numbers | None:
    """True if everything the origin is given is finite, and its result is not."""
    result, largest = scene.tensor("result"), largest_if_finite(scene)
    if largest is None or not native.is_floating_point(result) or bool(native.all(native.isfinite(result))):
        return None
    return {"largest": largest, "limit": torch.finfo(result.dtype).max, "dtype": dtype_name(result)}


def largest_if_finite(scene: Scene) -> float | None:
    """The largest magnitude in the origin's tensors; ``None`` if one is not finite."""
    given = [tensor for tensor in scene.arguments() if native.is_floating_point(tensor) and native.numel(tensor)]
    sizes = [float(native.max(native.abs(tensor))) for tensor in given]  # NaN if there is one in it
    return max(sizes) if sizes and all(map(math.isfinite, sizes)) else None


def danger(scene: Scene) -> torch.Tensor:
    """A mask of the origin's argument: at or beyond the edge of what it, or its derivative, is defined for."""
    domain = DOMAINS[short_name(scene.origin.call)]
    values = scene.tensor(domain.operand)
    if not native.is_floating_point(values):
        return native.zeros_like(values, dtype=torch.bool)
    mask = domain.places(values)
    exponent = scene.tensor_if_given("exponent") if domain.operand == "base" else None
    if exponent is not None:  # x ** 2 has a derivative everywhere
        mask = mask & ((exponent < 1) | (exponent != native.round(exponent)))
    return mask


def is_dangerous(scene: Scene) -> Numbers | None:
    """True if any element is at or beyond the edge of what the origin is defined for."""
    return places(danger(scene))
