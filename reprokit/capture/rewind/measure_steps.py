"""Steps of the past in numbers that training did not compute: gradient norm, update, share of zeros in gradients.

They are measured while the steps are played, so they cost nothing until somebody asks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import parameters_of
from reprokit.capture.rewind.replayer import Player
from reprokit.locate.quantity import norm_of, share_of_zeros, update_of

_READS_GRADIENTS = (kinds.CLIP, kinds.OPTIMIZER)


@dataclass
class MeasuredStep:
    """A step that was played. ``optimizer`` is the ``id`` of the one that made its update. ``zeros`` are the shares of
    zeros in gradients, by the ``id`` of the parameter; ``missing`` are those that are trained and have none, ``bad``
    the parameters whose gradient is nan or inf."""

    step: PastStep
    optimizer: int | None = None
    norm: float | None = None
    update: float | None = None
    zeros: dict[int, float] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    bad: list[torch.Tensor] = field(default_factory=list)


class BadGradient(Exception):
    """A gradient is nan or inf, so that no later step will be that of training."""


class OutOfTime(Exception):
    """Steps were played for as long as was granted."""


class StepMeter:
    """Measures every step that a rewind plays; ``steps`` has them in order.

    With ``stops`` it raises `BadGradient` at the first gradient that is nan or inf. With ``seconds`` of CPU time it
    raises `OutOfTime` at the first step that begins later, after ``least`` steps.
    """

    def __init__(self, *, stops: bool = False, seconds: float | None = None, least: int = 0) -> None:
        self._stops = stops
        self._least = least
        self._ends = None if seconds is None else time.process_time() + seconds
        self.steps: list[MeasuredStep] = []
        self._before: list[torch.Tensor] = []

    def before(self, step: PastStep, entry: Entry, player: Player) -> None:
        """Measure gradients where they are complete and not yet clipped, and remember parameters."""
        if not self.steps or self.steps[-1].step is not step:
            if self._ends is not None and len(self.steps) >= self._least and time.process_time() > self._ends:
                raise OutOfTime
            self.steps.append(MeasuredStep(step))
        measured = self.steps[-1]
        if entry.kind not in _READS_GRADIENTS:
            return
        with torch.no_grad():
            if measured.norm is None:
                self._measure(measured, _given_to(entry))
                if measured.bad and self._stops:
                    raise BadGradient
            if entry.kind is kinds.OPTIMIZER:
                measured.optimizer = id(entry.target)
                self._before = [parameter.detach().clone() for parameter in parameters_of(entry.target)]

    def after(self, step: PastStep, entry: Entry) -> None:
        """Measure the update of an optimizer."""
        if entry.kind is kinds.OPTIMIZER:
            with torch.no_grad():
                now = [parameter.detach() for parameter in parameters_of(entry.target)]
                self.steps[-1].update = update_of(self._before, now)
            self._before = []

    def _measure(self, measured: MeasuredStep, parameters: list[torch.Tensor]) -> None:
        pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        measured.norm = norm_of(gradient for _, gradient in pairs)
        measured.zeros = {id(parameter): share_of_zeros(gradient) for parameter, gradient in pairs}
        measured.missing = {id(p) for p in parameters if p.grad is None and p.requires_grad}
        measured.bad = [parameter for parameter, gradient in pairs if bad_tensor([gradient]) is not None]


def _given_to(entry: Entry) -> list[torch.Tensor]:
    """The parameters that an optimizer updates, or whose gradients are clipped."""
    if entry.kind is kinds.OPTIMIZER:
        return list(parameters_of(entry.target))
    given = entry.args[0] if entry.args else entry.kwargs.get("parameters", ())
    return [given] if isinstance(given, torch.Tensor) else [p for p in given if isinstance(p, torch.Tensor)]
