"""The range of a tensor: magnitudes, mean, standard deviation, and how many elements are zero, NaN or infinite.

Reports, `reprokit trace` and events show tensors by their ranges; a trace may add a histogram of the magnitudes.
`measure` only reads its argument.

A row is one tensor of one module call in one pass, in numbers. A frame is the rows of one call and pass. Rows are plain
data: those of a running script and those of a snapshot are printed by the same code.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from reprokit import native
from reprokit.locate.choice import Role
from reprokit.locate.ways import local_part
from reprokit.program.dataflow import contents
from reprokit.words import json_line

if TYPE_CHECKING:
    from rich.console import Group

_PLAIN = (1e-12, 1e12)  # magnitudes whose squares, summed over 2**40 elements, are normal float32 numbers


_BARS = "▁▂▃▄▅▆▇█"
_LEAST_FOR_TAILS = 8  # elements; fewer have no tails


@dataclass(frozen=True, slots=True)
class Histogram:
    """The magnitudes of the finite elements that are not zero, in bins of a power of two."""

    lowest: int
    counts: tuple[int, ...]  # ``counts[i]`` have a magnitude from 2**(lowest + i) up to the next power
    kurtosis: float | None  # excess: 0 for a normal distribution, far above for heavy tails; not of less than 8

    def bars(self, room: int) -> str:
        """``2^-9 ▁▃▅█ 2^-5`` in at most ``room`` bars; their height is the logarithm of the count."""
        if not self.counts:
            return ""
        each = math.ceil(len(self.counts) / room)
        sums = [sum(self.counts[place : place + each]) for place in range(0, len(self.counts), each)]
        unit = (len(_BARS) - 1) / math.log2(max(*sums, 2))
        drawn = "".join(_BARS[round(unit * math.log2(count))] if count else " " for count in sums)
        return f"2^{self.lowest} {drawn} 2^{self.lowest + each * len(sums)}"


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor in short. Numbers without a comment of their own are of the finite elements, those of complex numbers of
    their magnitudes; ``None`` without any. A tensor that is spread over processes has the shape of the whole and the
    numbers of the local part.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None  # the smallest magnitude
    high: float | None  # the largest
    num_nan: int
    num_inf: int  # of either sign
    least: float | None = None  # the smallest magnitude that is not zero
    num_true: int | None = None  # of booleans
    num_negative_inf: int = 0  # below zero
    mean: float | None = None
    std: float | None = None  # of the population
    norm: float | None = None  # L2
    zeros: float | None = None  # the share among all elements
    histogram: Histogram | None = None  # on request
    ends: tuple[float, float] | None = None  # the smallest and largest element, on request

    @property
    def is_bad(self) -> bool:
        """True if any element is not finite."""
        return bool(self.num_nan or self.num_inf)

    @property
    def is_float(self) -> bool:
        """True if the format can hold values that are not finite."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def headroom(self) -> float | None:
        """How many times the largest finite magnitude can double before it exceeds the format's largest number.

        ``None`` for formats without infinities, and for a tensor without a finite element other than zero.
        """
        if not (self.is_float and self.high):
            return None
        return math.log2(torch.finfo(getattr(torch, self.dtype)).max) - math.log2(self.high)


def measure(tensor: torch.Tensor, *, moments: bool = True, histogram: bool = False, is_signed: bool = False) -> Range:
    """The range of a tensor of any format, layout and shape; of a tensor on the meta device only these two.

    ``moments``: with mean, standard deviation and norm, which take half of the time. ``histogram``: of floating-point
    numbers with that too, which takes several times as long as all the rest. ``is_signed``: with ``ends``.
    """
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    numbers = _numbers(tensor)
    if numbers is None:
        return Range(dtype, shape, None, None, 0, 0)
    num_nan = num_inf = num_negative = 0
    magnitudes = native.abs(numbers)
    low, high = _extremes(magnitudes)
    if not (math.isfinite(low) and math.isfinite(high)):
        num_nan = int(native.item(native.count_nonzero(native.isnan(numbers))))
        is_finite = native.isfinite(numbers)
        num_inf = native.numel(numbers) - num_nan - int(native.item(native.count_nonzero(is_finite)))
        num_negative = (
            int(native.item(native.count_nonzero(native.isneginf(numbers))))
            if num_inf and not native.is_complex(numbers)
            else 0
        )
        if num_nan + num_inf == native.numel(numbers):
            return Range(dtype, shape, None, None, num_nan, num_inf, num_negative_inf=num_negative, zeros=0.0)
        numbers = numbers[is_finite]
        magnitudes = native.clamp(
            native.abs(numbers), max=torch.finfo(magnitudes.dtype).max
        )  # of complex numbers it may overflow
        low, high = _extremes(magnitudes)
    is_float = native.is_complex(numbers) or native.is_floating_point(tensor)
    num_zero = native.numel(magnitudes) - int(native.count_nonzero(magnitudes)) if low == 0 else 0
    return Range(
        dtype,
        shape,
        low,
        high,
        num_nan,
        num_inf,
        least=low if low > 0 else _least(magnitudes),
        num_true=native.numel(magnitudes) - num_zero if tensor.dtype is torch.bool else None,
        num_negative_inf=num_negative,
        **(_moments(magnitudes if native.is_complex(numbers) else numbers, high) if moments else {}),
        zeros=num_zero / (native.numel(magnitudes) + num_nan + num_inf),
        histogram=_histogram(magnitudes if native.is_complex(numbers) else numbers) if histogram and is_float else None,
        ends=_extremes(numbers) if is_signed and not native.is_complex(numbers) else None,
    )


def range_text(found: Range | None) -> str:
    """A range in a few words: ``float16 4x8, |x| 0.1 to 6.5e+04, 3 nan``, or ``bool 4x8, 3 of 32 True``.

    With ``ends`` below zero it has the elements in the place of their magnitudes: ``x -2.5 to 0.1``.
    """
    if found is None:
        return "not reached"
    words = [f"{found.dtype} {'x'.join(map(str, found.shape)) or 'scalar'}"]
    if found.num_true is not None:
        words.append(f"{found.num_true:,} of {math.prod(found.shape):,} True")
    elif found.low is not None and found.high is not None:
        is_signed = found.ends is not None and found.ends[0] < 0
        low, high = found.ends if is_signed and found.ends is not None else (found.low, found.high)
        name = "x" if is_signed else "|x|"
        words.append(f"{name} = {high:.4g}" if low == high else f"{name} {low:.4g} to {high:.4g}")
    num_positive = found.num_inf - found.num_negative_inf
    counts = ((found.num_nan, "nan"), (num_positive, "inf"), (found.num_negative_inf, "-inf"))
    words += [f"{count:,} {name}" for count, name in counts if count]
    return ", ".join(words)


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in a format whose absolute values can be compared, ``None`` where there are none."""
    plain = local_part(native.detach(tensor))
    if plain.is_meta or native.numel(plain) == 0:
        return None
    plain = contents(plain)  # the smallest integer has no positive counterpart of its own type
    return plain if native.is_floating_point(plain) or native.is_complex(plain) else native.double(plain)


def _moments(numbers: torch.Tensor, high: float) -> dict[str, float]:
    """Mean, population standard deviation and L2 norm of finite numbers up to ``high`` in magnitude."""
    if native.element_size(numbers) < torch.float32.itemsize:
        numbers = native.float(numbers)
    unit = 1.0 if _PLAIN[0] < high < _PLAIN[1] or not high else high
    scaled = numbers if unit == 1.0 else native.div(numbers, unit)
    mean = float(native.item(native.mean(scaled)))
    centred = native.sub(native.flatten(scaled), mean)
    std = math.sqrt(
        float(native.item(native.dot(centred, centred))) / native.numel(centred)
    )  # a ninth of the time of `torch.std`
    norm = max(high, math.hypot(mean, std) * math.sqrt(native.numel(centred)) * unit)
    known = {"mean": max(-high, min(high, mean * unit)), "std": min(high, std * unit)}
    return known if math.isinf(norm) else {**known, "norm": norm}


@native.own_operators()
def _histogram(numbers: torch.Tensor) -> Histogram:
    """The histogram of finite numbers."""
    numbers = numbers[numbers != 0]
    numbers = native.float(numbers) if native.element_size(numbers) < torch.float32.itemsize else numbers
    if not native.numel(numbers):
        return Histogram(0, (), None)
    exponents = native.long(native.frexp(numbers).exponent) - 1
    lowest = int(native.min(exponents))
    counts = native.tolist(native.bincount(exponents - lowest))
    centred = numbers / native.max(native.abs(numbers))
    centred -= native.mean(centred)
    squares = native.square_(centred)
    variance = float(native.mean(squares))
    has_tails = native.numel(numbers) >= _LEAST_FOR_TAILS and variance > 0
    kurtosis = float(native.mean(native.square_(squares / variance))) - 3.0 if has_tails else None
    return Histogram(lowest, tuple(counts), kurtosis)


def _extremes(magnitudes: torch.Tensor) -> tuple[float, float]:
    low, high = native.aminmax(magnitudes)
    return float(native.item(low)), float(native.item(high))


@native.own_operators()
def _least(magnitudes: torch.Tensor) -> float | None:
    least = float(native.min(native.where(magnitudes > 0, magnitudes, math.inf)))
    return least if math.isfinite(least) else None


Pass = Literal["forward", "backward"]
FIELDS = (
    *("step", "module", "class", "call", "pass", "tensor", "abs_min", "abs_max", "mean", "std", "zeros", "nonfinite"),
    *("dtype", "headroom", "name", "shape", "norm", "min", "max", "site"),
)
HISTOGRAM_FIELDS = ("kurtosis", "histogram")  # behind the others, if the rows were measured with histograms
HEADINGS = ("tensor", "|min|", "|max|", "mean", "std", "norm", "zeros", "dtype", "headroom")
LINE_HEADINGS = ("module", "tensor", "shape", "min", "max", *HEADINGS[1:])
_MARKS = 40
_LEAST_NAME = 14  # columns of the terminal; longer names are cut where there is no room
NEAR_LIMIT = 1.0  # doublings of headroom: one more layer of the same gain overflows


@dataclass(frozen=True, slots=True)
class FrameRow:
    """A measured tensor."""

    step: int
    module: str  # a path inside its root, or the class of the root in angle brackets
    cls: str
    call: int  # of the module in this step, from 0
    direction: Pass
    tensor: Role
    name: str  # of the argument, parameter or item, or of a variable
    range: Range
    site: str = ""  # the line that assigns the variable

    @property
    def place(self) -> str:
        """The call: ``h.0.mlp (MLP), call 2``; empty for a variable of the loop."""
        place = self.module if self.module in ("", f"<{self.cls}>") else f"{self.module} ({self.cls})"
        return f"{place}, call {self.call}" if self.call else place

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
            *(found.ends or (None, None)),
            self.site or None,
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

    def line_cells(self) -> tuple[str, ...]:
        """The texts under `LINE_HEADINGS`."""
        (label, *numbers), ends = self.cells(), self.range.ends or (None, None)
        return (self.place, f"{label} {self.site}".rstrip(), f"{[*self.range.shape]}", *map(_number, ends), *numbers)

    def bars(self) -> str:
        """The histogram in one line: ``2^-9 ▁▃▅█ 2^-5, kurtosis 0.13``; empty without one."""
        bins = self.range.histogram
        if bins is None or not bins.counts:
            return ""
        return bins.bars(_MARKS) + (f", kurtosis {bins.kurtosis:.3g}" if bins.kurtosis is not None else "")


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def table(rows: Sequence[FrameRow], room: int, *, is_flat: bool = False) -> Group:
    """Frames for a terminal of ``room`` columns; bad rows are red and marked with ``!``, those near their limit yellow
    with ``~``. A histogram is a line below its row. ``is_flat``: a line a row, with the module, however long."""
    from rich.console import Group
    from rich.text import Text

    headings, lefts = (LINE_HEADINGS, ("module", "tensor", "dtype")) if is_flat else (HEADINGS, ("tensor", "dtype"))
    cells = [row.line_cells() if is_flat else row.cells() for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    if not is_flat:
        widths[0] = max(_LEAST_NAME, min(widths[0], room - sum(widths[1:]) - len(widths) - 1))

    def line(cells: Sequence[str], mark: str, style: str) -> Text:
        label = cells[0] if len(cells[0]) <= widths[0] else f"{cells[0][: widths[0] - 1]}…"
        aligned = (
            cell.ljust(width) if heading in lefts else cell.rjust(width)
            for heading, cell, width in zip(headings, (label, *cells[1:]), widths, strict=True)
        )
        return Text(f"{mark:1} {' '.join(aligned)}", style)

    parts, title = [line(headings, "", "dim")], ""
    for row, shown in zip(rows, cells, strict=True):
        words = f"\nstep {row.step}  {row.direction}{'' if is_flat else f'  {row.place}'}"
        parts += [Text(words, style="bold")] if words != title else []
        title = words
        mark, style = ("!", "red") if row.is_bad else ("~", "yellow") if row.is_near_limit else ("", "")
        parts.append(line(shown, mark, style))
        parts += [Text(f"    {row.bars()}", style="dim")] if row.bars() else []
    return Group(*parts)


def json_lines(rows: Iterable[FrameRow]) -> str:
    """One JSON object a line."""
    return "".join(f"{json_line(row.plain())}\n" for row in rows)


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
