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
from reprokit.capture.record.state import parameters_of
from reprokit.locate.quantity import norm_of, share_of_zeros, update_of

_READS_GRADIENTS = (kinds.CLIP, kinds.OPTIMIZER)


@dataclass
class MeasuredStep:
    """A step that was played. ``optimizer`` is the ``id`` of the one that made its update. ``zeros`` are the shares of
    zeros in gradients, by the ``id`` of the parameter, ``None`` for one that is trained and has no gradient."""

    step: PastStep
    optimizer: int | None = None
    norm: float | None = None
    update: float | None = None
    zeros: dict[int, float | None] = field(default_factory=dict)


class OutOfTime(Exception):
    """Steps were played for as long as was granted."""


class StepMeter:
    """Measures every step that a rewind plays; ``steps`` has them in order.

    With ``seconds`` of CPU time it raises `OutOfTime` at the first step that begins later, after ``least`` steps.
    """

    def __init__(self, *, seconds: float | None = None, least: int = 0) -> None:
        self._least = least
        self._ends = None if seconds is None else time.process_time() + seconds
        self.steps: list[MeasuredStep] = []
        self._before: list[torch.Tensor] = []

    def before(self, step: PastStep, entry: Entry) -> None:
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
                parameters = _given_to(entry)
                pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
                measured.norm = norm_of(gradient for _, gradient in pairs)
                measured.zeros = {id(p): None for p in parameters if p.grad is None and p.requires_grad}
                measured.zeros.update((id(parameter), share_of_zeros(gradient)) for parameter, gradient in pairs)
            if entry.kind is kinds.OPTIMIZER:
                measured.optimizer = id(entry.target)
                self._before = [parameter.detach().clone() for parameter in parameters_of(entry.target)]

    def after(self, entry: Entry) -> None:
        """Measure the update of an optimizer."""
        if entry.kind is kinds.OPTIMIZER:
            with torch.no_grad():
                now = [parameter.detach() for parameter in parameters_of(entry.target)]
                self.steps[-1].update = update_of(self._before, now)
            self._before = []


def _given_to(entry: Entry) -> list[torch.Tensor]:
    if entry.kind is kinds.OPTIMIZER:
        return list(parameters_of(entry.target))
    given = entry.args[0] if entry.args else entry.kwargs.get("parameters", ())
    return [given] if isinstance(given, torch.Tensor) else [p for p in given if isinstance(p, torch.Tensor)]
