"""The what-if table as text: Markdown that cannot break out of its cells, rows for HTML, plain rows."""

from __future__ import annotations

import pytest

from reprokit.render import findings
from reprokit.render.facts import Facts
from reprokit.render.report import write_report
from reprokit.render.sources import snapshot_script
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.whatif import NOT_DONE
from tests.render.programs import VERIFIED
from tests.render.test_texts import attention_step, reduced


def row(variant: str, answer: str, detail: str = "", seconds: float | None = None, name: str = "") -> Answered:
    return Answered(variant, name or variant, answer, detail, seconds)


def of_minimum(*rows: Answered) -> WhatIfResult:
    return WhatIfResult(tables={"minimum": rows})


MINIMUM = (row("float64", "same", "", 1.234e-5), row("cuda", "cannot_run", "torch sees no GPU"))
CONTEXT = (row("float64", "passes", "", 0.0123), row("autocast_off", "other", "inf from `exp`", 2.0))
TABLE = WhatIfResult(10.0, 1.0, {"minimum": MINIMUM, "context": CONTEXT})


def test_markdown_groups_by_result_and_has_no_times() -> None:
    late = row("compile", "cannot_run", f"{NOT_DONE} the 10 s for this table")
    table = of_minimum(*MINIMUM, row("bfloat16", "same", "", 2.0), late)
    assert findings.table_markdown(table, "minimum").splitlines() == [
        "| how it is run | result |",
        "| --- | --- |",
        "| float64; bfloat16 | fails the same |",
        "| cuda | cannot run: torch sees no GPU |",
    ]
    assert "fails otherwise: inf from `exp`" in findings.table_markdown(TABLE, "context")
    assert findings.table_markdown(TABLE, "snapshot") == findings.table_markdown(WhatIfResult(), "minimum") == ""


@pytest.mark.parametrize("detail", ["a | b", "two\nlines", "<script>alert(1)</script>", "`a` <b> `c|`"])
def test_no_detail_breaks_the_table(detail: str) -> None:
    text = findings.table_markdown(of_minimum(row("x", "other", detail)), "minimum")
    assert len(text.splitlines()) == 3
    last = text.splitlines()[-1]
    assert last.replace("\\|", "").count("|") == 3
    assert "<" not in last


def test_the_report_has_the_table_where_there_is_one() -> None:
    snapshot = attention_step()
    for table in (TABLE, WhatIfResult()):
        text = write_report(Facts(snapshot, snapshot_script(snapshot), VERIFIED, reduced(snapshot, whatif=table)))
        assert ('<h2 id="whatif">What if</h2>' in text) == (table is TABLE)
        cell = '<td class="answer other">fails otherwise: inf from <code>exp</code></td><td>2 s</td>'
        assert (cell in text) == (table is TABLE)
