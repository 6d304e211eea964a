"""Small drawings for the report, as SVG without scripts: the loss over the steps that led to the failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, MARGIN = 640.0, 140.0, 8.0


@dataclass(frozen=True, slots=True)
class LossChart:
    """Positions for a line of finite losses, the axis labels, and the failing step's place."""

    points: tuple[tuple[float, float], ...]
    failure_x: float
    low: float
    high: float
    first_step: int
    last_step: int
    is_logarithmic: bool

    @property
    def polyline(self) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


def loss_chart(timeline: Sequence[Mapping[str, Any]], failing_step: int) -> LossChart | None:
    """The chart, or ``None`` when fewer than two finite losses are known."""
    finite = [(int(entry["step"]), float(entry["loss"])) for entry in timeline if _is_finite(entry.get("loss"))]
    if len(finite) < 2:
        return None
    losses = [loss for _, loss in finite]
    low, high = min(losses), max(losses)
    is_logarithmic = low > 0 and high / low > 100
    first, last = min(step for step, _ in finite), max(failing_step, max(step for step, _ in finite))

    def x_of(step: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(1, last - first)

    def y_of(loss: float) -> float:
        bottom, top, here = (math.log(v) for v in (low, high, loss)) if is_logarithmic else (low, high, loss)
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * ((here - bottom) / (top - bottom) if top > bottom else 0.5)

    points = tuple((x_of(step), y_of(loss)) for step, loss in finite)
    return LossChart(points, x_of(failing_step), low, high, first, last, is_logarithmic)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
