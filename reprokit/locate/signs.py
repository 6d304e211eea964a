"""The signs an entry of the catalogue asks for: small predicates over a scene.

Each returns the numbers it saw, which the entry's evidence is worded with, or ``None`` when the sign is not there. The
catalogue names them, so a sign is a public word: change its meaning and the entries that name it change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reprokit.locate.failure import EXCEPTION
from reprokit.locate.scene import Branch, Scene, Seen, Slot, recompute, short_name
from reprokit.program.ir import Call, Ref

Numbers = dict[str, Any]
Sign = Callable[..., Numbers | None]
SIGNS: dict[str, Sign] = {}
HALVES = (torch.float16, torch.bfloat16)
_DEFAULTS = {("normalize", "eps"): 1e-12, ("cosine_similarity", "eps"): 1e-8, ("layer_norm", "eps"): 1e-5}
_COMPARISONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "below": torch.lt, "at_most": torch.le, "above": torch.gt, "at_least": torch.ge, "equal": torch.eq,
}  # fmt: skip
_TESTS = frozenset([
    "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "logical_xor", "isfinite", "isnan",
    "isinf", "bitwise_and", "bitwise_or", "bitwise_not", "one_hot", "tril", "triu", "ones_like", "zeros_like", "cat",
    "stack", "mul", "masked_fill", "where", "arange",
])  # fmt: skip
_MATRIX_CALLS = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "mv",
                 "rnn_relu", "rnn_tanh", "gru", "lstm")  # fmt: skip


def sign(function: Sign) -> Sign:
    """Register a predicate under its name."""
    SIGNS[function.__name__] = function
    return function


@sign
def has(scene: Scene, operand: Slot = "x", *, size: bool = False, **wanted: float) -> Numbers | None:
    """Whether any element of an argument compares as wanted (``below``, ``at_least``, ...; ``size``: of its size)."""
    values = scene.tensor(operand)
    if values is None or values.is_complex() or values.dtype is torch.bool:
        return None
    compared = values.abs() if size else values
    mask = torch.ones_like(compared, dtype=torch.bool)
    for name, bound in wanted.items():
        mask &= _COMPARISONS[name](compared, bound)
    return {**_count(scene, operand, values, mask)} if bool(mask.any()) else None


@sign
def is_fraction(scene: Scene, operand: Slot = "exponent") -> Numbers | None:
    """Whether an argument is a number, or holds one, that is not whole."""
    values = scene.tensor(operand)
    if values is None or values.numel() == 0:
        return None
    parts = values.double()[values.double().frac() != 0]
    return {"exponent": float(parts.flatten()[0])} if parts.numel() else None


@sign
def divides_zero_by_zero(scene: Scene) -> Numbers | None:
    """Whether numerator and denominator are zero at one place."""
    return _division(scene, lambda numerator: numerator == 0)


@sign
def divides_by_zero(scene: Scene) -> Numbers | None:
    """Whether a numerator that is not zero is divided by zero."""
    return _division(scene, lambda numerator: numerator != 0)


@sign
def divides_infinities(scene: Scene) -> Numbers | None:
    """Whether an infinity is divided by an infinity."""
    numerator, denominator = scene.tensor("numerator"), scene.tensor("denominator")
    if numerator is None or denominator is None:
        return None
    mask = numerator.isinf() & denominator.isinf()
    return {"count": int(mask.sum()), "total": mask.numel()} if bool(mask.any()) else None


@sign
def adds_opposite_infinities(scene: Scene) -> Numbers | None:
    """Whether infinities meet that take each other away: in a sum or difference, or within one reduction."""
    call, x, y = scene.call, scene.tensor("x"), scene.tensor("y")
    if call is None or x is None:
        return None
    if short_name(call) in ("sum", "mean", "cumsum"):
        plus, minus = int((x == math.inf).sum()), int((x == -math.inf).sum())
        return {"count": min(plus, minus), "total": x.numel()} if plus and minus else None
    if y is None:
        return None
    other = -y if short_name(call) == "sub" else y
    mask = x.isinf() & other.isinf() & (x != other)
    return {"count": int(mask.sum()), "total": mask.numel()} if bool(mask.any()) else None


@sign
def multiplies_zero_by_infinity(scene: Scene) -> Numbers | None:
    """Whether zero meets an infinity in a product."""
    x, y = scene.tensor("x"), scene.tensor("y")
    if x is None or y is None:
        return None
    try:
        mask = ((x == 0) & y.isinf()) | (x.isinf() & (y == 0))
    except RuntimeError:  # matrices, whose elements do not meet one by one
        count = int(min((x == 0).any(), y.isinf().any()) or min(x.isinf().any(), (y == 0).any()))
        return {"count": count, "total": 1} if count else None
    return {"count": int(mask.sum()), "total": mask.numel()} if bool(mask.any()) else None


@sign
def reduces_nothing(scene: Scene) -> Numbers | None:
    """Whether the argument has no elements, but the result does."""
    x = scene.tensor("x")
    result = scene.origin.result if scene.origin is not None else None
    if x is None or x.numel() or (result is not None and not result.numel()):
        return None
    return {"shape": _shape(x)}


@sign
def reduces_one(scene: Scene) -> Numbers | None:
    """Whether every result of a reduction is made from a single element."""
    x = scene.tensor("x")
    result = scene.origin.result if scene.origin is not None else None
    if x is None or result is None or not x.numel() or x.numel() != result.numel():
        return None
    return {"shape": _shape(x)}


@sign
def has_row_of(scene: Scene, value: float, operand: Slot = "x") -> Numbers | None:
    """Whether some row along the call's ``dim`` holds nothing but this value."""
    x, dim = scene.tensor(operand), _dimension(scene)
    if x is None or x.dim() == 0 or not x.numel():
        return None
    rows = (x == value).flatten() if dim is None else (x == value).all(dim)
    rows = rows.all().reshape(1) if dim is None else rows
    if not bool(rows.any()):
        return None
    return {"count": int(rows.sum()), "total": rows.numel(), "operand": scene.name(operand)}


@sign
def follows(scene: Scene, calls: Sequence[str], operand: Slot = "x", depth: int = 1) -> Numbers | None:
    """Whether an argument comes from one of these calls, views and casts apart."""
    for _, call in scene.makers(operand, depth):
        if short_name(call) in calls:
            return {"maker": short_name(call), "operand": scene.name(operand)}
    return None


@sign
def sums_exponentials(scene: Scene, operand: Slot = "denominator") -> Numbers | None:
    """Whether an argument is made of exponentials, some of which came out as zero."""
    for index, call in scene.makers(operand, 6):
        if short_name(call) in ("exp", "exp2", "softmax", "sigmoid") and index in scene.zeros:
            return {"maker": short_name(call), "zeros": scene.zeros[index]}
    return None


@sign
def counts_something(scene: Scene, operand: Slot = "denominator") -> Numbers | None:
    """Whether an argument is a count: a sum of flags or whole numbers, or a number of elements."""
    for index, call in scene.makers(operand, 2):
        if short_name(call) in ("count_nonzero", "bincount", "histc"):
            return {"maker": short_name(call)}
        seen = scene.seen.get(index)
        if short_name(call) == "sum" and seen is not None and seen.args and _is_mask(scene, seen, index):
            return {"maker": short_name(call)}
    return None


@sign
def overflows(scene: Scene, halves: bool | None = None) -> Numbers | None:
    """Whether the origin made an infinity of finite arguments because its dtype ends too early.

    The call is done again in float64, to tell by how much. ``halves``: of half precision only, or of others only.
    """
    seen = scene.origin
    result = seen.result if seen is not None else None
    if seen is None or result is None or not result.is_floating_point():
        return None
    if halves is not None and (result.dtype in HALVES) != halves:
        return None
    bad = ~result.isfinite()
    exact = recompute(seen)
    if exact is None or exact.shape != result.shape or not bool(bad.any()):
        return None
    sizes = exact.abs()[bad & exact.isfinite()]
    limit = torch.finfo(result.dtype).max
    if not sizes.numel() or float(sizes.max()) <= limit:
        return None
    return {
        "largest": float(sizes.max()), "limit": limit, "times": float(sizes.max()) / limit,
        "dtype": _dtype(result), "count": int(bad.sum()), "total": result.numel(),
    }  # fmt: skip


@sign
def computes_in_half(scene: Scene) -> Numbers | None:
    """Whether anything the origin is given is in half precision, the parameters of an optimizer included."""
    seen = scene.origin
    tensors = list(_tensors((seen.args, dict(seen.kwargs)))) if seen is not None else []
    halves = [tensor for tensor in tensors if tensor.dtype in HALVES]
    return {"dtype": _dtype(halves[0]), "smallest": _smallest(halves[0].dtype)} if halves else None


@sign
def loses_eps(scene: Scene, operand: Slot = "denominator", depth: int = 3) -> Numbers | None:
    """Whether an argument was protected by a small constant that half precision rounds to zero."""
    values = scene.tensor(operand)
    if values is None or values.dtype not in HALVES:
        return None
    for _, call in scene.makers(operand, depth):
        if short_name(call) in ("add", "clamp", "clamp_min", "maximum", "max"):
            for number in _numbers(call):
                if number != 0 and float(torch.tensor(number, dtype=values.dtype)) == 0:
                    return {"eps": number, "dtype": _dtype(values), "smallest": _smallest(values.dtype)}
    return None


@sign
def loses_eps_argument(scene: Scene, name: str = "eps") -> Numbers | None:
    """Whether the call's own ``eps`` is rounded to zero by half precision."""
    try:
        eps, x = scene.operand(name), scene.operand("x")
    except KeyError:
        eps, x = _default(scene, name), scene.tensor("x")
    if not isinstance(eps, float) or not isinstance(x, torch.Tensor) or x.dtype not in HALVES or eps == 0:
        return None
    if float(torch.tensor(eps, dtype=x.dtype)) != 0:
        return None
    return {"eps": eps, "dtype": _dtype(x), "smallest": _smallest(x.dtype)}


@sign
def underflowed(scene: Scene, operand: Slot = "x") -> Numbers | None:
    """Whether zeros in a half-precision argument would not be zero in float64."""
    values = scene.tensor(operand)
    if values is None or values.dtype not in HALVES:
        return None
    for index, _ in scene.makers(operand):
        seen = scene.seen.get(index)
        result, exact = (seen.result, recompute(seen)) if seen is not None else (None, None)
        if result is None or exact is None or exact.shape != result.shape:
            continue
        lost = (result == 0) & (exact != 0)
        if bool(lost.any()):
            return {
                "count": int(lost.sum()), "total": result.numel(), "dtype": _dtype(values),
                "value": float(exact.abs()[lost].max()), "smallest": _smallest(values.dtype),
            }  # fmt: skip
    return None


@sign
def option(scene: Scene, name: str, **wanted: Any) -> Numbers | None:
    """Whether an argument of the origin that is a number or flag is as wanted (``equal``, ``below``, ``above``)."""
    try:
        value = scene.operand(name)
    except KeyError:
        value = _default(scene, name)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {name: value} if "equal" in wanted and value == wanted["equal"] else None
    if not isinstance(value, (int, float)):
        return None
    number = torch.tensor(float(value), dtype=torch.float64)
    matches = all(bool(_COMPARISONS[kind](number, bound)) for kind, bound in wanted.items())
    return {name: value} if matches else None


@sign
def optimizer_option(scene: Scene, name: str, **wanted: float) -> Numbers | None:
    """Whether an option of the optimizer's step is as wanted in any group."""
    for group in _groups(scene):
        value = group.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = torch.tensor(float(value), dtype=torch.float64)
            if all(bool(_COMPARISONS[kind](number, bound)) for kind, bound in wanted.items()):
                return {name: value, "group_option": name}
    return None


@sign
def optimizer_loses_eps(scene: Scene) -> Numbers | None:
    """Whether the optimizer's ``eps`` is rounded to zero in the dtype of a parameter."""
    params = scene.origin.kwargs.get("params", ()) if scene.origin is not None else ()
    for group, options in zip(params, _groups(scene), strict=False):
        eps = options.get("eps")
        for parameter in group:
            if isinstance(eps, float) and eps and float(torch.tensor(eps, dtype=parameter.dtype)) == 0:
                return {"eps": eps, "dtype": _dtype(parameter), "smallest": _smallest(parameter.dtype)}
    return None


@sign
def has_bad_number(scene: Scene) -> Numbers | None:
    """Whether the origin is given a number, not a tensor, that is not finite: a hyperparameter."""
    call = scene.call
    if call is None:
        return None
    if call.is_optimizer_step:
        for group in _groups(scene):
            for name, value in group.items():
                if _is_bad(value):
                    return {"name": name, "value": value}
        return None
    named = [*((f"argument {n}", value) for n, value in enumerate(call.args)), *call.kwargs.items()]
    bad = ({"name": name, "value": value} for name, value in named if isinstance(value, float) and value != value)
    return next(bad, None)


@sign
def huge_update(scene: Scene, factor: float = 1e6) -> Numbers | None:
    """Whether the learning rate of the optimizer's step is out of any proportion."""
    for group in _groups(scene):
        rate = group.get("lr")
        if isinstance(rate, (int, float)) and math.isfinite(rate) and rate >= factor:
            return {"lr": rate}
    return None


@sign
def dropped_later(scene: Scene) -> Numbers | None:
    """Whether every dangerous element of the origin is dropped by a later ``where`` or mask."""
    mask = danger(scene)
    if mask is None or not bool(mask.any()):
        return None
    for branch in scene.branches:
        kept = _like(branch, mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool((kept & mask).any()):
            return {"count": int(mask.sum()), "total": mask.numel(), "dropper": short_name(branch.call)}
    return None


def danger(scene: Scene) -> torch.Tensor | None:
    """Where the origin's argument is at or beyond the edge of what it, or its derivative, is defined for."""
    call = scene.call
    bounds = EDGES.get(short_name(call)) if call is not None else None
    if bounds is None:
        return None
    role, test = bounds
    values = scene.tensor(role)
    return test(values) if values is not None and values.is_floating_point() else None


def _exp_limit(x: torch.Tensor) -> torch.Tensor:
    return x > math.log(torch.finfo(x.dtype).max)


EDGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), ("x", lambda x: x <= 0)),
    "log1p": ("x", lambda x: x <= -1),
    **dict.fromkeys(("acos", "asin", "atanh"), ("x", lambda x: x.abs() >= 1)),
    "acosh": ("x", lambda x: x <= 1),
    **dict.fromkeys(("div", "reciprocal"), ("denominator", lambda x: x == 0)),
    "pow": ("base", lambda x: x <= 0),
    **dict.fromkeys(("exp", "expm1", "exp2", "sinh", "cosh"), ("x", _exp_limit)),
}


@sign
def is_dangerous(scene: Scene) -> Numbers | None:
    """Whether any element is at or beyond the edge of what the origin is defined for."""
    mask = danger(scene)
    return {"count": int(mask.sum()), "total": mask.numel()} if mask is not None and bool(mask.any()) else None


@sign
def meets_zero_factor(scene: Scene) -> Numbers | None:
    """Whether the origin's infinities are multiplied by zeros later."""
    seen = scene.origin
    result = seen.result if seen is not None else None
    if result is None:
        return None
    for branch in scene.branches:
        if short_name(branch.call) == "mul":
            kept = _like(branch, result)
            if kept is not None and bool((result.isinf() & ~kept).any()):
                mask = result.isinf() & ~kept
                return {"zeros": int(mask.sum())}
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


@sign
def equal_values(scene: Scene, within: float = 1e-6) -> Numbers | None:
    """Whether a decomposition has eigenvalues or singular values that are equal, or zero, up to rounding."""
    seen = scene.origin
    if seen is None:
        return None
    for values in seen.results.values():
        if values.is_complex() or values.dim() == 0 or values.shape[-1] < 2 or _is_matrix_of(values, seen.args):
            continue
        ordered = values.double().sort(dim=-1).values
        gaps = (ordered[..., 1:] - ordered[..., :-1]).abs() / ordered.abs().amax().clamp(min=1e-30)
        if bool((gaps <= within).any()):
            return {"count": int((gaps <= within).sum()), "gap": float(gaps.min()), "total": values.numel()}
    return None


@sign
def is_singular(scene: Scene, operand: Slot = "x") -> Numbers | None:
    """Whether a matrix has no inverse, up to rounding; tells its rank and condition number."""
    x = scene.tensor(operand)
    if x is None or x.dim() < 2 or x.shape[-1] != x.shape[-2] or not x.numel() or not bool(x.isfinite().all()):
        return None
    values = torch.linalg.svdvals(x.detach().double()).reshape(-1, x.shape[-1])
    ratios = values[:, -1] / values[:, 0].clamp(min=1e-300)
    worst = int(ratios.argmin())
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 1e-7
    if float(ratios[worst]) > eps * x.shape[-1]:
        return None
    rank = int((values[worst] > values[worst, 0] * eps * x.shape[-1]).sum()) if float(values[worst, 0]) else 0
    return {"rank": rank, "size": x.shape[-1]}


@sign
def is_not_positive(scene: Scene, operand: Slot = "x") -> Numbers | None:
    """Whether a symmetric matrix has an eigenvalue that is not above zero."""
    x = scene.tensor(operand)
    if x is None or x.dim() < 2 or x.shape[-1] != x.shape[-2] or not bool(x.isfinite().all()):
        return None
    lowest = float(torch.linalg.eigvalsh(x.detach().double()).min())
    eps = torch.finfo(x.dtype).eps * float(x.abs().max()) * x.shape[-1]
    return {"lowest": lowest, "size": x.shape[-1]} if lowest <= eps else None


@sign
def holds_bad_values(scene: Scene, operand: Slot = "x") -> Numbers | None:
    """Whether an argument is not finite already."""
    x = scene.tensor(operand)
    if x is None or not x.is_floating_point():
        return None
    bad = int((~x.isfinite()).sum())
    return {"count": bad, "total": x.numel(), "operand": scene.name(operand)} if bad else None


@sign
def raises(scene: Scene, pattern: str) -> Numbers | None:
    """Whether the exception's type and message match."""
    if scene.failure.kind != EXCEPTION or scene.failure.exception is None:
        return None
    kind, message = scene.failure.exception
    return {"exception": kind} if re.search(pattern, f"{kind}: {message}", re.IGNORECASE) else None


@sign
def index_outside(scene: Scene) -> Numbers | None:
    """Whether an index is outside of what it indexes; tells the range of both."""
    call, seen = scene.call, scene.origin
    if call is None or seen is None:
        return None
    tensors = [t for t in _tensors((seen.args, dict(seen.kwargs)))]
    indexes = [t for t in tensors if t.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) and t.numel()]
    tables = [t for t in tensors if t.is_floating_point() and t.dim()]
    if not indexes:
        return None
    name, index = short_name(call), indexes[0]
    if name == "one_hot":
        size = _argument(scene, "num_classes", 1)
    elif name in ("cross_entropy", "nll_loss"):
        size = tables[0].shape[1 if tables[0].dim() > 1 else 0] if tables else None
    elif name == "embedding":
        size = tables[0].shape[0] if tables else None
    else:
        dim = _dimension(scene) or 0
        size = tables[0].shape[dim] if tables else None
    lowest, highest = int(index.min()), int(index.max())
    if not isinstance(size, int) or size < 0 or (highest < size and lowest >= 0):
        return None
    return {"lowest": lowest, "highest": highest, "size": size}


@sign
def ignores_all_targets(scene: Scene) -> Numbers | None:
    """Whether every target of a loss is the one it ignores."""
    target, ignored = scene.tensor("target"), _argument(scene, "ignore_index", 4, -100)
    if target is None or target.is_floating_point() or not target.numel() or not bool((target == ignored).all()):
        return None
    return {"count": target.numel(), "ignored": ignored}


@sign
def target_is_impossible(scene: Scene) -> Numbers | None:
    """Whether the score of a target class is ``-inf``, so that its loss is infinite."""
    x, target = scene.tensor("x"), scene.tensor("target")
    if x is None or target is None or target.is_floating_point() or x.dim() < 2 or x.shape[:1] != target.shape[:1]:
        return None
    chosen = x.gather(1, target.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
    bad = (chosen == -math.inf) & (target >= 0)
    return {"count": int(bad.sum()), "total": target.numel()} if bool(bad.any()) else None


@sign
def target_is_longer(scene: Scene) -> Numbers | None:
    """Whether a target of ``ctc_loss`` needs more steps than its input has (repeats need one more)."""
    inputs, lengths = _lengths(scene, "input_lengths", 2), _lengths(scene, "target_lengths", 3)
    targets = scene.tensor("targets")
    if inputs is None or lengths is None or targets is None:
        return None
    start = 0
    for number, (available, length) in enumerate(zip(inputs, lengths, strict=False)):
        row = targets[number] if targets.dim() == 2 else targets[start : start + length]
        start += length
        labels = row[:length]
        needed = length + int((labels[1:] == labels[:-1]).sum())
        if needed > available:
            return {"needed": needed, "available": available, "sample": number}
    return None


@sign
def input_is(scene: Scene, roles: Sequence[str]) -> Numbers | None:
    """Whether an input of one of these roles was bad before the first call."""
    failure = scene.failure
    if failure.call is not None or failure.value is None:
        return None
    item = next((item for item in scene.program.inputs if item.value == failure.value), None)
    if item is None or item.role not in roles:
        return None
    return {"input": f"`{item.name}`", "count": failure.num_bad, "total": failure.num_elements, "role": item.role}


@sign
def adds_up_gradients(scene: Scene) -> Numbers | None:
    """Whether a gradient went bad where contributions are added up."""
    return {} if scene.failure.backward_node == "AccumulateGrad" else None


@sign
def loss_was_growing(scene: Scene, factor: float = 10.0) -> Numbers | None:
    """Whether the loss, or the norm of the gradients, of the steps before had grown by this factor."""
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        steps = [(int(row["step"]), abs(float(row[name]))) for row in scene.timeline if _is_number(row.get(name))]
        if len(steps) < 2:
            continue
        tail = steps[-20:]
        low_step, low = min(tail, key=lambda item: item[1])
        high_step, high = max(tail, key=lambda item: item[1])
        second = max((size for step, size in tail if step > low_step and step != high_step), default=0.0)
        if high_step > low_step and high > factor * max(low, 1e-12) and second > factor / 3 * low:
            rate = next((row.get("lr") for row in reversed(scene.timeline) if _is_number(row.get("lr"))), None)
            return {"what": word, "low": low, "high": high, "from_step": low_step, "to_step": high_step,
                    "lr": f", at a learning rate of {rate:.4g}" if rate is not None else ""}  # fmt: skip
    return None


@sign
def parameters_are_huge(scene: Scene, bound: float = 1e6) -> Numbers | None:
    """Whether parameters have left every usual range before the step."""
    worst, name = 0.0, ""
    for item in scene.program.inputs:
        values = scene.tensors[item.value]
        if item.role == "parameter" and values.is_floating_point() and values.numel():
            size = float(values.detach().abs().double().nan_to_num(0.0, 0.0, 0.0).max())
            worst, name = max((worst, name), (size, item.name))
    return {"largest": worst, "input": f"`{name}`"} if worst >= bound else None


@sign
def grows_with_depth(scene: Scene, factor: float = 4.0, layers: int = 3) -> Numbers | None:
    """Whether the peaks of the matrix products up to the origin grow from layer to layer."""
    index = scene.failure.call_index
    if index is None:
        return None
    end = index if scene.failure.phase == "forward" else len(scene.program.calls)
    sizes = [
        scene.peaks[number].value
        for number in sorted(scene.peaks)
        if number < end and short_name(scene.program.calls[number]) in _MATRIX_CALLS
    ]
    sizes = [size for size in sizes if size > 0]
    if len(sizes) < layers:
        return None
    growth = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    if growth < factor:
        return None
    return {"growth": growth, "first": sizes[0], "last": sizes[-1], "layers": len(sizes)}


@sign
def gradients_explode(scene: Scene) -> Numbers | None:
    """Whether a gradient overflowed by itself: an infinity out of a product, with nothing at an edge."""
    failure, seen = scene.failure, scene.origin
    if failure.phase != "backward" or seen is None:
        return None
    tensors = [t for t in _tensors((seen.args, dict(seen.kwargs))) if t.is_floating_point()]
    if not all(bool(t.isfinite().all()) for t in tensors):
        return None
    largest = max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
    return {"largest": largest, "dtype": _dtype(tensors[0])} if tensors else None


@sign
def gradient_overflows_half(scene: Scene) -> Numbers | None:
    """Whether a gradient overflowed in half precision."""
    seen = scene.origin
    result = seen.result if seen is not None else None
    if scene.failure.phase != "backward" or result is None or result.dtype not in HALVES:
        return None
    return {"dtype": _dtype(result), "limit": torch.finfo(result.dtype).max}


@sign
def scale_collapsed(scene: Scene) -> Numbers | None:
    """Whether the scale of a grad scaler fell below one."""
    scales = [float(row["scale"]) for row in scene.timeline if _is_number(row.get("scale"))]
    if len(scales) < 2 or scales[-1] >= 1.0 or max(scales) < 2 * scales[-1]:
        return None
    return {"scale": scales[-1], "highest": max(scales)}


@sign
def argument_is_zero_vector(scene: Scene, operand: Slot = "x") -> Numbers | None:
    """Whether some vector along the last dimension, or the call's ``dim``, is zero throughout."""
    x = scene.tensor(operand)
    if x is None or x.dim() == 0 or not x.numel():
        return None
    dim = _dimension(scene)
    return has_row_of(scene, 0.0, operand) if dim is not None else _zero_rows(scene, x, operand)


@sign
def weight_row_is_zero(scene: Scene) -> Numbers | None:
    """Whether a whole row of a weight-normalised weight is zero."""
    weight, dim = scene.tensor("x"), scene.call.args[2] if scene.call is not None and len(scene.call.args) > 2 else 0
    if weight is None or weight.dim() == 0:
        return None
    rows = (weight if dim == -1 else weight.movedim(dim, 0)).flatten(1) if weight.dim() > 1 else weight.reshape(-1, 1)
    zero = (rows == 0).all(1)
    return {"count": int(zero.sum()), "total": zero.numel()} if bool(zero.any()) else None


@sign
def both_are_zero(scene: Scene) -> Numbers | None:
    """Whether both arguments are zero (to the power of two) at one place."""
    x, y = scene.tensor("x"), scene.tensor("y")
    if x is None or y is None:
        return None
    mask = (x * x + y * y) == 0
    return {"count": int(mask.sum()), "total": mask.numel()} if bool(mask.any()) else None


@sign
def input_is_finite(scene: Scene) -> Numbers | None:
    """Whether everything the origin is given is finite, and its result is not."""
    seen = scene.origin
    if seen is None or not any(not bool(t.isfinite().all()) for t in seen.results.values() if t.is_floating_point()):
        return None
    given = [t for t in _tensors((seen.args, dict(seen.kwargs))) if t.is_floating_point() and t.numel()]
    if not given or not all(bool(t.isfinite().all()) for t in given):
        return None
    return {"largest": max(float(t.abs().max()) for t in given)}


@sign
def observed_overflow(scene: Scene) -> Numbers | None:
    """Whether the origin gave an infinity although everything it was given is finite."""
    seen = scene.origin
    result = seen.result if seen is not None else None
    if seen is None or result is None or not result.is_floating_point() or bool(result.isfinite().all()):
        return None
    given = [t for t in _tensors((seen.args, dict(seen.kwargs))) if t.is_floating_point() and t.numel()]
    if not given or not all(bool(t.isfinite().all()) for t in given):
        return None
    return {"largest": max(float(t.abs().max()) for t in given), "limit": torch.finfo(result.dtype).max,
            "dtype": _dtype(result)}  # fmt: skip


def _is_mask(scene: Scene, seen: Seen, index: int) -> bool:
    """Whether what a call reduces says which elements count: flags, whole numbers, or 0 and 1 from a comparison."""
    counted = seen.args[0]
    if not isinstance(counted, torch.Tensor) or counted.is_complex():
        return False
    if not counted.is_floating_point():
        return True
    if bool(((counted != 0) & (counted != 1)).any()):
        return False
    makers = list(scene.makers_of(seen.call.args[:1], index))
    return not makers or any(short_name(call) in _TESTS for _, call in makers)


def _division(scene: Scene, numerators: Callable[[torch.Tensor], torch.Tensor]) -> Numbers | None:
    call, denominator = scene.call, scene.tensor("denominator")
    if call is None or denominator is None:
        return None
    numerator = torch.ones(()) if short_name(call) == "reciprocal" else scene.tensor("numerator")
    if numerator is None:
        return None
    try:
        mask = numerators(numerator) & (denominator == 0)
    except RuntimeError:
        return None
    return (
        {"count": int(mask.sum()), "total": mask.numel(), "operand": scene.name("denominator")} if mask.any() else None
    )


def _count(scene: Scene, operand: Slot, values: torch.Tensor, mask: torch.Tensor) -> Numbers:
    found = values[mask].double()
    return {
        "count": int(mask.sum()), "total": values.numel(), "operand": scene.name(operand),
        "lowest": float(found.min()), "highest": float(found.max()),
    }  # fmt: skip


def _zero_rows(scene: Scene, x: torch.Tensor, operand: Slot) -> Numbers | None:
    rows = (x == 0).all(-1)
    return {"count": int(rows.sum()), "total": rows.numel(), "operand": scene.name(operand)} if rows.any() else None


def _dimension(scene: Scene) -> int | None:
    """The ``dim`` the origin works along, ``None`` for all."""
    for name in ("dim", "axis"):
        try:
            dim = scene.operand(name)
        except KeyError:
            continue
        if isinstance(dim, (list, tuple)) and len(dim) == 1:
            dim = dim[0]
        return dim if isinstance(dim, int) and not isinstance(dim, bool) else None
    call = scene.call
    if call is None or len(call.args) < 2 or not isinstance(call.args[1], int) or isinstance(call.args[1], bool):
        return None
    return int(call.args[1])


def _argument(scene: Scene, name: str, position: int, default: Any = None) -> Any:
    call = scene.call
    if call is None:
        return default
    return call.kwargs.get(name, call.args[position] if len(call.args) > position else default)


def _default(scene: Scene, name: str) -> Any:
    """What a function does when it is not told."""
    return _DEFAULTS.get((short_name(scene.call), name)) if scene.call is not None else None


def _lengths(scene: Scene, name: str, position: int) -> list[int] | None:
    if scene.origin is None:
        return None
    args = scene.origin.args
    found = scene.origin.kwargs.get(name, args[position] if len(args) > position else None)
    if isinstance(found, torch.Tensor):
        return [int(n) for n in found.flatten().tolist()]
    return [int(n) for n in found] if isinstance(found, (list, tuple)) else None


def _groups(scene: Scene) -> Sequence[Mapping[str, Any]]:
    if scene.origin is None or scene.call is None or not scene.call.is_optimizer_step:
        return ()
    options: Sequence[Mapping[str, Any]] = scene.origin.kwargs.get("options", ())
    return options


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _numbers(call: Call) -> list[float]:
    return [float(a) for a in (*call.args, *call.kwargs.values()) if isinstance(a, (int, float)) and not _is_flag(a)]


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, Ref))


def _is_bad(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_bad(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    return isinstance(value, float) and not math.isfinite(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_matrix_of(values: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a result of a decomposition is made of vectors: it has as many dimensions as what was decomposed."""
    return bool(args) and isinstance(args[0], torch.Tensor) and values.dim() >= args[0].dim()


def _like(branch: Branch, mask: torch.Tensor) -> torch.Tensor | None:
    kept = branch.kept
    if kept.shape == mask.shape:
        return kept
    try:
        return kept.expand(mask.shape)
    except RuntimeError:
        return None


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a dtype, below which everything is zero."""
    return float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)
