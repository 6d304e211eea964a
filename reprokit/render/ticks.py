"""Numbers on axes: how they are written, and which ones are worth a label."""

from __future__ import annotations

import math

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
