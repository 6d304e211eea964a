"""Signs of events: spikes, explosions, dead layers. Most are changes of the step that end the event in a run of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.failure import Predicate
from reprokit.locate.gains import Step, blocking_bias
from reprokit.locate.quantity import measured
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, sign
from reprokit.program.ir import Call, Input, Phase, Program
from reprokit.words import data_words

_MOST_ROWS = 0.5  # of the batch, for which the others can stand in
_LEAST_STEPS = 8  # with a learning rate, before one that is called a jump
_BEFORE = 10  # steps from a jump of the learning rate to the event


@sign
def other_rows_end_event(scene: Scene) -> Numbers | None:
    """True if there is no event with copies of the batch's other rows in the place of those that carry it."""
    event, batch = scene.failure.event, scene.inputs("batch")
    rows = _rows(event.rows) if event is not None and event.rows else []
    named = [item for item in batch if event is not None and item.name == event.source] or batch
    lengths = {len(scene.tensors[item.value]) for item in named if scene.tensors[item.value].dim()}
    length = lengths.pop() if len(lengths) == 1 else 0
    if event is None or not rows or max(rows) >= length or len(rows) > _MOST_ROWS * length:
        return None
    others = [row for row in range(length) if row not in rows]
    changed = {}
    for item in batch:
        tensor = scene.tensors[item.value]
        if tensor.dim() and len(tensor) == length:
            changed[item.value] = tensor.detach().clone()
            changed[item.value][rows] = tensor.detach()[[others[n % len(others)] for n in range(len(rows))]]
    return _without(scene, event, tensors=changed, rows=event.rows)


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
def learning_rate_jumped(scene: Scene, factor: float = 3.0) -> Numbers | None:
    """True if the learning rate rose by this factor, above all rates before, a few steps before the event at most.

    A warm-up rises by less at once, and a restart of a schedule comes back to a rate that the run has had.
    """
    event = scene.failure.event
    if event is None:
        return None
    rates = [(row.step, row.lr) for row in scene.timeline if row.lr is not None and row.step <= event.began_at]
    for place in range(len(rates) - 1, _LEAST_STEPS - 1, -1):
        (step, now), before = rates[place], [rate for _, rate in rates[:place]]
        if step < event.began_at - _BEFORE:
            break
        if now >= factor * before[-1] > 0 and now > max(before):
            return {"jump": step, "before": before[-1], "now": now, "times": now / before[-1], "step": event.began_at}
    return None


@sign
def usual_rate_ends_event(scene: Scene) -> Numbers | None:
    """True if the update is a usual one at the learning rate of the step before."""
    event, jump = scene.failure.event, learning_rate_jumped(scene)
    if event is None or jump is None or event.quantity != "update":
        return None

    def slower(call: Call) -> Call:
        options = [{**group, "lr": group["lr"] / jump["times"]} for group in call.kwargs["options"]]
        return replace(call, kwargs={**call.kwargs, "options": options})

    calls = tuple(slower(call) if call.is_optimizer_step else call for call in scene.program.calls)
    found = _without(scene, event, program=replace(scene.program, calls=calls))
    return found and {**jump, **found}


@sign
def bias_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if the parameter gets a gradient once a bias in front of the origin is zero."""
    event, value = scene.failure.event, blocking_bias(Step(scene.program, scene.tensors), scene.failure)
    if event is None or value is None:
        return None
    tensor = scene.tensors[value].detach()
    name = next(item.name for item in scene.program.inputs if item.value == value)
    low, high = (float(edge) for edge in torch.aminmax(tensor))
    without = _without(scene, event, tensors={value: torch.zeros_like(tensor)})
    return without and {**without, "bias": f"`{name}`", "low": low, "high": high}


@sign
def argument_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if everything that the origin is given is below zero."""
    x = scene.tensor("x")
    return {"highest": float(x.max()), "total": x.numel()} if x.numel() and bool((x <= 0).all()) else None


@sign
def graph_ends_event(scene: Scene) -> Numbers | None:
    """True if the parameter gets a gradient once `detach` and `no_grad` are out of the way."""
    event, origin = scene.failure.event, scene.call
    is_detach = origin is not None and short_name(origin) == "detach"
    if event is None or origin is None or not (is_detach or not origin.mode.grad):
        return None

    def joined(call: Call) -> Call:
        target = "torch.Tensor.clone" if short_name(call) == "detach" else call.target
        return replace(call, target=target, mode=replace(call.mode, grad=True))

    calls = tuple(joined(call) if call.phase == Phase.FORWARD else call for call in scene.program.calls)
    what = "takes its argument out of the graph" if is_detach else "runs under `no_grad`, so its result has no graph"
    return _without(scene, event, program=replace(scene.program, calls=calls), what=what)


def _without(
    scene: Scene,
    event: Predicate,
    *,
    program: Program | None = None,
    tensors: Mapping[int, torch.Tensor] | None = None,
    **more: Any,
) -> Numbers | None:
    """The quantity in the step and in the changed one, if the first shows the event and the second does not."""
    value = measured(scene.program, dict(scene.tensors), scene.failure)
    without = measured(program or scene.program, {**scene.tensors, **(tensors or {})}, scene.failure)
    if value is None or without is None or not value >= event.threshold > without or math.isinf(value):
        return None
    return {"quantity": event.quantity, "value": value, "without": without, "threshold": event.threshold, **more}


def _inputs(scene: Scene, role: str) -> list[Input]:
    return [item for item in scene.program.inputs if item.role == role]


def _rows(words: str) -> list[int]:
    """The numbers in ``rows 0-3, 6``."""
    found: list[int] = []
    for stretch in words.partition(" ")[2].split(","):
        first, _, last = stretch.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
