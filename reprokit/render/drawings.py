"""Drawings of the report, as SVG whose colours and fonts are classes of its style sheet.

`plot` draws numbers over steps or checks, `strip` the range of a tensor on a logarithmic axis that strips share,
`position_map` the places where a tensor is not finite, `heat_map` a number of every layer in every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reprokit.locate.ranges import FormatLimits, Range, limits_of, range_text
from reprokit.render.survey import Positions
from reprokit.story import LayerSeries

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


def tick_text(value: float, digits: int = 4) -> str:
    """A number as an axis shows it: ``0.25``, ``1,000``, ``10⁻⁷``, ``3×10⁵``, with so many digits before a power."""
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    short = f"{float(mantissa):g}"
    return power if short == "1" else f"-{power}" if short == "-1" else f"{short}×{power}"


def power_text(exponent: int) -> str:
    """A power of ten, which may be one that no float holds."""
    return tick_text(10.0**exponent) if -4 <= exponent < 5 else f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """At most ``count`` round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next((nice * scale for nice in _NICE if nice * scale >= rough), 10 * scale)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def decade_ticks(low: float, high: float, count: int) -> list[int]:
    """At most ``count`` powers of ten between two exponents, evenly spaced, as exponents."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    start = math.ceil(first / stride) * stride
    return list(range(start, last + 1, stride))


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
    """The place of a number between the ends of an axis, as a fraction."""

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


_REACH = 10.0  # decades within which a format's limit is worth drawing
_NARROW = 20.0  # decades that a format has at most whose limits are always drawn
_MAX_LABELS = 6
STRIP_HEIGHT = 22
_HEADER_LINE = 15
_ZERO_AT = 1.5  # per cent from the left
_PLOT_LEFT, _PLOT_RIGHT = 5.0, 84.0
_BAD_AT = 86.0
_CHARACTER = 2.0  # per cent that a character of a label takes where strips are narrow
_APART = 60.0  # per cent between two limits whose labels fit into one line


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis shared by strips, in exponents of ten, with the formats' limits that lie on it."""

    low: float
    high: float
    limits: tuple[tuple[float, str], ...]
    beyond: tuple[FormatLimits, ...]

    @classmethod
    def over(cls, ranges: Sequence[Range]) -> LogAxis:
        """The axis for these ranges. A limit is on it if values come near, or if the format is a small one."""
        numbers = [end for found in ranges for end in (found.least, found.high) if end]
        low, high = _exponents(numbers) if numbers else (-1.0, 1.0)
        formats = [limits_of(name) for name in dict.fromkeys(found.dtype for found in ranges)]
        limits, beyond = [], []
        for limit in (found for found in formats if found is not None):
            tiny, largest = math.log10(limit.tiny), math.log10(limit.largest)
            is_narrow = largest - tiny < _NARROW
            near_top, near_bottom = is_narrow or largest - high < _REACH, is_narrow or low - tiny < _REACH
            limits += [(largest, f"{limit.dtype} up to {tick_text(limit.largest, 2)}")] if near_top else []
            limits += [(tiny, f"{limit.dtype} normal from {tick_text(limit.tiny, 2)}")] if near_bottom else []
            beyond += [limit] if not (near_top or near_bottom) else []
        ends = [low, high, *(exponent for exponent, _ in limits)]
        margin = max(0.5, 0.04 * (max(ends) - min(ends)))
        return cls(min(ends) - margin, max(ends) + margin, tuple(limits), tuple(beyond))

    def place(self, exponent: float) -> float:
        """Per cent from the left."""
        return _PLOT_LEFT + (_PLOT_RIGHT - _PLOT_LEFT) * (exponent - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[int]:
        """Exponents of ten to label."""
        return decade_ticks(self.low, self.high, _MAX_LABELS)

    @property
    def beyond_text(self) -> str:
        """A sentence on formats whose limits are too far away to be drawn."""
        said = [
            f"{limit.dtype} from {tick_text(limit.tiny, 1)} to {tick_text(limit.largest, 1)}" for limit in self.beyond
        ]
        return f"Far outside of this axis: the limits of {', '.join(said)}." if said else ""


def strip(found: Range | None, axis: LogAxis) -> Markup:
    """One range on the axis: a bar over its magnitudes, a ring for zeros, and words for what is not finite."""
    marks = [_upright(axis.place(tick), "grid") for tick in axis.ticks]
    marks += [_upright(axis.place(exponent), "limit", text) for exponent, text in axis.limits]
    if found is not None:
        marks += _bar(found, axis)
    body = "".join(marks)
    return Markup(
        f'<svg class="strip" width="100%" height="{STRIP_HEIGHT}" role="img" '
        f'aria-label="{escape(range_text(found))}">{body}</svg>'
    )


def strip_header(axis: LogAxis) -> Markup:
    """The labels above strips: powers of ten, then a line for every format's limits."""
    powers = [(axis.place(tick), power_text(tick), "tick", "middle") for tick in axis.ticks]
    lines = [_legible([(_ZERO_AT, "0", "tick", "middle"), *powers])]
    for exponent, text in axis.limits:
        place = axis.place(exponent)
        lines.append([(place, text, "limit-text", "end" if place > 45 else "start")])
    texts = [
        f'<text class="{cls}" x="{place:.2f}%" y="{_HEADER_LINE * number - 3}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
        for number, line in enumerate(_packed(lines), 1)
        for place, text, cls, anchor in line
    ]
    height = _HEADER_LINE * len(_packed(lines))
    return Markup(f'<svg class="strip" width="100%" height="{height}" aria-hidden="true">{"".join(texts)}</svg>')


_Label = tuple[float, str, str, str]


def _legible(labels: list[_Label]) -> list[_Label]:
    """Labels around their places, without those that would touch the one before."""
    kept = labels[:1]
    for label in labels[1:]:
        place, text = kept[-1][:2]
        if label[0] - place >= _CHARACTER * (len(text) + len(label[1]) + 1) / 2:
            kept.append(label)
    return kept


def _packed(lines: list[list[_Label]]) -> list[list[_Label]]:
    """A maximum, which ends at its limit, and a minimum, which begins there, share a line if they are apart."""
    packed = [lines[0]]
    for line in lines[1:]:
        label, last = line[0], packed[-1]
        is_pair = len(packed) > 1 and len(last) == 1 and last[0][3] == "end" and label[3] == "start"
        if is_pair and last[0][0] - label[0] > _APART:
            last.append(label)
        else:
            packed.append(list(line))
    return packed


def _bar(found: Range, axis: LogAxis) -> list[str]:
    middle = STRIP_HEIGHT / 2
    marks = []
    if found.low == 0:
        marks.append(f'<circle class="zero" cx="{_ZERO_AT}%" cy="{middle:g}" r="3.5"/>')
    if found.least is not None and found.high:
        start, end = axis.place(math.log10(found.least)), axis.place(math.log10(found.high))
        marks.append(f'<line class="bar" x1="{start:.2f}%" x2="{end:.2f}%" y1="{middle:g}" y2="{middle:g}"/>')
    words = [word for word, count in (("inf", found.num_inf), ("nan", found.num_nan)) if count]
    if words:
        marks.append(f'<text class="bad-text" x="{_BAD_AT}%" y="{middle + 4:g}">{" ".join(words)}</text>')
    return marks


def _upright(place: float, cls: str, title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{cls}" x1="{place:.2f}%" x2="{place:.2f}%" y1="0" y2="{STRIP_HEIGHT}">{hint}</line>'


def _exponents(numbers: Iterable[float]) -> tuple[float, float]:
    exponents = [math.log10(number) for number in numbers]
    return min(exponents), max(exponents)


_CELL_CLASSES = {"nan": "cell-nan", "+inf": "cell-plus", "-inf": "cell-minus"}
_MAP_WIDTH, _MAX_CELL, _MIN_CELL = 640, 16, 6


def position_map(found: Positions) -> Markup:
    """A square for every cell, coloured where it is bad; neighbours in a row are drawn as one."""
    rows, columns = len(found.cells), len(found.cells[0])
    size = max(_MIN_CELL, min(_MAX_CELL, _MAP_WIDTH // columns))
    width, height = columns * size, rows * size
    marks = [f'<rect class="cell" width="{width}" height="{height}"/>']
    for row, cells in enumerate(found.cells):
        for start, length, way in _runs(cells):
            marks.append(
                f'<rect class="{_CELL_CLASSES[way]}" x="{start * size}" y="{row * size}" '
                f'width="{length * size}" height="{size}"/>'
            )
    lines = "".join(f"M{column * size} 0V{height}" for column in range(1, columns))
    lines += "".join(f"M0 {row * size}H{width}" for row in range(1, rows))
    marks.append(f'<path class="cell-lines" d="{lines}"/>' if lines else "")
    label = f"positions of elements that are not finite. {found.pattern}"
    return Markup(
        f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _runs(cells: Sequence[str]) -> list[tuple[int, int, str]]:
    """Runs of bad cells of one kind: first column, length, kind."""
    runs: list[tuple[int, int, str]] = []
    for column, way in enumerate(cells):
        if not way:
            continue
        if runs and runs[-1][2] == way and runs[-1][0] + runs[-1][1] == column:
            start, length, _ = runs.pop()
            runs.append((start, length + 1, way))
        else:
            runs.append((column, 1, way))
    return runs


_HEAT_LEVELS = 9  # classes `heat-0` to `heat-8` of the style sheet
_HEAT_WIDTH, _HEAT_ROW, _HEAT_LABEL = 640, 16, 190
_LABEL_LENGTH = 28  # characters that fit beside a row


def heat_map(rows: Sequence[LayerSeries], steps: Sequence[int], label: str) -> Markup:
    """A row for every layer, a cell for every step: the darker the larger on a logarithmic scale, red if not finite."""
    finite = [abs(v) for row in rows for v in row.values if v and math.isfinite(v)]
    scale = Scale(min(finite), max(finite), is_logarithmic=True) if finite else None
    marks = [mark for number, row in enumerate(rows) for mark in _heat_row(row, steps, number * _HEAT_ROW, scale)]
    foot = len(rows) * _HEAT_ROW + 12
    for x, anchor, step in ((_HEAT_LABEL, "start", steps[0]), (_HEAT_WIDTH, "end", steps[-1])):
        marks.append(f'<text class="tick" x="{x}" y="{foot}" text-anchor="{anchor}">{step:,}</text>')
    return Markup(
        f'<svg class="heat" viewBox="0 0 {_HEAT_WIDTH} {foot + 4}" width="{_HEAT_WIDTH}" role="img" '
        f'aria-label="{escape(label)} of {len(rows)} layers in steps {steps[0]} to {steps[-1]}">{"".join(marks)}</svg>'
    )


def _heat_row(row: LayerSeries, steps: Sequence[int], top: int, scale: Scale | None) -> Iterator[str]:
    """The name of a layer and its cells, ``top`` units from the upper edge."""
    name, width = escape(row.module), (_HEAT_WIDTH - _HEAT_LABEL) / len(steps)
    short = name if len(row.module) <= _LABEL_LENGTH else escape(f"…{row.module[1 - _LABEL_LENGTH :]}")
    place = f'x="{_HEAT_LABEL - 6}" y="{top + 12}" text-anchor="end"'
    yield f'<text class="tick" {place}>{short}<title>{name}</title></text>'
    for number, (step, value) in enumerate(zip(steps, row.values, strict=True)):
        if value is not None:
            place = f'x="{_HEAT_LABEL + number * width:.1f}" y="{top}" width="{width:.1f}" height="{_HEAT_ROW - 1}"'
            hint = f"<title>{name}, step {step}: {value:.4g}</title>"
            yield f'<rect class="{_heat_class(value, scale)}" {place}>{hint}</rect>'


def _heat_class(value: float, scale: Scale | None) -> str:
    if not math.isfinite(value):
        return "heat-bad"
    if not value or scale is None:
        return "heat-0"
    return f"heat-{1 + min(int(scale.fraction(abs(value)) * (_HEAT_LEVELS - 1)), _HEAT_LEVELS - 2)}"
