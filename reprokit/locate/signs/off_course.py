"""Signs of events: spikes, explosions, dead layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.gains import Step, blocking_bias
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, sign
from reprokit.program.ir import Input
from reprokit.story import StepNumbers
from reprokit.words import data_words

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
