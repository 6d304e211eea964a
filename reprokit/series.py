"""The steps of a training in numbers: one series for each optimizer where several take turns, else a single one.

A step has the name of its optimizer only if there are several; the last one is the step that failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reprokit.grammar import Count, Name, left_out


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A training step: what the loop computed in it, and how long it took. ``None``: unknown."""

    step: Count
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    scale: float | None = None
    seconds: float | None = None
    optimizer: Name | None = left_out()
    noted: dict[Name, float] | None = left_out()  # by `session.note`


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Parameters by name after a step: norms of weights and gradients (L2), and the share of zeros in gradients."""

    step: Count
    weight_norm: dict[Name, float]
    grad_norm: dict[Name, float]
    zeros: dict[Name, float]

    @property
    def total(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.grad_norm.values())


def flat(numbers: StepNumbers, row: RecordedStep | None) -> dict[str, float]:
    """The known numbers of a step in one dict: ``loss``, ``lr``, those the loop noted, ``grad_norm/h.0.weight``.

    A noted number does not replace one that was measured, such as the loss of this step by a trainer's average.
    """
    own = ("step", "loss", "lr", "grad_norm", "scale", "seconds")
    found = {name: value for name in own if (value := getattr(numbers, name)) is not None}
    found = {**found, **(numbers.noted or {}), **found}
    for kind in ("grad_norm", "weight_norm", "zeros") if row is not None else ():
        found |= {f"{kind}/{name}": value for name, value in getattr(row, kind).items()}
    return found


def by_optimizer(timeline: Sequence[StepNumbers]) -> dict[str, list[StepNumbers]]:
    """The steps of every optimizer by its name, which is empty for a single series."""
    found: dict[str, list[StepNumbers]] = {}
    for row in timeline:
        found.setdefault(row.optimizer or "", []).append(row)
    return found


def failing_series(timeline: Sequence[StepNumbers]) -> list[StepNumbers]:
    """The steps that may be compared with the one that failed, this one included."""
    return by_optimizer(timeline)[timeline[-1].optimizer or ""] if timeline else []


def has_several_optimizers(timeline: Sequence[StepNumbers]) -> bool:
    """True if optimizers take turns."""
    return any(row.optimizer is not None for row in timeline)


def titled(title: str, optimizer: str) -> str:
    """What a series is called: ``loss (od)``."""
    return f"{title} ({optimizer})" if optimizer else title
