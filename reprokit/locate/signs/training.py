"""Signs outside of the origin: hyperparameters, inputs that were bad, and the story of the steps and layers before."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.domains import WEIGHTED
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, is_wanted, places, sign
from reprokit.locate.ways import largest_finite
from reprokit.program.ir import OPAQUE, Ref

# State of torch's optimizers, by name: averages and sums of squares.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "row_var", "col_var"})
_TAIL = 20  # steps before the failure that are looked at


@sign
def optimizer_option(scene: Scene, name: str, **wanted: float) -> Numbers | None:
    """True if an option of the optimizer's step is as wanted in any group."""
    values = (group.get(name) for group in _groups(scene))
    found = next((value for value in values if is_wanted(value, wanted)), None)
    return {name: found} if found is not None else None


@sign
def has_bad_number(scene: Scene) -> Numbers | None:
    """True if the origin is given a number, not a tensor, that is not finite: a hyperparameter."""
    call = scene.origin.call
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
def averages_negative_squares(scene: Scene) -> Numbers | None:
    """True if an average of squares that the optimizer keeps for the parameter which became bad is negative."""
    for value, state in negative_squares(scene):
        squares = scene.tensors[state]
        if value == scene.failure.value:
            name = next(item.name for item in scene.program.inputs if item.value == state)
            return places(squares < 0, state=f"`{name}`", lowest=float(squares.min()))
    return None


def negative_squares(scene: Scene) -> Iterator[tuple[int, int]]:
    """The parameters of an optimizer's step with the inputs that are averages of their squares and partly negative."""
    call = scene.call
    if call is None or not call.is_optimizer_step:
        return
    for parameters, states in zip(call.kwargs["params"], call.kwargs["state"], strict=True):
        for parameter, state in zip(parameters, states, strict=True):
            kept = (ref.value for name, ref in state.items() if name in _SQUARES and isinstance(ref, Ref))
            for value in kept:
                if value in scene.tensors and bool((scene.tensors[value] < 0).any()):
                    yield parameter.value, value


def _groups(scene: Scene) -> Sequence[Mapping[str, Any]]:
    if not scene.origin.call.is_optimizer_step:
        return ()
    options: Sequence[Mapping[str, Any]] = scene.origin.kwargs.get("options", ())
    return options


def _is_bad(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_bad(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    return isinstance(value, float) and not math.isfinite(value)


@sign
def input_is(
    scene: Scene, roles: Sequence[str], scalar: bool | None = None, transform: bool | None = None
) -> Numbers | None:
    """True if an input of one of these roles was bad before the first call; ``scalar``: a single number, or none.

    ``transform``: made by a transform of `torch.func` that is one opaque call, or not.
    """
    failure = scene.failure
    if failure.call is not None or failure.value is None:
        return None
    item = next((item for item in scene.program.inputs if item.value == failure.value), None)
    if item is None or item.role not in roles:
        return None
    if scalar is not None and scalar is not (scene.tensors[item.value].dim() == 0):
        return None
    makers = (call for call in scene.program.calls if call.target == OPAQUE and item.value in call.output_refs())
    maker = next((call.kwargs for call in makers), {})
    if transform is not None and transform is not ("is_transform" in maker):
        return None
    found = {"input": f"`{item.name}`", "count": failure.num_bad, "total": failure.num_elements, "role": item.role}
    return found | {"maker": maker.get("name", "")}


@sign
def row_stands_out(scene: Scene, factor: float = 100.0, rows: int = 4) -> Numbers | None:
    """True if a single row of an input from outside is larger than all others by this factor."""
    for item in scene.inputs("batch"):
        values = scene.tensors[item.value]
        if not values.is_floating_point() or values.dim() < 2 or values.shape[0] < rows:
            continue
        if not values.numel():
            continue
        sizes = values.detach().abs().double().flatten(1).amax(1)
        (largest, second), (row, _) = (found.tolist() for found in sizes.topk(2))
        if math.isfinite(largest) and second > 0 and largest >= factor * second:
            return {"input": f"`{item.name}`", "row": row, "largest": largest, "second": second}
    return None


@sign
def loss_was_growing(scene: Scene, factor: float = 10.0) -> Numbers | None:
    """True if the loss, or the norm of the gradients, of the steps before had grown by this factor, for good.

    The later half of the steps has to go beyond everything in the earlier one, in more than a single step.
    """
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        steps = _numbers(scene, name)[-_TAIL:]
        if len(steps) < 3:
            continue
        before, after = steps[: len(steps) // 2], steps[len(steps) // 2 :]
        low_step, low = min(before, key=lambda item: item[1])
        high_step, high = max(after, key=lambda item: item[1])
        bound = max(abs(size) for _, size in before)
        others = [size for step, size in steps if low_step < step != high_step]
        if high > factor * max(bound, 1e-12) and max(others, default=-math.inf) > bound:
            return {"what": word, "low": low, "high": high, "from_step": low_step, "to_step": high_step,
                    "lr": _last_rate(scene)}  # fmt: skip
    return None


@sign
def loss_exploded(scene: Scene, factor: float = 1000.0) -> Numbers | None:
    """True if the last finite loss is this many times the usual one, and those before it are not."""
    steps = [(step, abs(loss)) for step, loss in _numbers(scene, "loss")]
    if len(steps) < 4:
        return None
    *before, (step, size) = steps[-_TAIL:]
    usual = max(statistics.median(size for _, size in before), 1e-12)
    if size < factor * usual or max(size for _, size in before) >= factor * usual:
        return None
    return {"usual": usual, "size": size, "times": size / usual, "step": step, "from_step": before[-1][0],
            "lr": _last_rate(scene)}  # fmt: skip


@sign
def parameters_are_huge(scene: Scene, bound: float = 1e6) -> Numbers | None:
    """True if parameters that the failure depends on have left every usual range before the step."""
    worst, name = 0.0, ""
    rate = _last_rate(scene, "; the update before was made at a learning rate of")
    for item in scene.inputs("parameter"):
        values = scene.tensors[item.value]
        if values.is_floating_point() and values.numel():
            worst, name = max((worst, name), (largest_finite(values), item.name))
    return {"largest": worst, "input": f"`{name}`", "lr": rate} if worst >= bound else None


def _last_rate(scene: Scene, words: str = ", at a learning rate of") -> str:
    """The learning rate of the last update behind these words; empty if none was noted."""
    rates = _numbers(scene, "lr")
    return f"{words} {rates[-1][1]:.4g}" if rates else ""


@sign
def grows_with_depth(scene: Scene, factor: float = 4.0, layers: int = 3) -> Numbers | None:
    """True if the peaks of the matrix products up to the origin grow from layer to layer, most by ``factor``."""
    behind = [number for number in scene.behind() if short_name(scene.program.calls[number]) in WEIGHTED]
    sizes = [scene.peaks[number] for number in behind if scene.peaks.get(number, 0.0) > 0]
    if len(sizes) < layers:
        return None
    growth = statistics.median_low(after / before for before, after in itertools.pairwise(sizes))
    if growth < factor:
        return None
    return {"growth": growth, "first": sizes[0], "last": sizes[-1], "layers": len(sizes)}


@sign
def scale_collapsed(scene: Scene) -> Numbers | None:
    """True if the scale of a grad scaler fell below one."""
    scales = [scale for _, scale in _numbers(scene, "scale")]
    if len(scales) < 2 or scales[-1] >= 1.0 or max(scales) < 2 * scales[-1]:
        return None
    return {"scale": scales[-1], "highest": max(scales)}


def _numbers(scene: Scene, name: str) -> list[tuple[int, float]]:
    """The finite numbers of this name, with their steps."""
    found = ((row.step, getattr(row, name)) for row in scene.timeline)
    return [(step, number) for step, number in found if number is not None and math.isfinite(number)]
