"""The range of a tensor: smallest and largest magnitude, and how many elements are zero, NaN or infinite.

Ranges are all that a report tells of tensors; healthy ones cost two passes over their elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from reprokit.locate.ways import local_part

_ONE_BYTE = 1  # formats of one byte have next to no functions of their own


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor in short. ``low`` and ``high`` are the smallest and largest magnitude of its finite elements, and
    ``least`` is the smallest that is not zero; ``None`` without any. ``num_inf`` counts
    infinities of either sign, ``num_negative_inf`` those below zero, ``num_true`` is for booleans."""

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    num_nan: int
    num_inf: int
    least: float | None = None
    num_true: int | None = None
    num_negative_inf: int = 0

    @property
    def is_bad(self) -> bool:
        """True if any element is not finite."""
        return bool(self.num_nan or self.num_inf)

    @property
    def is_float(self) -> bool:
        """True if the format can hold values that are not finite."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class FormatLimits:
    """The largest finite and the smallest normal number of a format."""

    dtype: str
    tiny: float
    largest: float


def measure(tensor: torch.Tensor) -> Range:
    """The range of a tensor."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    numbers = _numbers(tensor)
    if numbers is None:
        return Range(dtype, shape, None, None, 0, 0)
    magnitudes = numbers.abs()
    num_nan = num_inf = num_negative = 0
    low, high = _extremes(magnitudes)
    if not (math.isfinite(low) and math.isfinite(high)):
        num_nan = int(torch.isnan(magnitudes).count_nonzero())
        num_inf = int(torch.isinf(magnitudes).count_nonzero()) if num_nan < magnitudes.numel() else 0
        num_negative = int(torch.isneginf(numbers).count_nonzero()) if num_inf and not numbers.is_complex() else 0
        if num_nan + num_inf == magnitudes.numel():
            return Range(dtype, shape, None, None, num_nan, num_inf, num_negative_inf=num_negative)
        magnitudes = magnitudes[torch.isfinite(magnitudes)]
        low, high = _extremes(magnitudes)
    least = low if low > 0 else _least(magnitudes)
    num_true = int(magnitudes.count_nonzero()) if tensor.dtype is torch.bool else None
    return Range(dtype, shape, low, high, num_nan, num_inf, least, num_true, num_negative)


def range_text(found: Range | None) -> str:
    """A range in a few words: ``float16 4x8, |x| 0.1 to 6.5e+04, 3 nan``, or ``bool 4x8, 3 of 32 True``."""
    if found is None:
        return "not reached"
    words = [f"{found.dtype} {'x'.join(map(str, found.shape)) or 'scalar'}"]
    if found.num_true is not None:
        words.append(f"{found.num_true:,} of {math.prod(found.shape):,} True")
    elif found.low is not None and found.high is not None:
        same = found.low == found.high
        words.append(f"|x| = {found.high:.4g}" if same else f"|x| {found.low:.4g} to {found.high:.4g}")
    num_positive = found.num_inf - found.num_negative_inf
    counts = ((found.num_nan, "nan"), (num_positive, "inf"), (found.num_negative_inf, "-inf"))
    words += [f"{count:,} {name}" for count, name in counts if count]
    return ", ".join(words)


def limits_of(dtype: str) -> FormatLimits | None:
    """The limits of a floating-point format by its name; ``None`` for any other."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return None
    numbers = torch.finfo(found)
    return FormatLimits(dtype, numbers.tiny, numbers.max)


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in a format whose absolute values can be compared, ``None`` where there are none."""
    plain = local_part(tensor.detach())
    if plain.is_meta or plain.numel() == 0:
        return None
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if not (plain.is_floating_point() or plain.is_complex()):
        plain = plain.double()  # the smallest integer has no positive counterpart of its own type
    elif plain.element_size() == _ONE_BYTE:
        plain = plain.float()
    return plain


def _extremes(magnitudes: torch.Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(magnitudes)
    return float(low), float(high)


def _least(magnitudes: torch.Tensor) -> float | None:
    least = float(torch.where(magnitudes > 0, magnitudes, math.inf).min())
    return least if math.isfinite(least) else None
