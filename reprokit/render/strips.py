"""Strips: ranges of tensors on a logarithmic axis that they share, as SVG.

They are laid out in per cent and stretch with the page; colours and fonts are classes of its style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reprokit.render.ranges import Limits, Range, limits_of, range_text
from reprokit.render.ticks import decade_ticks, power_text, tick_text

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
class Axis:
    """A logarithmic axis shared by strips, in exponents of ten, with the formats' limits that lie on it."""

    low: float
    high: float
    limits: tuple[tuple[float, str], ...]
    beyond: tuple[Limits, ...]

    @classmethod
    def over(cls, ranges: Sequence[Range]) -> Axis:
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
        """What to say of formats whose limits are too far away to be drawn."""
        said = [
            f"{limit.dtype} from {tick_text(limit.tiny, 1)} to {tick_text(limit.largest, 1)}" for limit in self.beyond
        ]
        return f"Far outside of this axis: the limits of {', '.join(said)}." if said else ""


def strip(found: Range | None, axis: Axis) -> Markup:
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


def strip_header(axis: Axis) -> Markup:
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


def _bar(found: Range, axis: Axis) -> list[str]:
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
