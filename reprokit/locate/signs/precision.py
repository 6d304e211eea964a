"""Signs of a dtype that ends too early: overflow, and an ``eps`` that is rounded to zero."""

from __future__ import annotations

import math
from typing import Any

import torch

from reprokit.locate.domains import DOMAINS
from reprokit.locate.scene import Scene, recompute
from reprokit.locate.signs import (
    Numbers,
    dtype_name,
    is_half,
    is_lost,
    places,
    sign,
    smallest,
)  # fmt: skip
from reprokit.locate.spelling import short_name
from reprokit.program.functions import function_named
from reprokit.program.ir import Call, map_leaves


@sign
def overflows(scene: Scene, halves: bool | None = None) -> Numbers | None:
    """True if the origin made an infinity of finite arguments because its dtype ends too early.

    The call is done again in float64, to tell by how much. ``halves``: only where half precision is to blame, so that
    float32 could hold the result (bfloat16 ends where float32 does), or only where it is not.
    """
    seen, result = scene.origin, scene.tensor("result")
    if not result.is_floating_point():
        return None
    exact = recompute(seen)
    if exact is None or exact.shape != result.shape:
        return None
    bad = ~result.isfinite()
    sizes = exact.abs()[bad & exact.isfinite()]
    limit = torch.finfo(result.dtype).max
    if not sizes.numel() or float(sizes.max()) <= limit:
        return None
    largest = float(sizes.max())
    is_beyond = bool(exact[bad].isinf().any())  # some do not fit into float64
    fits = largest <= torch.finfo(torch.float32).max and not is_beyond
    if halves is not None and halves != (is_half(result) and fits):
        return None
    more = "more than " if is_beyond else ""
    beyond = exact.abs() > limit
    return places(beyond, more=more, largest=largest, limit=limit, times=largest / limit, dtype=dtype_name(result))


@sign
def operand_is_too_large(scene: Scene) -> Numbers | None:
    """True if autocast converts a finite operand of the origin to a dtype that ends below it."""
    result = scene.tensor("result")
    if not scene.origin.call.mode.autocast or not is_half(result):
        return None
    limit = torch.finfo(result.dtype).max
    for operand in scene.arguments():
        if operand.is_floating_point() and bool(operand.isfinite().all()):
            beyond = operand.abs().double() > limit
            if bool(beyond.any()):
                return places(beyond, largest=float(operand.abs().max()), limit=limit, dtype=dtype_name(result))
    return None


@sign
def derivative_overflows(scene: Scene) -> Numbers | None:
    """True if a derivative of the origin is beyond the largest number of its dtype and float64 can hold it."""
    seen, leaves, doubles = scene.origin, list[torch.Tensor](), list[torch.Tensor]()

    def double(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        leaves.append(leaf)
        doubles.append(leaf.double().requires_grad_())
        return doubles[-1]

    with torch.enable_grad():
        args, kwargs = map_leaves((seen.args, dict(seen.kwargs)), double)
        result = function_named(seen.call.target)(*args, **kwargs)
    for leaf, derivative in zip(leaves, torch.autograd.grad(result.sum(), doubles), strict=True):
        limit = torch.finfo(leaf.dtype).max
        if bool(derivative.isfinite().all()) and float(derivative.abs().max()) > limit:
            largest = float(derivative.abs().max())
            return places(derivative.abs() > limit, largest=largest, limit=limit, dtype=dtype_name(leaf))
    return None


@sign
def turns_bad(scene: Scene) -> Numbers | None:
    """True if everything the origin is given is finite, and its result is not."""
    result, largest = scene.tensor("result"), _largest_if_finite(scene)
    if largest is None or not result.is_floating_point() or bool(result.isfinite().all()):
        return None
    return {"largest": largest, "limit": torch.finfo(result.dtype).max, "dtype": dtype_name(result)}


def _largest_if_finite(scene: Scene) -> float | None:
    """The largest magnitude in the origin's tensors; ``None`` if one is not finite."""
    given = [tensor for tensor in scene.arguments() if tensor.is_floating_point() and tensor.numel()]
    sizes = [float(tensor.abs().max()) for tensor in given]  # NaN if there is one in it
    return max(sizes) if sizes and all(map(math.isfinite, sizes)) else None


@sign
def computes_in_half(scene: Scene) -> Numbers | None:
    """True if anything the origin is given is in half precision, the parameters of an optimizer included."""
    halves = list(filter(is_half, scene.arguments()))
    return {"dtype": dtype_name(halves[0]), "smallest": smallest(halves[0].dtype)} if halves else None


@sign
def loses_eps(scene: Scene) -> Numbers | None:
    """True if an argument was protected by a small constant that half precision rounds to zero."""
    operand = DOMAINS[short_name(scene.origin.call)].operand
    values = scene.tensor(operand)
    if not is_half(values):
        return None
    for _, call in scene.makers(operand, 3):
        if short_name(call) in ("add", "clamp", "clamp_min", "maximum"):
            eps = next((number for number in _numbers(call) if is_lost(number, values.dtype)), None)
            if eps is not None:
                return _lost(eps, values)
    return None


@sign
def loses_eps_argument(scene: Scene) -> Numbers | None:
    """True if the call's own ``eps`` is rounded to zero by half precision."""
    x, eps = scene.tensor("x"), scene.operand("eps")
    return _lost(eps, x) if is_half(x) and is_lost(eps, x.dtype) else None


@sign
def optimizer_loses_eps(scene: Scene) -> Numbers | None:
    """True if the optimizer's ``eps`` is rounded to zero in the dtype of a parameter."""
    arguments = scene.origin.kwargs
    for group, options in zip(arguments.get("params", ()), arguments.get("options", ()), strict=False):
        eps = options.get("eps")
        for parameter in group:
            if is_lost(eps, parameter.dtype):
                return _lost(eps, parameter)
    return None


def _lost(eps: float, tensor: torch.Tensor) -> Numbers:
    return {"eps": eps, "dtype": dtype_name(tensor), "smallest": smallest(tensor.dtype)}


def _numbers(call: Call) -> list[float]:
    return [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, float)]


@sign
def gradients_explode(scene: Scene) -> Numbers | None:
    """True if a gradient went bad although everything its call was given is finite."""
    largest = _largest_if_finite(scene)
    return {"largest": largest} if scene.failure.is_derivative and largest is not None else None


@sign
def gradient_overflows_half(scene: Scene) -> Numbers | None:
    """True if a gradient overflowed in float16; bfloat16 ends where float32 does."""
    result = scene.tensor("result")
    if not scene.failure.is_derivative or result.dtype is not torch.float16:
        return None
    return {"dtype": dtype_name(result), "limit": torch.finfo(result.dtype).max}
