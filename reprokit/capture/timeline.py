"""The last steps in numbers: loss, learning rate, gradient norm where the loop computed one, scale, seconds.

Losses, norms and scales are kept as the tensors they are and turned into numbers only when somebody asks.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch

TIMELINE_STEPS = 100
_MOST_SERIES = 4  # optimizers with a series of their own; more are parts of one, such as one for each parameter


class Timeline:
    """Notes of the last `TIMELINE_STEPS` steps. ``loss`` and ``grad_norm`` are those of the step that is running."""

    def __init__(self) -> None:
        self.loss: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | None = None
        self._steps: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=TIMELINE_STEPS)
        self._started = time.perf_counter()

    def end_step(
        self, place: int, number: int, rate: Any, scale: torch.Tensor | None, now: float, optimizer: int | None
    ) -> None:
        """A step is over: the ``place``-th that any optimizer made, in iteration ``number``."""
        seconds = now - self._started
        self._steps.append((place, number, self.loss, rate, self.grad_norm, scale, seconds, optimizer))
        self._started = now
        self.loss = self.grad_norm = None

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._started += seconds

    def until(self, place: int, number: int, loss: float | None) -> list[dict[str, Any]]:
        """The steps up to the one at ``place``, which is iteration ``number`` and may be running still."""
        steps = [_describe(*step[1:]) for step in self._steps if step[0] <= place]
        if any(step[0] == place for step in self._steps):
            return steps
        running = _describe(number, self.loss, None, self.grad_norm, None, 0.0, None)
        return [*steps, {**running, "loss": loss, "seconds": None}]


def number_of(value: Any) -> float | None:
    """A tensor of one element or a number as a float; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def with_optimizers(steps: list[dict[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The steps with the names of their optimizers where several take turns, else without.

    ``names`` are by ``id``. A step that is not over is given to the optimizer whose turn it should be.
    """
    order = [step["optimizer"] for step in steps if step["optimizer"] is not None]
    if steps and steps[-1]["optimizer"] is None and order:
        order.append(_next(order))
    num_turns = sum(one != other for one, other in itertools.pairwise(order))
    if not 1 < len(set(order)) <= min(num_turns, _MOST_SERIES):
        return [{name: value for name, value in step.items() if name != "optimizer"} for step in steps]
    known = {key: names.get(key, f"optimizer {number}") for number, key in enumerate(dict.fromkeys(order), 1)}
    return [{**step, "optimizer": known.get(step["optimizer"], known[order[-1]])} for step in steps]


def _next(order: list[int]) -> int:
    """Whose turn it is: that of the optimizer that followed when the last turns were the same for the longest time."""
    for length in range(len(order) - 1, 0, -1):
        for end in range(len(order) - 1, length - 1, -1):
            if order[end - length : end] == order[-length:]:
                return order[end]
    return order[0]


def _describe(
    step: int, loss: Any, rate: Any, norm: Any, scale: Any, seconds: float, optimizer: int | None
) -> dict[str, Any]:
    return {
        "step": step,
        "loss": number_of(loss),
        "lr": number_of(rate),
        "grad_norm": number_of(norm),
        "scale": number_of(scale),
        "seconds": round(seconds, 6),
        "optimizer": optimizer,
    }
