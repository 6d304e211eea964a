"""Numbers of a run as drawings: lines over steps, maps of parameters by step, and a page of both without a failure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from reprokit.render.templates import render_template
from reprokit.series.story import PARAMETER_NUMBERS, LayerSeries
from reprokit.words import number_words

_LOG_RATIO = 100.0  # from which on a scale is logarithmic
_HUGE = 1e300  # a larger number is drawn here, because its distance to other numbers may overflow
_HEIGHT = 150  # of the drawing in the template
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 348, 12, 128  # the drawing area inside the labels
_HEAT_LEVELS = 8  # classes `heat-1` to `heat-8` of the style sheet; `heat-0` is zero
_MOST_GROUPS = 600  # of points of a line, which is drawn in 288 places
_MOST_COLUMNS = 75


class Scale(NamedTuple):
    """The two ends of an axis."""

    low: float
    high: float
    is_logarithmic: bool

    def fraction(self, value: float) -> float:
        """0 at the low end, 1 at the high end, one half where they are equal."""
        ends = (self.low, self.high, value)
        low, high, here = map(math.log10, ends) if self.is_logarithmic else ends
        return (here - low) / (high - low) if high > low else 0.5


class Chart(NamedTuple):
    """Numbers over steps as a line."""

    title: str
    last: str
    line: str
    ticks: Sequence[tuple[float, float, str, str]]  # texts with their place and anchor
    mark: float | None  # the step that failed, on the horizontal axis
    crosses: list[float]  # what is not finite, on the horizontal axis


def chart(title: str, points: Sequence[tuple[float, float | None]], mark: float | None = None) -> Chart | None:
    """The chart of numbers by step, of which ``None`` is a gap; ``None`` when there are not two finite numbers."""
    known = [(x, y) for x, y in points if y is not None]
    finite = [(x, max(-_HUGE, min(y, _HUGE))) for x, y in known if math.isfinite(y)]
    if len(finite) < 2:
        return None
    steps, values = [*(x for x, _ in known), *([mark] if mark is not None else [])], [y for _, y in finite]
    low, high = min(values), max(values)
    across, up = Scale(min(steps), max(steps), False), Scale(low, high, low > 0 and high / low > _LOG_RATIO)

    def x_of(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * across.fraction(step)

    def y_of(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * up.fraction(value)

    ticks = [(_LEFT - 6.0, y_of(y) + 3.5, "end", number_words(y, 4)) for y in dict.fromkeys((low, high))]
    ends = dict.fromkeys((across.low, across.high))
    ticks += [(x_of(step), _HEIGHT - 6.0, "middle", f"{step:,.0f}") for step in ends]
    line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in _thinned(finite))
    crosses = list(dict.fromkeys(round(x_of(x), 1) for x, y in known if not math.isfinite(y)))
    place = x_of(mark) if mark is not None else None
    return Chart(title, f"last {number_words(known[-1][1], 4)}", line, ticks, place, crosses)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many points as can be seen: of each group of neighbours the lowest and the highest."""
    size = math.ceil(len(points) / _MOST_GROUPS)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    height = itemgetter(1)
    return [point for group in groups for point in sorted({min(group, key=height), max(group, key=height)})]


class HeatCell(NamedTuple):
    """A number of a layer in a step: its class in the style sheet, and its text."""

    cls: str
    hint: str


def heat_map(rows: Sequence[LayerSeries], steps: Sequence[int]) -> Iterator[tuple[str, list[HeatCell]]]:
    """The layers with a cell for every step: the darker the larger on a logarithmic scale, red if not finite."""
    finite = [abs(v) for row in rows for v in row.values if v and math.isfinite(v)]
    scale = Scale(min(finite), max(finite), is_logarithmic=True) if finite else None

    def cell(step: int, value: float | None) -> HeatCell:
        if value is None:
            return HeatCell("", "")
        level = 0
        if scale is not None and math.isfinite(value) and value:
            level = 1 + min(int(scale.fraction(abs(value)) * _HEAT_LEVELS), _HEAT_LEVELS - 1)
        return HeatCell(f"heat-{level}" if math.isfinite(value) else "heat-bad", f"step {step}: {value:.4g}")

    for row in rows:
        yield row.module, [cell(*pair) for pair in zip(steps, row.values, strict=True)]


_TITLES = {"lr": "Learning rate", "grad_norm": "Gradient norm", "weight_norm": "Weight norm", "zeros": "Share of zeros",
           "update": "Update over weight", "clipped_to": "Gradient norm after clipping"}  # fmt: skip


def run_page(title: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """A page of the numbers of a run, as `reprokit.series.story.flat` names them: a chart for each, and for numbers of
    every parameter a map with a column for each of at most `_MOST_COLUMNS` steps, evenly spread."""
    names = dict.fromkeys(name for row in steps for name, value in row.items() if isinstance(value, (int, float)))
    own = [name for name in names if "/" not in name and name != "step"]
    plots = [chart(_title(name), [(row["step"], row.get(name)) for row in steps]) for name in own]
    maps = []
    for kind in PARAMETER_NUMBERS:
        known = [name for name in names if name.startswith(f"{kind}/")]
        shown = [row for row in steps if any(name in row for name in known)]
        shown = shown[len(shown) - 1 :: -math.ceil(len(shown) / _MOST_COLUMNS)][::-1] if shown else []
        series = (LayerSeries(name.partition("/")[2], tuple(row.get(name) for row in shown)) for name in known)
        if known:
            maps.append((_title(kind), list(heat_map(list(series), [row["step"] for row in shown]))))
    return render_template("timeline.html.j2", title=title, plots=[*filter(None, plots)], maps=maps, steps=steps)


def _title(name: str) -> str:
    kind, dot, optimizer = name.partition(".")
    title = _TITLES.get(kind, kind[:1].upper() + kind[1:]) if kind in _TITLES or not dot else ""
    return f"{title} ({optimizer})" if title and dot else title or name
