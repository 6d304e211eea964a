"""The range of a tensor: magnitudes, mean, standard deviation, and how many elements are zero, NaN or infinite.

Reports, `reprokit trace` and events show tensors by their ranges; a trace may add a histogram of the magnitudes.
`measure` only reads its argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from reprokit.locate.ways import local_part

_ONE_BYTE = 1  # formats of one byte have next to no functions of their own
_PLAIN = (1e-12, 1e12)  # magnitudes whose squares, summed over 2**40 elements, are normal float32 numbers


_BARS = "▁▂▃▄▅▆▇█"
_LEAST_FOR_TAILS = 8  # elements; fewer have no tails


@dataclass(frozen=True, slots=True)
class Histogram:
    """The magnitudes of the finite elements that are not zero, in bins of a power of two.

    ``counts[i]`` elements have a magnitude from 2**(lowest + i) up to the next power. ``kurtosis`` is the excess
    kurtosis of these elements: 0 for a normal distribution, far above it for heavy tails; ``None`` for less than 8.
    """

    lowest: int
    counts: tuple[int, ...]
    kurtosis: float | None

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
    """A tensor in short. ``low`` and ``high`` are the smallest and largest magnitude of its finite elements, and
    ``least`` is the smallest that is not zero; ``mean``, ``std`` (population) and ``norm`` (L2) are of the finite
    elements too, those of complex numbers of their magnitudes. All are ``None`` without any. ``zeros`` is the share of
    zeros among all elements, ``num_inf`` counts infinities of either sign, ``num_negative_inf`` those below zero,
    ``num_true`` is for booleans. A tensor that is spread over processes has the shape of the whole and the numbers of
    the local part. ``histogram`` is there on request, and so are ``ends``, the smallest and largest finite element."""

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    num_nan: int
    num_inf: int
    least: float | None = None
    num_true: int | None = None
    num_negative_inf: int = 0
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    zeros: float | None = None
    histogram: Histogram | None = None
    ends: tuple[float, float] | None = None

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


def measure(tensor: torch.Tensor, *, moments: bool = True, histogram: bool = False) -> Range:
    """The range of a tensor of any format, layout and shape; of a tensor on the meta device only these two.

    ``moments``: with mean, standard deviation and norm, which take half of the time. ``histogram``: of floating-point
    numbers with that too, which takes several times as long as all the rest.
    """
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    numbers = _numbers(tensor)
    if numbers is None:
        return Range(dtype, shape, None, None, 0, 0)
    num_nan = num_inf = num_negative = 0
    magnitudes = numbers.abs()
    low, high = _extremes(magnitudes)
    if not (math.isfinite(low) and math.isfinite(high)):
        num_nan = int(torch.isnan(numbers).count_nonzero())
        is_finite = torch.isfinite(numbers)
        num_inf = numbers.numel() - num_nan - int(is_finite.count_nonzero())
        num_negative = int(torch.isneginf(numbers).count_nonzero()) if num_inf and not numbers.is_complex() else 0
        if num_nan + num_inf == numbers.numel():
            return Range(dtype, shape, None, None, num_nan, num_inf, num_negative_inf=num_negative, zeros=0.0)
        numbers = numbers[is_finite]
        magnitudes = numbers.abs().clamp(max=torch.finfo(magnitudes.dtype).max)  # of complex numbers it may overflow
        low, high = _extremes(magnitudes)
    is_float = numbers.is_complex() or tensor.is_floating_point()
    num_zero = magnitudes.numel() - int(magnitudes.count_nonzero()) if low == 0 else 0
    return Range(
        dtype,
        shape,
        low,
        high,
        num_nan,
        num_inf,
        least=low if low > 0 else _least(magnitudes),
        num_true=magnitudes.numel() - num_zero if tensor.dtype is torch.bool else None,
        num_negative_inf=num_negative,
        **(_moments(magnitudes if numbers.is_complex() else numbers, high) if moments else {}),
        zeros=num_zero / (magnitudes.numel() + num_nan + num_inf),
        histogram=_histogram(magnitudes if numbers.is_complex() else numbers) if histogram and is_float else None,
        ends=None,
    )


def ends_of(tensor: torch.Tensor) -> tuple[float, float] | None:
    """The smallest and largest finite element of real numbers; ``None`` without any."""
    numbers = _numbers(tensor)
    finite = numbers[torch.isfinite(numbers)] if numbers is not None and not numbers.is_complex() else None
    return _extremes(finite) if finite is not None and finite.numel() else None


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


def _moments(numbers: torch.Tensor, high: float) -> dict[str, float]:
    """Mean, population standard deviation and L2 norm of finite numbers up to ``high`` in magnitude."""
    if numbers.element_size() < torch.float32.itemsize:
        numbers = numbers.float()
    unit = 1.0 if _PLAIN[0] < high < _PLAIN[1] or not high else high
    scaled = numbers if unit == 1.0 else numbers / unit
    mean = float(scaled.mean())
    centred = scaled.flatten() - mean
    std = math.sqrt(float(torch.dot(centred, centred)) / centred.numel())  # a ninth of the time of `torch.std`
    norm = max(high, math.hypot(mean, std) * math.sqrt(centred.numel()) * unit)
    known = {"mean": max(-high, min(high, mean * unit)), "std": min(high, std * unit)}
    return known if math.isinf(norm) else {**known, "norm": norm}


def _histogram(numbers: torch.Tensor) -> Histogram:
    """The histogram of finite numbers."""
    numbers = numbers[numbers != 0]
    numbers = numbers.float() if numbers.element_size() < torch.float32.itemsize else numbers
    if not numbers.numel():
        return Histogram(0, (), None)
    exponents = torch.frexp(numbers).exponent.long() - 1
    lowest = int(exponents.min())
    counts = torch.bincount(exponents - lowest).tolist()
    centred = numbers / numbers.abs().max()
    centred -= centred.mean()
    squares = centred.square_()
    variance = float(squares.mean())
    has_tails = numbers.numel() >= _LEAST_FOR_TAILS and variance > 0
    kurtosis = float((squares / variance).square_().mean()) - 3.0 if has_tails else None
    return Histogram(lowest, tuple(counts), kurtosis)


def _extremes(magnitudes: torch.Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(magnitudes)
    return float(low), float(high)


def _least(magnitudes: torch.Tensor) -> float | None:
    least = float(torch.where(magnitudes > 0, magnitudes, math.inf).min())
    return least if math.isfinite(least) else None
