"""Signs outside of the origin: hyperparameters, inputs that were bad, the story of the steps and layers before, labels
and lengths that do not fit, exceptions, and events.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from reprokit.locate.failure import EXCEPTION
from reprokit.locate.gains import Step, blocking_bias
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, dtype_name, is_wanted, sign
from reprokit.locate.spelling import short_name
from reprokit.locate.ways import largest_finite
from reprokit.program.ir import Input
from reprokit.series.story import StepNumbers
from reprokit.words import data_words

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


@sign
def raises(scene: Scene, pattern: str) -> Numbers | None:
    """True if the exception's type and message match."""
    if scene.failure.kind != EXCEPTION or scene.failure.exception is None:
        return None
    kind, message = scene.failure.exception
    lines = message.strip().splitlines() or [""]
    return {"exception": f"{kind}: {lines[0]}"} if re.search(pattern, f"{kind}: {message}", re.IGNORECASE) else None


@sign
def dtypes_differ(scene: Scene) -> Numbers | None:
    """The floating-point dtypes of the origin's tensors if there are several."""
    names = list(dict.fromkeys(dtype_name(item) for item in scene.arguments() if item.is_floating_point()))
    return {"dtypes": " and ".join(names)} if len(names) > 1 else None


@sign
def ignores_all_targets(scene: Scene) -> Numbers | None:
    """True if every target of a loss is the one it ignores."""
    target = scene.tensor("target")
    if target.is_floating_point() or not target.numel():
        return None
    ignored = scene.operand("ignore_index")
    return {"count": target.numel(), "ignored": ignored} if bool((target == ignored).all()) else None


@sign
def target_is_longer(scene: Scene) -> Numbers | None:
    """True if a target of ``ctc_loss`` needs more steps than its input has (repeats need one more)."""
    targets = scene.tensor("targets")
    lengths = (torch.as_tensor(scene.operand(f"{name}_lengths")).flatten().tolist() for name in ("input", "target"))
    start = 0
    for number, (available, length) in enumerate(zip(*lengths, strict=False)):
        row = targets[number] if targets.dim() == 2 else targets[start : start + length]
        start += length
        labels = row[:length]
        needed = length + int((labels[1:] == labels[:-1]).sum())
        if needed > available:
            return {"needed": needed, "available": available, "sample": number}
    return None


_LEAST_STEPS = 8  # with a learning rate, before one that is called a jump
_BEFORE = 10  # steps from a jump of the learning rate to the event
_FACTOR = 3.0  # of a jump


@sign
def batch_carries_event(scene: Scene) -> Numbers | None:
    """True if capture found an input of the batch, or rows of it, that is off."""
    event = scene.failure.event
    if event is None or not (event.rows or any(item.name == event.source for item in _inputs(scene, "batch"))):
        return None
    source = f"`{event.source}`" if event.source else "the batch"
    what = f"{event.rows} of {source}" if event.rows else source
    seen = data_words(asdict(event)) or what
    return {"what": what, "seen": seen, "step": event.began_at, "healthy": event.reference_step}


@sign
def parameter_carries_event(scene: Scene) -> Numbers | None:
    """True if capture found a parameter, and no input of the batch, that is off."""
    event = scene.failure.event
    if event is None or event.rows or not any(item.name == event.source for item in _inputs(scene, "parameter")):
        return None
    return {"source": f"`{event.source}`", "step": event.began_at, "healthy": event.reference_step}


@sign
def learning_rate_jumped(scene: Scene) -> Numbers | None:
    """True if the learning rate jumped a few steps before the event at most."""
    event = scene.failure.event
    return rate_jump(scene.timeline, event.began_at) if event is not None else None


def rate_jump(timeline: Sequence[StepNumbers], began_at: int) -> Numbers | None:
    """A rise of the learning rate above all rates before, a few steps before an event at most.

    A warm-up rises by less at once, and a restart of a schedule comes back to a rate that the run has had.
    """
    rates = [(row.step, row.lr) for row in timeline if row.lr is not None and row.step <= began_at]
    for place in range(len(rates) - 1, _LEAST_STEPS - 1, -1):
        (step, now), before = rates[place], [rate for _, rate in rates[:place]]
        if step < began_at - _BEFORE:
            break
        if now >= _FACTOR * before[-1] > 0 and now > max(before):
            return {"jump": step, "before": before[-1], "now": now, "times": now / before[-1], "step": began_at}
    return None


@sign
def bias_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if the parameter gets a gradient once a bias in front of the origin is zero."""
    value = blocking_bias(Step(scene.program, scene.tensors), scene.failure) if scene.failure.event else None
    if value is None:
        return None
    name = next(item.name for item in scene.program.inputs if item.value == value)
    low, high = (float(edge) for edge in torch.aminmax(scene.tensors[value].detach()))
    return {"bias": f"`{name}`", "low": low, "high": high}


@sign
def argument_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if everything that the origin is given is below zero."""
    x = scene.tensor("x")
    return {"highest": float(x.max()), "total": x.numel()} if x.numel() and bool((x <= 0).all()) else None


@sign
def origin_cuts_graph(scene: Scene) -> Numbers | None:
    """True if the origin is `detach`, or ran without recording gradients."""
    if scene.failure.event is None or scene.call is None:
        return None
    if short_name(scene.call) == "detach":
        return {"what": "takes its argument out of the graph"}
    return None if scene.call.mode.grad else {"what": "runs under `no_grad`, so its result has no graph"}


def _inputs(scene: Scene, role: str) -> list[Input]:
    return [item for item in scene.program.inputs if item.role == role]
