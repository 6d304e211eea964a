"""Drawings of the report: numbers over steps as one line, and a number of every layer in every step as table cells.

Colours and fonts are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from reprokit.story import LayerSeries
from reprokit.words import number_words

_LOG_RATIO = 100.0  # from which on a scale is logarithmic
_HUGE = 1e300  # a larger number is drawn here, because its distance to other numbers may overflow
_WIDTH, _HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 348, 12, 128  # the drawing area inside the labels
_HEAT_LEVELS = 8  # classes `heat-1` to `heat-8` of the style sheet; `heat-0` is zero

Point = tuple[float, float | None]


class Scale(NamedTuple):
    """The two ends of an axis."""

    low: float
    high: float
    is_logarithmic: bool

    @classmethod
    def over(cls, numbers: Sequence[float]) -> Scale:
        """A scale for these, logarithmic where they are positive and span two decades."""
        low, high = min(numbers), max(numbers)
        return cls(low, high, low > 0 and high / low > _LOG_RATIO)

    def fraction(self, value: float) -> float:
        """0 at the low end, 1 at the high end, one half where they are equal."""
        ends = (self.low, self.high, value)
        low, high, here = map(math.log10, ends) if self.is_logarithmic else ends
        return (here - low) / (high - low) if high > low else 0.5


def plot(points: Sequence[Point], label: str, *, mark: float) -> Markup | None:
    """Numbers over steps as a line; ``mark`` is the step that failed.

    A step with a NaN or an infinity is a cross at the upper edge, one with ``None`` a gap. ``None`` when there are not
    two finite numbers.
    """
    finite = [(x, max(-_HUGE, min(y, _HUGE))) for x, y in points if y is not None and math.isfinite(y)]
    if len(finite) < 2:
        return None
    steps = [mark, *(x for x, y in points if y is not None)]
    across, up = Scale(min(steps), max(steps), False), Scale.over([y for _, y in finite])

    def x_of(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * across.fraction(step)

    def y_of(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * up.fraction(value)

    marks = [
        _text(_LEFT - 6, y_of(value) + 3.5, "end", number_words(value, 4)) for value in dict.fromkeys((up.low, up.high))
    ]
    marks += [
        _text(x_of(step), _HEIGHT - 6, "middle", f"{step:,.0f}") for step in dict.fromkeys((across.low, across.high))
    ]
    marks.append(f'<line class="failing" x1="{x_of(mark):.1f}" x2="{x_of(mark):.1f}" y1="4" y2="{_BOTTOM}"/>')
    line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in finite)
    marks.append(f'<polyline class="line" points="{line}"/>')
    marks += [_text(x_of(x), _TOP, "middle", "×", "cross") for x, y in points if y is not None and not math.isfinite(y)]
    return Markup(
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str, cls: str = "tick") -> str:
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


class HeatCell(NamedTuple):
    """A number of a layer in a step: its class in the style sheet, and its text."""

    cls: str
    hint: str


def heat_map(rows: Sequence[LayerSeries], steps: Sequence[int]) -> Iterator[tuple[str, list[HeatCell]]]:
    """The layers with a cell for every step: the darker the larger on a logarithmic scale, red if not finite."""
    finite = [abs(v) for row in rows for v in row.values if v and math.isfinite(v)]
    scale = Scale(min(finite), max(finite), is_logarithmic=True) if finite else None
    for row in rows:
        named = zip(steps, row.values, strict=True)
        yield row.module, [HeatCell(_heat_class(v, scale), "" if v is None else f"step {s}: {v:.4g}") for s, v in named]


def _heat_class(value: float | None, scale: Scale | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "heat-bad"
    if not value or scale is None:
        return "heat-0"
    return f"heat-{1 + min(int(scale.fraction(abs(value)) * _HEAT_LEVELS), _HEAT_LEVELS - 1)}"
