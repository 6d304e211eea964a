"""The report's drawings: plots of numbers over steps, and the heat map of layers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from reprokit.render.report import heat_map, plot
from reprokit.story import LayerSeries


def test_a_plot_marks_the_failing_step_and_what_is_not_finite() -> None:
    losses = [1000.0, 10.0, math.nan, 1.0, None]
    drawing = plot(list(enumerate(losses)), "loss <per> step", mark=4.0)
    assert drawing is not None
    root = ElementTree.fromstring(str(drawing))
    classes = [element.get("class") for element in root]
    assert classes.count("cross") == 1 and classes.count("failing") == 1
    (line,) = (element for element in root if element.get("class") == "line")
    assert len(line.get("points", "").split()) == 3
    assert root.get("aria-label") == "loss <per> step"
    assert plot([(0, 1.0), (1, None)], "loss", mark=1.0) is None


def test_the_heat_map_is_darker_for_larger_numbers() -> None:
    rows = [LayerSeries("fc", (1e-3, 0.0, None)), LayerSeries("head", (1.0, 1e3, math.nan))]
    (name, first), (_, second) = heat_map(rows, [4, 5, 6])
    assert name == "fc" and [cell.cls for cell in first] == ["heat-1", "heat-0", ""]
    assert [cell.cls for cell in second] == ["heat-5", "heat-8", "heat-bad"]
    assert second[1].hint == "step 5: 1000"
