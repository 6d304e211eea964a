"""How two tensors differ, and whether that is rounding.

A difference is *rounding* if the formulas agree in float64, and if the second result is about as close to that as the
first: within `MARGIN` times its error, or that many units in the last place of the coarser format. Runs of different
formats may each have their own error.

    >>> gap_between(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])).words
    '1 of 2 elements differ by up to 0.5 (0.2 of the largest)'
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from reprokit import native
from reprokit.compare.difference import MARGIN, largest_gap, real_numbers
from reprokit.compare.imprints import INTEGERS, size_of
from reprokit.program.dataflow import contents, same_bits

SAME_FORMULA = 1e-9  # of the largest element: float64 leaves 1e-16 times the number of operations
SAME_DRAWN = 1e-6  # the same behind a random call, which is made in float32 there, because float64 draws other numbers
_SMALL = 1e-5  # of an `eps`: a format that is no half precision
_MOST_UNITS = 10**6  # in the last place that say more than a number does
Formats = frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Gap:
    """How two tensors differ."""

    num_bad: int
    num_elements: int
    largest: float  # absolute difference
    relative: float  # the same over the largest element
    units: int | None  # in the last place, if that is a number of the format
    why: str = ""  # it is no rounding; empty if it is
    dtype: str = ""  # the coarser of both

    @property
    def words(self) -> str:
        """``12 of 4,096 elements differ by up to 3 units in the last place (2e-7 of the largest)``."""
        if not self.num_bad:
            return self.why or "zeros of another sign"
        size = f"{self.largest:.3g}"
        if self.units is not None and self.units < _MOST_UNITS:
            size = f"{self.units:,} units in the last place"
        more = f" ({self.relative:.1g} of the largest)" if math.isfinite(self.relative) else ""
        return f"{self.num_bad:,} of {self.num_elements:,} elements differ by up to {size}{more}"


def no_gap(num_elements: int, why: str) -> Gap:
    """Two tensors of which no elements can be compared."""
    return Gap(0, num_elements, math.inf, math.inf, None, why)


def gap_between(
    first: torch.Tensor,
    second: torch.Tensor,
    exact: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    formats: tuple[Formats, Formats] = (frozenset(), frozenset()),
    same_formula: float = SAME_FORMULA,
    least: float = 0.0,
) -> Gap | None:
    """The difference of two results; ``None`` if all bits agree. ``exact`` are their values in float64, ``formats`` the
    half-precision formats that the programs compute in, ``least`` the size beside which others are rounding."""
    if same_bits(first, second):
        return None
    if first.shape != second.shape:
        return no_gap(native.numel(second), f"shapes {[*first.shape]} and {[*second.shape]}")
    one, other = real_numbers(first), real_numbers(second)
    bad = (one != other) & ~(native.isnan(one) & native.isnan(other))
    if native.is_complex(first):
        bad = native.any(bad, -1)
    num_bad = int(native.sum(bad))
    if not num_bad and first.dtype != second.dtype:
        return None  # the same numbers in another format
    largest, scale = largest_gap(one, other), max(size_of(one), size_of(other))
    relative = largest / scale if scale else math.inf
    own, others = {first.dtype, *formats[0]}, {second.dtype, *formats[1]}
    eps, name = _coarsest(own | others)
    found = Gap(num_bad, native.numel(first), largest, relative, _units(first, second), "", name)
    noise = eps * max(scale, least)
    wide, wide_other = exact
    if wide is not None and wide_other is not None and wide.shape == wide_other.shape == first.shape:
        exact_one, exact_other = real_numbers(wide), real_numbers(wide_other)
        formula, size = largest_gap(exact_one, exact_other), max(size_of(exact_one), least)
        if formula > same_formula * size:
            return replace(found, why=f"in float64 they differ by {formula / size if size else math.inf:.1g} as well")
        if eps < _SMALL:
            # The error of a mean near zero may be small by chance, such as of a channel in another memory format.
            noise = MARGIN * noise
        noise = max(noise, largest_gap(one, exact_one))
        if own != others:
            noise = max(noise, largest_gap(other, exact_other))
    if not largest <= MARGIN * noise:
        times = largest / noise if noise else math.inf
        return replace(found, why=f"that is {times:.0f} times the rounding error of the first")
    return found


def _coarsest(formats: set[torch.dtype]) -> tuple[float, str]:
    """The spacing of numbers near one in the coarsest format, and its name."""
    floats = ((torch.finfo(dtype).eps, str(dtype)) for dtype in formats if dtype.is_floating_point)
    eps, name = max(floats, default=(0.0, ""))
    return eps, name.removeprefix("torch.")


def _units(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Numbers of the format between two results at most; ``None`` if one is not finite or the formats differ."""
    kind = INTEGERS.get(native.element_size(first))
    if first.dtype != second.dtype or not native.is_floating_point(first) or kind is None or not native.numel(first):
        return None
    if not bool(native.all(native.isfinite(first) & native.isfinite(second))):
        return None
    ranks = []
    for tensor in (first, second):
        bits = native.double(native.view(native.contiguous(contents(native.cpu(tensor))), kind))
        ranks.append(native.where(bits < 0, -(2.0 ** (8 * native.element_size(first) - 1)) - bits, bits))
    return int(native.max(native.abs(ranks[0] - ranks[1])))
