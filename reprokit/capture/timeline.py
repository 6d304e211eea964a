"""The last steps in numbers: loss, learning rate, gradient norm where the loop computed one, scale, seconds.

Losses, norms and scales are kept as the tensors they are and turned into numbers only when somebody asks.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import torch

TIMELINE_STEPS = 100


class Timeline:
    """Notes of the last `TIMELINE_STEPS` steps. ``loss`` and ``grad_norm`` are those of the step that is running."""

    def __init__(self) -> None:
        self.loss: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | None = None
        self._steps: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=TIMELINE_STEPS)
        self._started = time.perf_counter()

    def end_step(self, number: int, rate: Any, scale: torch.Tensor | None, now: float) -> None:
        """A step is over."""
        self._steps.append((number, self.loss, rate, self.grad_norm, scale, now - self._started))
        self._started = now
        self.loss = self.grad_norm = None

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._started += seconds

    def before(self, number: int) -> list[dict[str, Any]]:
        """The steps before step ``number``."""
        return [_describe(*step) for step in self._steps if step[0] < number]

    def at(self, number: int) -> dict[str, Any] | None:
        """Step ``number``, if it is over and still remembered."""
        return next((_describe(*step) for step in self._steps if step[0] == number), None)

    def now(self, number: int, loss: float | None) -> dict[str, Any]:
        """The step that is running."""
        return {**_describe(number, self.loss, None, self.grad_norm, None, 0.0), "loss": loss, "seconds": None}


def number_of(value: Any) -> float | None:
    """A tensor of one element or a number as a float; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def _describe(step: int, loss: Any, rate: Any, norm: Any, scale: Any, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": number_of(loss),
        "lr": number_of(rate),
        "grad_norm": number_of(norm),
        "scale": number_of(scale),
        "seconds": round(seconds, 6),
    }
