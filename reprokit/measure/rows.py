"""A row: one tensor of one module call in one pass, in numbers; and rows as a table, JSON lines and CSV.

A frame is the rows of one call and pass. Rows are plain data: those of a running script and those of a snapshot are
printed by the same code.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reprokit.locate.ranges import Range

if TYPE_CHECKING:
    from rich.console import Group

Pass = Literal["forward", "backward"]
Role = Literal["input", "weight", "output", "grad_input", "grad_output", "grad_weight"]
FIELDS = (
    *("step", "module", "class", "call", "pass", "tensor", "abs_min", "abs_max", "mean", "std", "zeros", "nonfinite"),
    *("dtype", "headroom", "name", "shape", "norm"),
)
HISTOGRAM_FIELDS = ("kurtosis", "histogram")  # behind the others, if the rows were measured with histograms
HEADINGS = ("tensor", "|min|", "|max|", "mean", "std", "norm", "zeros", "dtype", "headroom")
_NORM = HEADINGS.index("norm")  # which is left out where the terminal is narrow
_BARS = 40
_LEAST_NAME = 14  # columns of the terminal; longer names are folded where there is no room
NEAR_LIMIT = 1.0  # doublings of headroom: one more layer of the same gain overflows


@dataclass(frozen=True, slots=True)
class FrameRow:
    """A measured tensor. ``module`` is a path inside its root, or the class of the root in angle brackets; ``call``
    counts the calls of the module in this step from 0; ``name`` is that of the argument, parameter or item."""

    step: int
    module: str
    cls: str
    call: int
    direction: Pass
    tensor: Role
    name: str
    range: Range

    @property
    def frame(self) -> tuple[int, str, str, int, Pass]:
        """What the rows of one call in one pass have in common."""
        return self.step, self.module, self.cls, self.call, self.direction

    @property
    def is_bad(self) -> bool:
        """True if an element is NaN or infinite, except for the infinities of an input, which may be a mask."""
        return bool(self.range.num_nan or (self.range.num_inf and self.tensor != "input"))

    @property
    def is_near_limit(self) -> bool:
        """True if the largest magnitude cannot double without an overflow."""
        return self.range.headroom is not None and self.range.headroom < NEAR_LIMIT

    def plain(self) -> dict[str, Any]:
        """The values of `FIELDS`; numbers are finite or ``None``. A measured histogram is an object with the exponent
        of the lowest bin and the counts."""
        found = self.range
        numbers = (found.low, found.high, found.mean, found.std, found.zeros, found.num_nan + found.num_inf)
        values = (
            *self.frame,
            self.tensor,
            *numbers,
            found.dtype,
            found.headroom,
            self.name,
            list(found.shape),
            found.norm,
        )
        plain: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
        if (bins := found.histogram) is not None:
            plain |= {"kurtosis": bins.kurtosis, "histogram": {"lowest": bins.lowest, "counts": list(bins.counts)}}
        return plain

    def cells(self) -> tuple[str, ...]:
        """The texts under `HEADINGS`."""
        found = self.range
        numbers = (_number(number) for number in (found.low, found.high, found.mean, found.std, found.norm))
        counts = ((found.num_nan, "nan"), (found.num_inf, "inf"))
        bad = ", ".join(f"{count:,} {name}" for count, name in counts if count)
        zeros = "" if found.zeros is None else f"{found.zeros:.0%}" if found.zeros in (0, 1) else f"{found.zeros:.2%}"
        room = "" if found.headroom is None else f"2^{found.headroom:.1f}"
        label = f"{self.tensor} {self.name}".rstrip()
        return (label, *numbers, zeros, found.dtype, bad or room)

    def bars(self) -> str:
        """The histogram in one line: ``2^-9 ▁▃▅█ 2^-5, kurtosis 0.13``; empty without one."""
        bins = self.range.histogram
        if bins is None or not bins.counts:
            return ""
        return bins.bars(_BARS) + (f", kurtosis {bins.kurtosis:.3g}" if bins.kurtosis is not None else "")


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def frames(rows: Iterable[FrameRow]) -> Iterator[tuple[str, list[FrameRow]]]:
    """Neighbouring rows of one call and pass, with a title: ``step 3  forward  h.0.mlp (MLP), call 2``."""
    for (step, module, cls, call, direction), found in itertools.groupby(rows, lambda row: row.frame):
        place = module if module == f"<{cls}>" else f"{module} ({cls})"
        yield f"step {step}  {direction}  {place}{f', call {call}' if call else ''}", list(found)


def table(rows: Sequence[FrameRow], room: int) -> Group:
    """Frames for a terminal of ``room`` columns; bad rows are red and marked with ``!``, those near their limit yellow
    with ``~``. A histogram is a line below its row."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(HEADINGS, *(row.cells() for row in rows), strict=True)]
    is_narrow = _LEAST_NAME + sum(widths[1:]) + len(widths) + 1 > room
    shown = [place for place in range(len(HEADINGS)) if place != _NORM or not is_narrow]
    widths[0] = max(_LEAST_NAME, min(widths[0], room - sum(widths[place] for place in shown[1:]) - len(shown) - 1))

    def grid(found: Sequence[FrameRow], heading: Sequence[str] = ()) -> Table:
        made = Table.grid(padding=(0, 1))
        made.add_column(min_width=1)
        for place in shown:
            name = HEADINGS[place]
            justify: Any = "left" if name in ("tensor", "dtype") else "right"
            made.add_column(width=widths[place], justify=justify, no_wrap=name != "tensor", overflow="fold")
        if heading:
            made.add_row("", *(heading[place] for place in shown), style="dim")
        for row in found:
            style = "red" if row.is_bad else "yellow" if row.is_near_limit else ""
            mark = "!" if row.is_bad else "~" if row.is_near_limit else ""
            cells = row.cells()
            made.add_row(Text(mark), *(Text(cells[place]) for place in shown), style=style)
        return made

    parts: list[Text | Table] = [grid((), HEADINGS)]
    for title, found in frames(rows):
        parts.append(Text(f"\n{title}", style="bold"))
        for has_bars, part in itertools.groupby(found, lambda row: row.range.histogram is not None):
            for rows_of_grid in ([row] for row in part) if has_bars else [list(part)]:
                parts.append(grid(rows_of_grid))
                parts += [Text(f"    {row.bars()}", style="dim") for row in rows_of_grid if row.bars()]
    return Group(*parts)


def json_lines(rows: Iterable[FrameRow]) -> str:
    """One JSON object a line."""
    return "".join(f"{json.dumps(row.plain(), allow_nan=False)}\n" for row in rows)


def csv_lines(rows: Iterable[FrameRow], *, has_header: bool, histograms: bool = False) -> str:
    """One row a line, under the names of `FIELDS`; a shape is ``8x16``, a histogram ``-9:1 5 20``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS + (HISTOGRAM_FIELDS if histograms else ()), lineterminator="\n")
    if has_header:
        writer.writeheader()
    for row in rows:
        cells = {**row.plain(), "shape": "x".join(map(str, row.range.shape))}
        if (bins := row.range.histogram) is not None:
            cells["histogram"] = f"{bins.lowest}:{' '.join(map(str, bins.counts))}" if bins.counts else ""
        writer.writerow(cells)
    return text.getvalue()
