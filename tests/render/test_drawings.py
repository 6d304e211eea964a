"""The report's drawings: numbers on axes, strips, plots, and the map of positions."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprokit.locate.ranges import measure
from reprokit.render.drawings import (
    LogAxis,
    Scale,
    decade_ticks,
    linear_ticks,
    plot,
    position_map,
    strip,
    strip_header,
    tick_text,
)
from reprokit.render.survey import positions_of


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1000, "1,000"), (1e-7, "10⁻⁷"), (3e5, "3×10⁵"), (-1e6, "-10⁶"), (65504, "65,504")],
)
def test_numbers_on_an_axis(value: float, text: str) -> None:
    assert tick_text(value) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_linear_ticks_are_few_inside_and_evenly_spaced(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = linear_ticks(low, high, count)
    assert len(ticks) <= count + 1
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@given(st.floats(-300, 290), st.floats(2, 300), st.integers(2, 8))
def test_decade_ticks_are_powers_inside(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = decade_ticks(low, high, count)
    assert 1 <= len(ticks) <= count
    assert all(low - 1e-6 <= tick <= high + 1e-6 for tick in ticks)
    assert len({b - a for a, b in itertools.pairwise(ticks)}) <= 1


def test_small_formats_have_their_limits_on_the_axis() -> None:
    half = LogAxis.over([measure(torch.tensor([1.0, 2.0]).half())])
    assert [text for _, text in half.limits] == ["float16 up to 65,504", "float16 normal from 6.1×10⁻⁵"]
    assert half.beyond == ()
    single = LogAxis.over([measure(torch.tensor([1.0, 2.0]))])
    assert single.limits == () and "float32 from 10⁻³⁸ to 3×10³⁸" in single.beyond_text
    large = LogAxis.over([measure(torch.tensor([1.0, 1e37]))])
    assert [text for _, text in large.limits] == ["float32 up to 3.4×10³⁸"]


def test_everything_on_an_axis_lies_inside_the_strip() -> None:
    ranges = [measure(torch.tensor([1e-30, 1e30])), measure(torch.tensor([0.0, 5.0, math.inf]).half())]
    axis = LogAxis.over(ranges)
    for found in ranges:
        places = [float(place) for place in re.findall(r'x[12]?="([\d.-]+)%"', strip(found, axis))]
        assert places and all(0 <= place <= 100 for place in places)
    assert ">inf</text>" in strip(ranges[1], axis) and 'class="zero"' in strip(ranges[1], axis)
    assert 'class="bar"' not in strip(None, axis)
    for drawing in (strip(ranges[0], axis), strip_header(axis)):
        ElementTree.fromstring(str(drawing))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([5e-324, 1.7e308], dtype=torch.float64),
        torch.tensor([1e307], dtype=torch.float64),
        torch.tensor([-128], dtype=torch.int8),
        torch.tensor([-(2**63)]),
        torch.tensor([2, 65535]).to(torch.uint16),
    ],
)
def test_the_ends_of_every_format_can_be_drawn(tensor: torch.Tensor) -> None:
    found = measure(tensor)
    axis = LogAxis.over([found])
    drawing = strip(found, axis)
    assert 'class="bar"' in drawing and axis.ticks
    assert all(0 <= float(place) <= 100 for place in re.findall(r'x[12]?="([\d.-]+)%"', drawing))
    ElementTree.fromstring(str(strip_header(axis)))


@pytest.mark.parametrize("losses", [(1e308, -1e308), (1.7e308, 1.7e308), (5e-324, 1.7e308), (5e-324, 5e-324)])
def test_the_largest_and_smallest_losses_can_be_drawn(losses: tuple[float, ...]) -> None:
    drawing = plot(list(enumerate(losses)), "loss")
    assert drawing is not None and "nan" not in drawing and "inf" not in drawing


def test_ranges_without_numbers_still_have_an_axis() -> None:
    axis = LogAxis.over([measure(torch.tensor([math.nan])), measure(torch.zeros(1))])
    assert axis.low < axis.high and ">nan</text>" in strip(measure(torch.tensor([math.nan])), axis)


def test_a_scale_is_logarithmic_over_decades() -> None:
    assert Scale.over([1.0, 1000.0]).is_logarithmic
    assert not Scale.over([0.0, 1000.0]).is_logarithmic
    assert Scale.over([1e-3, 1.0]).fraction(1.0) == 1.0
    flat = Scale.over([3.0, 3.0])
    assert flat.low < 3.0 < flat.high


def test_a_plot_marks_the_failing_step_and_what_is_not_finite() -> None:
    losses = [1000.0, 10.0, math.nan, 1.0, None]
    drawing = plot(list(enumerate(losses)), "loss <per> step", mark=4.0)
    assert drawing is not None
    root = ElementTree.fromstring(str(drawing))
    classes = [element.get("class") for element in root]
    assert classes.count("cross") == 1 and classes.count("failing") == 1
    (line,) = (element for element in root if element.get("class") == "line")
    assert len(re.findall("[ML]", line.get("d", ""))) == 3
    assert root.get("aria-label") == "loss <per> step"
    assert plot([(0, 1.0), (1, None)], "loss") is None


def test_a_stepped_plot_goes_across_and_down() -> None:
    drawing = plot([(0, 9.0), (1, 3.0), (2, 3.0)], "left", is_stepped=True)
    assert drawing is not None and re.search(r'd="M[\d. ]+H[\d.]+V[\d.]+H', drawing)


def test_the_map_draws_neighbours_as_one() -> None:
    tensor = torch.zeros(2, 5)
    tensor[0, 1:4], tensor[1, 4] = math.nan, math.inf
    found = positions_of(tensor, "x")
    assert found is not None
    root = ElementTree.fromstring(str(position_map(found)))
    cells = [element for element in root if (element.get("class") or "").startswith("cell-n")]
    assert len(cells) == 1
    assert int(cells[0].get("width", 0)) == 3 * int(cells[0].get("height", 0))
    assert sum(element.get("class") == "cell-plus" for element in root) == 1


@pytest.mark.parametrize("ends", [(2.6e-4, 4.1), (1e-4, 1e4), (1e-30, 1e30), (1.5, 2.5), (0.9e-4, 1.1e-4)])
def test_labels_above_strips_do_not_touch(ends: tuple[float, float]) -> None:
    header = strip_header(LogAxis.over([measure(torch.tensor(ends))]))
    labels = re.findall(r'x="([\d.]+)%" y="12" text-anchor="middle">([^<]+)<', header)
    assert len(labels) >= 2 and labels[0][1] == "0"
    for (place, text), (following, next_text) in itertools.pairwise(labels):
        room = 300 * (float(following) - float(place)) / 100  # pixels in a narrow strip, with characters of 5 to 6
        assert room > 5.5 * (len(text) + len(next_text)) / 2
