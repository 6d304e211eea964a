"""The measure of a tensor, against the definition written out over its elements in Python."""

from __future__ import annotations

import cmath
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprokit.locate.ranges import measure

INF, NAN = math.inf, math.nan
WIDE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
COUNTED = {torch.bool: (0, 1), torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int64: (-(2**63), 2**63 - 1)}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of up to 12 elements of any format, magnitudes of the whole format, NaN and infinities among them."""
    dtype = draw(st.sampled_from(sorted(WIDE | COUNTED.keys(), key=str)))
    if dtype in COUNTED:
        elements = st.integers(*COUNTED[dtype])
        made = torch.tensor(draw(st.lists(elements, max_size=12)), dtype=dtype)
    else:
        numbers = st.floats(width=64) | st.sampled_from([0.0, -0.0, 1.0, NAN, INF, -INF])
        values = draw(st.lists(st.builds(complex, numbers, numbers) if dtype.is_complex else numbers, max_size=12))
        made = torch.tensor(values, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    return made.reshape(2, -1) if made.numel() % 2 == 0 and draw(st.booleans()) else made


def close(found: float | None, expected: float, scale: float) -> bool:
    """True for numbers that differ by the rounding of float32 sums over magnitudes up to ``scale``."""
    return found is not None and math.isclose(found, expected, rel_tol=1e-5, abs_tol=4e-6 * scale)


@given(tensors())
def test_a_tensor_is_measured_by_the_definition(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    found = measure(tensor)
    assert repr(before.tolist()) == repr(tensor.tolist()) and found.shape == tuple(tensor.shape)
    elements = [complex(value) for value in tensor.flatten().tolist()]
    num_nan = sum(cmath.isnan(value) for value in elements)
    finite = [value for value in elements if cmath.isfinite(value)]
    assert (found.num_nan, found.num_inf) == (num_nan, len(elements) - num_nan - len(finite))
    assert found.zeros == (sum(value == 0 for value in elements) / len(elements) if elements else None)
    if not finite:
        assert (found.low, found.high, found.least, found.mean, found.std, found.headroom) == (None,) * 6
        return
    largest = torch.finfo(tensor.dtype).max if tensor.dtype in WIDE else INF
    sizes = [min(math.hypot(value.real, value.imag), largest) for value in finite]
    high = max(sizes)
    assert close(found.low, min(sizes), 0) and close(found.high, high, 0)
    assert found.least is None if high == 0 else close(found.least, min(filter(None, sizes)), 0)
    values = sizes if tensor.is_complex() else [value.real for value in finite]
    unit = high or 1.0
    mean = math.fsum(value / unit for value in values) / len(values)
    std = math.sqrt(math.fsum((value / unit - mean) ** 2 for value in values) / len(values))
    assert close(found.mean, mean * unit, high) and close(found.std, std * unit, high)
    norm = math.hypot(*values)
    assert close(found.norm, norm, high) or (found.norm is None and norm >= 0.99999 * torch.finfo(torch.float64).max)
    is_wide = tensor.dtype in WIDE and high > 0
    assert (found.headroom is not None) == is_wide
    assert not is_wide or close(found.headroom, math.log2(largest) - math.log2(high), 1)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([-1e-30, 1e-30]), 1e-30),
        (torch.tensor([-1e30, 1e30]), 1e30),
        (torch.tensor([-6e4, 6e4]).half(), 6e4),
        (torch.tensor([-1e38, 1e38]).bfloat16(), 1e38),
        (torch.tensor([5.0]), 0.0),
    ],
)
def test_a_deviation_neither_overflows_nor_underflows(tensor: torch.Tensor, expected: float) -> None:
    assert measure(tensor).std == pytest.approx(expected, rel=0.01)


@given(tensors())
def test_a_histogram_counts_the_elements_of_every_power_of_two(tensor: torch.Tensor) -> None:
    bins = measure(tensor, histogram=True).histogram
    numbers = [value for value in tensor.flatten().tolist() if cmath.isfinite(value)]
    if tensor.dtype not in WIDE or not numbers:
        assert bins is None
        return
    sizes = [abs(value) for value in numbers if value != 0]
    assert bins is not None and sum(bins.counts) == len(sizes)
    if not tensor.dtype.is_complex:  # whose magnitudes are rounded
        counted = Counter(math.frexp(size)[1] - 1 for size in sizes)
        assert counted == {bins.lowest + place: count for place, count in enumerate(bins.counts) if count}
    drawn = bins.bars(4)
    assert len(drawn[drawn.index(" ") + 1 : drawn.rindex(" ")]) <= 4 if sizes else drawn == ""
