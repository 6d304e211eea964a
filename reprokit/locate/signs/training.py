"""Signs outside of the origin: hyperparameters, inputs that were bad, and the story of the steps and layers before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, is_wanted, sign
from reprokit.locate.ways import largest_finite

_TAIL = 20  # steps before the failure that are looked at


@sign
def optimizer_option(scene: Scene, name: str, **wanted: float) -> Numbers | None:
    """True if an option of the optimizer's step is as wanted in any group."""
    values = (group.get(name) for group in _groups(scene))
    found = next((value for value in values if is_wanted(value, wanted)), None)
    return {name: found} if found is not None else None


@sign
def has_bad_number(scene: Scene) -> Numbers | None:
    """True if an option of the optimizer's step is not finite."""
    for group in _groups(scene):
        for name, value in group.items():
            if _is_bad(value):
                return {"name": name, "value": value}
    return None


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
def input_is(scene: Scene, roles: Sequence[str]) -> Numbers | None:
    """True if an input of one of these roles was bad before the first call."""
    failure = scene.failure
    if failure.call is not None or failure.value is None:
        return None
    item = next((item for item in scene.program.inputs if item.value == failure.value), None)
    if item is None or item.role not in roles:
        return None
    return {"input": f"`{item.name}`", "count": failure.num_bad, "total": failure.num_elements, "role": item.role}


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
