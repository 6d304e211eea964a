"""The report: what it says, what it leaves out, and that it is one well-formed file."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from reprokit.program.ir import Call, Input, Program, Ref, Scope
from reprokit.render.charts import chart, heat_map
from reprokit.render.facts import Facts
from reprokit.render.names import labels
from reprokit.render.report import MAX_TEXT, write_report
from reprokit.render.sources import reduction_script, snapshot_script
from reprokit.render.survey import (
    MAX_BEFORE,
    Survey,
    Way,
    pattern_of,
    survey,
    ways,
)
from reprokit.rules.diagnosis import Diagnosis, TriedFix
from reprokit.series.story import LayerSeries, StepNumbers
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.source import SourceState
from tests.render.programs import (
    VERIFIED,
    Case,
    failing_cholesky,
    half_precision_adam,
    masked_softmax,
    snapshot_of,
    square_root_at_zero,
)
from tests.render.test_texts import attention_step, reduced

NAN, INF = float("nan"), float("inf")
CASES = [square_root_at_zero, half_precision_adam, failing_cholesky, masked_softmax]


def surveyed(snapshot: Snapshot) -> Survey:
    return survey(snapshot, "x")


def ways_of(snapshot: Snapshot) -> list[Way]:
    return ways(surveyed(snapshot), labels(snapshot.program))


def report(snapshot: Snapshot, **fields: Any) -> str:
    """The report of a snapshot and its reduction."""
    reduction = reduced(snapshot, **fields)
    return write_report(Facts(snapshot, reduction_script(reduction), VERIFIED, reduction))


def chain(length: int, call: str = "torch.nn.functional.relu") -> Case:
    """Calls one after the other, each in a module of its own, and a logarithm of a negative number at the end."""
    calls = [
        Call(call, (Ref(number),), {}, Ref(number + 1), (Scope("", "Net"), Scope(f"layers.{number}", "Layer")))
        for number in range(length)
    ]
    calls.append(Call("torch.log", (Ref(length),), {}, Ref(length + 1)))
    program = Program(tuple(calls), (Input(0, "x"),), (Ref(length + 1),))
    return program, {0: torch.tensor([-1.0, 2.0])}


class Checker(HTMLParser):
    """Collects addresses and ids, and checks that tags are closed."""

    VOID = frozenset({"meta", "line", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID or (tag == "line" and self.get_starttag_text()[-2:] != "/>"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_report_is_one_file_and_well_formed() -> None:
    snapshot = attention_step()
    snapshot = replace(snapshot, source=SourceState(("train.py", "--lr", "3e-4"), "0" * 40, diff="+<x>"))
    html = report(snapshot)
    checker = Checker(html)
    assert checker.addresses and all(address.startswith("#") for address in checker.addresses)
    assert {address[1:] for address in checker.addresses} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    assert "http" not in html.replace("http-equiv", "")
    assert "# &lt;b&gt;&amp;" in html and "+&lt;x&gt;" in html
    for words in (
        "softmax returns nan",
        "layers.1.attention",
        "train.py:31",
        "The dashed line marks step 8, which failed.",
        "1-minimal",
        "fails with every value that was tried",
        "scale of softmax",
        "<code>x[0] = 0</code> instead of <code>-inf</code>",
    ):
        assert words in html
    assert "Not tried" not in html


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_failure_has_a_report(case: Any) -> None:
    snapshot = snapshot_of(case(), timeline=[])
    html = write_report(Facts(snapshot, snapshot_script(snapshot), VERIFIED))
    Checker(html)
    assert "The way of the bad value" in html and "it was not reduced" in html
    assert ">Before the failure<" not in html and ">Reduction<" not in html


def test_the_report_is_redacted() -> None:
    snapshot = attention_step()
    site = replace(snapshot.failure.site, code="x = load(password='hunter23')")
    source = SourceState(("train.py", "--api-key", "a1B2" * 8), diff="+password = 'hunter22'")
    html = report(replace(snapshot, source=source, failure=replace(snapshot.failure, site=site)))
    assert "a1B2" not in html and "hunter2" not in html


def test_a_step_that_cannot_be_run_here_has_a_report_without_ranges() -> None:
    snapshot = attention_step()
    snapshot.tensors[1] = torch.zeros(3, 3, dtype=torch.bool)  # as where a kernel is missing
    html = report(snapshot)
    assert "could not be run to its end where this page was made (RuntimeError" in html
    assert "could not be run" not in report(attention_step())
    Checker(html)


def test_long_texts_are_cut_where_it_shows() -> None:
    snapshot = attention_step()
    snapshot = replace(snapshot, environment=Environment(collect_env="word " * 30_000))
    snapshot = replace(snapshot, source=SourceState(commit="0" * 40, diff="+line\n" * 30_000))
    html = report(snapshot, log=["1: a change: 2 calls, 3 elements"] * 10_000)
    assert html.count("... cut here") == 3 and len(html) < 4 * MAX_TEXT


def test_a_long_step_stays_a_small_file() -> None:
    snapshot = snapshot_of(chain(1000, "torch.neg"))
    html = write_report(Facts(snapshot, reduction_script(reduced(snapshot)), VERIFIED))
    assert len(html) < 300_000
    assert f"{1002 - MAX_BEFORE} calls on this way not shown" in html
    assert "further modules are not shown" in html


def test_what_if_and_diagnosis_appear_when_they_are_there() -> None:
    text, where = ("fill with the lowest number",), ("net.py:3",)
    fix = TriedFix("fill", text, "x.masked_fill(mask, -1e4)  # <b>", where, True, "loss 2.31")
    found = Diagnosis(
        "masked",
        "A fully masked row",
        "Nothing is left.",
        ("2 of 2 rows",),
        "certain",
        "Keep one.",
        ("https://example.org/1", "javascript:alert(1)"),
        fix=fix,
        tried=(replace(fix, helped=False, outcome="still nan"),),
    )
    table = WhatIfResult(tables={"minimum": (Answered("fp64", "`float64`", "passes", "", 1e-3),)})
    html = report(attention_step(), diagnosis=found, whatif=table, one_minimal=False, stopped="max-checks")
    assert '<h2 id="diagnosis">' in html and "loss 2.31" in html and "Did not help" in html
    assert '<td class="answer passes">passes</td><td>1 ms</td>' in html
    assert "javascript:" not in html and 'href="https://example.org/1"' in html
    assert "# &lt;b&gt;" in html and "Stopped early</dt><dd>max-checks</dd>" in html
    Checker(html)
    plain = report(attention_step())
    assert 'id="diagnosis"' not in plain and 'id="whatif"' not in plain


# -- the run behind it -----------------------------------------------------------------------------------------------


def test_the_way_leads_from_the_input_through_the_mask_to_the_loss() -> None:
    snapshot = attention_step()
    (way,) = ways_of(snapshot)
    texts = [stop.text for stop in way.stops]
    assert texts[0] == "x" and texts[-2:] == [
        's = total.masked_fill(mask, float("-inf"))',
        "p = F.softmax(s, dim=-1)",
    ]
    assert [stop.text for stop in way.stops if stop.is_origin] == ["p = F.softmax(s, dim=-1)"]
    last = way.stops[-1].range
    assert last is not None and last.num_nan == 2 and way.num_left_out == 0


def test_the_way_of_a_gradient_ends_at_the_derivative() -> None:
    gradient, values = ways_of(snapshot_of(square_root_at_zero()))
    assert [stop.text for stop in gradient.stops] == ["gradient of sqrt", "SqrtBackward0: gradient of distance"]
    assert [stop.range.num_inf for stop in gradient.stops if stop.range] == [0, 1]
    assert values.stops[0].text == "distance" and values.stops[-1].is_origin


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([[True, True], [True, True]], "Every element is bad."),
        ([[False, True], [False, False]], "A single element is bad, at [0, 1]."),
        ([[True, True], [False, False]], "Exactly what lies at index 0 of dimension 0 is bad, and all of it."),
        ([[False, True], [False, True]], "Exactly what lies at index 1 of dimension 1 is bad, and all of it."),
        ([[True, True, False], [False, False, False]], "All bad elements lie at index 0 of dimension 0."),
        ([[True, False], [False, True]], "2 of 4 elements are bad, spread over every dimension."),
        ([True, False, True], "2 of 3 elements are bad, spread over every dimension."),
        (True, "It is a single number."),
    ],
)
def test_patterns(bad: Any, words: str) -> None:
    assert pattern_of(torch.tensor(bad)) == words


def test_a_chart_marks_the_failing_step_and_what_is_not_finite() -> None:
    drawing = chart("Loss", list(enumerate([1000.0, 10.0, math.nan, 1.0, None])), 4.0)
    assert drawing is not None and len(drawing.line.split()) == 3 and drawing.last == "last 1"
    assert drawing.crosses == [204.0] and drawing.mark == 348.0
    assert chart("Loss", [(0, 1.0), (1, None)], 1.0) is None
    html = report(replace(attention_step(), timeline=[StepNumbers(step, loss=9.0 - step) for step in range(9)]))
    assert html.count('<svg class="plot"') == 1 and 'class="failing"' in html
    Checker(html)


def test_the_heat_map_is_darker_for_larger_numbers() -> None:
    rows = [LayerSeries("fc", (1e-3, 0.0, None)), LayerSeries("head", (1.0, 1e3, math.nan))]
    (name, first), (_, second) = heat_map(rows, [4, 5, 6])
    assert name == "fc" and [cell.cls for cell in first] == ["heat-1", "heat-0", ""]
    assert [cell.cls for cell in second] == ["heat-5", "heat-8", "heat-bad"]
    assert second[1].hint == "step 5: 1000"
