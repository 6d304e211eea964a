"""Plots: numbers over steps or checks, as SVG of a size of its own that the page scales.

Colours and fonts are classes of the page's style sheet, so that both themes and print share one drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reprokit.render.ticks import decade_ticks, linear_ticks, tick_text

_LOG_RATIO = 100.0  # from which on a plot is logarithmic


@dataclass(frozen=True, slots=True)
class _Area:
    """A drawing area with room for labels on its sides."""

    width: float = 360
    height: float = 150
    left: float = 60
    right: float = 12
    top: float = 12
    bottom: float = 22

    def x(self, fraction: float) -> float:
        return self.left + (self.width - self.left - self.right) * fraction

    def y(self, fraction: float) -> float:
        return self.height - self.bottom - (self.height - self.top - self.bottom) * fraction


_AREA = _Area()
_X_TICKS, _Y_TICKS = 5, 4
_HUGE = 1e300  # what is larger is drawn here, because its distance to other numbers may overflow
Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a number lies between the ends of an axis, as a fraction."""

    low: float
    high: float
    is_logarithmic: bool = False

    @classmethod
    def over(cls, numbers: Sequence[float]) -> Scale:
        """A scale for these, logarithmic where they span several decades; never empty."""
        low, high = min(numbers), max(numbers)
        if low > 0 and high / low > _LOG_RATIO:
            return cls(low, high, is_logarithmic=True)
        margin = 0.06 * (high - low) or abs(high) * 0.5 or 1.0
        start = 0.0 if 0 <= low <= margin else low - margin
        return cls(start, high + margin)

    def fraction(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        ends = (self.low, self.high, value)
        low, high, here = map(math.log10, ends) if self.is_logarithmic else ends
        return (here - low) / (high - low) if high > low else 0.5

    def ticks(self, count: int) -> list[float]:
        """Round numbers to label."""
        if self.is_logarithmic:
            return [10.0**exponent for exponent in decade_ticks(math.log10(self.low), math.log10(self.high), count)]
        return linear_ticks(self.low, self.high, count)


def plot(points: Sequence[Point], label: str, *, mark: float | None = None, is_stepped: bool = False) -> Markup | None:
    """Numbers over steps as a line; ``mark`` is the step that failed.

    A step with a NaN or an infinity is a cross at the upper edge, one with ``None`` a gap. ``None`` when there are not
    two finite numbers.
    """
    finite = [(x, max(-_HUGE, min(y, _HUGE))) for x, y in points if y is not None and math.isfinite(y)]
    if len(finite) < 2:
        return None
    xs = [x for x, y in points if y is not None] + ([mark] if mark is not None else [])
    across, up = Scale(min(xs), max(xs)), Scale.over([y for _, y in finite])
    marks = [_level(tick, up) for tick in up.ticks(_Y_TICKS)]
    marks += [_foot(tick, across) for tick in across.ticks(_X_TICKS) if tick == int(tick)]
    marks += [_failing(mark, across)] if mark is not None else []
    placed = [(_AREA.x(across.fraction(x)), _AREA.y(up.fraction(y))) for x, y in finite]
    marks.append(f'<path class="line" d="{_path(placed, is_stepped)}"/>')
    marks.append('<circle class="end" cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(*placed[-1]))
    marks += [_cross(_AREA.x(across.fraction(x))) for x, y in points if y is not None and not math.isfinite(y)]
    return Markup(
        f'<svg class="plot" viewBox="0 0 {_AREA.width:g} {_AREA.height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _level(value: float, scale: Scale) -> str:
    y = _AREA.y(scale.fraction(value))
    line = f'<line class="grid" x1="{_AREA.left:g}" x2="{_AREA.width - _AREA.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return (
        f'{line}<text class="tick" x="{_AREA.left - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{tick_text(value)}</text>'
    )


def _foot(value: float, scale: Scale) -> str:
    x = _AREA.x(scale.fraction(value))
    return f'<text class="tick" x="{x:.1f}" y="{_AREA.height - 6:g}" text-anchor="middle">{tick_text(value)}</text>'


def _failing(step: float, scale: Scale) -> str:
    x = _AREA.x(scale.fraction(step))
    return f'<line class="failing" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{_AREA.y(0):g}"/>'


def _cross(x: float) -> str:
    top, size = _AREA.top, 4
    return (
        f'<path class="cross" d="M{x - size:.1f} {top - size}L{x + size:.1f} {top + size}'
        f'M{x - size:.1f} {top + size}L{x + size:.1f} {top - size}"/>'
    )


def _path(places: Sequence[tuple[float, float]], is_stepped: bool) -> str:
    (x, y), *rest = places
    parts = [f"M{x:.1f} {y:.1f}"]
    for x, y in rest:
        parts.append(f"H{x:.1f}V{y:.1f}" if is_stepped else f"L{x:.1f} {y:.1f}")
    return "".join(parts)
