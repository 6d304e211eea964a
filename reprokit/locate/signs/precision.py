"""Signs of a dtype that ends too early: overflow, and an ``eps`` that is rounded to zero."""

from __future__ import annotations

import math
from typing import Any

import torch

from reprokit.locate.blame import locate
from reprokit.locate.calls import VIEWS, Slot, short_name
from reprokit.locate.graphs import with_math_attention
from reprokit.locate.notes import BadValue, Notes
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
from reprokit.locate.ways import ways_of
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
def math_attention_is_finite(scene: Scene) -> Numbers | None:
    """True if all gradients are finite once the attention is computed by its reference implementation."""
    program, largest = with_math_attention(scene), _largest_if_finite(scene, first=3)
    if program is None or largest is None or locate(program, scene.tensors) is not None:
        return None
    mask = scene.tensor_if_given("attn_mask" if scene.call is not None and "attn_mask" in scene.call.kwargs else 3)
    mask = torch.ones(1) if mask is None else mask
    found = places(~(mask if mask.dtype is torch.bool else mask > -math.inf).any(-1))
    rows = ", and {count} of {total} rows of the mask hide every key".format(**found) if found is not None else ""
    return {"largest": largest, "rows": rows}


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


_NORMS = ("norm", "vector_norm", "matrix_norm")
_EUCLIDEAN = (None, 2, "fro")
_SQUARES = ("pow", "square", "mul")
_TO_ROOT = frozenset({"sum", "mean", "add", "clamp", *VIEWS})


def root_of_squares(scene: Scene) -> int | None:
    """The call that takes the root of the squares which the origin computes: the origin itself if it is a norm."""
    index, call = scene.index, scene.program.calls[scene.index]
    if short_name(call) in _NORMS:
        return index if _order(call) in _EUCLIDEAN else None
    exponent = scene.tensor_if_given("y")
    is_square = short_name(call) == "square" or (short_name(call) == "mul" and call.args[:1] == call.args[1:2])
    is_square = is_square or (short_name(call) == "pow" and exponent is not None and bool((exponent == 2).all()))
    if short_name(call) not in _SQUARES or not is_square:
        return None
    value = call.output_refs()[0]
    for number in range(index + 1, len(scene.program.calls)):
        later = scene.program.calls[number]
        if value in later.input_refs() and scene.leads_to_loss(later):
            if short_name(later) == "sqrt":
                return number
            if short_name(later) not in _TO_ROOT or not later.output_refs():
                return None
            value = later.output_refs()[0]
    return None


def _order(call: Call) -> Any:
    """The order of a norm: its ``p`` or ``ord``; that of 2 of a matrix is none of squares."""
    order = call.kwargs.get("ord", call.kwargs.get("p", call.args[1] if len(call.args) > 1 else None))
    return "spectral" if order == 2 and short_name(call) == "matrix_norm" else order


@sign
def squares_overflow(scene: Scene) -> Numbers | None:
    """True if a norm of finite numbers is infinite only because their squares are."""
    result, x = scene.tensor("result"), scene.tensor("x")
    if not x.is_floating_point() or not bool(x.isfinite().all()):
        return None
    if bool(result.isfinite().all()) or root_of_squares(scene) is None or not x.numel():
        return None
    largest, limit = float(x.abs().max()), torch.finfo(x.dtype).max
    if largest * math.sqrt(x.numel()) > limit or float(x.double().square().sum()) <= limit:
        return None  # the norm itself may be too large, or the squares are not
    return {"largest": largest, "limit": limit, "root": math.sqrt(limit), "dtype": dtype_name(x)}


@sign
def turns_bad(scene: Scene) -> Numbers | None:
    """True if everything the origin is given is finite, and its result is not."""
    result, largest = scene.tensor("result"), _largest_if_finite(scene)
    if largest is None or not result.is_floating_point() or bool(result.isfinite().all()):
        return None
    return {"largest": largest, "limit": torch.finfo(result.dtype).max, "dtype": dtype_name(result)}


def _largest_if_finite(scene: Scene, first: int | None = None) -> float | None:
    """The largest magnitude in the origin's tensors, or the ``first`` few of them; ``None`` if one is not finite."""
    given = [tensor for tensor in scene.arguments()[:first] if tensor.is_floating_point() and tensor.numel()]
    sizes = [float(tensor.abs().max()) for tensor in given]  # NaN if there is one in it
    return max(sizes) if sizes and all(map(math.isfinite, sizes)) else None


@sign
def computes_in_half(scene: Scene) -> Numbers | None:
    """True if anything the origin is given is in half precision, the parameters of an optimizer included."""
    halves = list(filter(is_half, scene.arguments()))
    return {"dtype": dtype_name(halves[0]), "smallest": smallest(halves[0].dtype)} if halves else None


@sign
def loses_eps(scene: Scene, operand: Slot = "denominator") -> Numbers | None:
    """True if an argument was protected by a small constant that half precision rounds to zero."""
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
def contributions_overflow(scene: Scene) -> Numbers | None:
    """True if a backward pass leaves a ``.grad`` bad that was finite or not there before it."""
    was_good = False

    def watch(notes: Notes, index: int, call: Call, _: object, *, after: bool) -> BadValue | None:
        nonlocal was_good
        leaf = notes.leaves.get(-1 if scene.failure.value is None else scene.failure.value)
        if leaf is None or not call.is_differentiation:
            return None
        is_good = leaf.grad is None or not ways_of(leaf.grad)
        is_made, was_good = after and was_good and not is_good, is_good
        return BadValue(-1, scene.failure.way, index) if is_made else None

    notes = Notes(scene.program, watch)
    notes.run(scene.tensors)
    return {} if notes.found is not None else None


@sign
def gradient_overflows_half(scene: Scene) -> Numbers | None:
    """True if a gradient overflowed in float16; bfloat16 ends where float32 does."""
    result = scene.tensor("result")
    if not scene.failure.is_derivative or result.dtype is not torch.float16:
        return None
    return {"dtype": dtype_name(result), "limit": torch.finfo(result.dtype).max}


@sign
def divides_by_power_of_result(scene: Scene) -> Numbers | None:
    """True if the gradient of a p-norm divides by a power of the norm that is too small to divide by."""
    result, order = scene.tensor("result"), scene.tensor("order")
    power = float(order) - 1
    found = result[(result > 0) & (result**power).reciprocal().isinf()]
    return {"lowest": float(found.min()), "power": power, "dtype": dtype_name(result)} if found.numel() else None
