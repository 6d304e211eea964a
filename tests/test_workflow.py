"""The workflow as the commands and the API run it: the same files, and an error in one part costs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import reprokit
from reprokit import workflow
from reprokit.cli import main
from reprokit.errors import ReprokitError
from reprokit.shrink.reducer import SearchStopped
from reprokit.shrink.reduction import load
from reprokit.snapshot.format import save
from tests.shrink import failing, models
from tests.shrink.views import Lines


def comparable(text: str) -> str:
    """A text without what is measured and differs from run to run: times, and rows that the table had no time for."""
    return re.sub(r"[\d.]+ (s|ms|µs)\b|<(tr|td).*?</\2>|<svg.*?</svg>", "", text, flags=re.DOTALL)


@pytest.mark.usefixtures("few_runs")
def test_the_api_writes_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = models.masked_attention()
    save(snapshot, Path("x.repro.pt"))
    assert main(["shrink", "x.repro.pt", "--json", "-q"]) == 0
    summary = json.loads(capsys.readouterr().out)
    reduction = reprokit.shrink(reprokit.load("x.repro.pt"), whatif=False)
    rendered = reprokit.render(reduction, reprokit.load("x.repro.pt"), "api")
    assert {path.name for path in Path("api").iterdir()} == {path.name for path in Path("x").iterdir()}
    assert (rendered.lines, rendered.verified) == (summary["repro"]["lines"], summary["repro"]["verified"])
    assert rendered.module == Path("api/repro_module.py") and rendered.reduction == Path("api/reduction.pt")
    for file in Path("x").iterdir():
        if file.suffix != ".pt":
            assert comparable(Path("api", file.name).read_text()) == comparable(file.read_text()), file.name
    mine, other = load("api/reduction.pt"), load("x/reduction.pt")
    assert mine.diagnosis == other.diagnosis is not None
    assert (mine.log, mine.explain, mine.nearest) == (other.log, other.explain, other.nearest)


def breaks(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("no luck")


def without_worker(*_: Any, **__: Any) -> Any:
    raise ReprokitError("no worker can be started")


@pytest.mark.parametrize(
    ("name", "broken", "line"),
    [
        ("diagnose", breaks, "no diagnosis: ZeroDivisionError: no luck"),
        ("fix_code", breaks, "could not render the fix as code: ZeroDivisionError: no luck"),
        ("of_reduction", without_worker, "there is no what-if table: no worker can be started"),
    ],
)
def test_a_part_that_breaks_costs_nothing_else(
    name: str, broken: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, name, broken)
    view = Lines()
    reduction = workflow.shrink(failing.sqrt_gradient(), whatif=name == "of_reduction", view=view)
    assert line in view.said
    assert reduction.one_minimal and (reduction.diagnosis is None) == (name == "diagnose")


def test_ctrl_c_after_the_search_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workflow, "diagnose", interrupt)
    with pytest.raises(SearchStopped) as stopped:
        workflow.shrink(failing.sqrt_gradient(), whatif=False)
    assert stopped.value.best.one_minimal


def test_the_table_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "WHATIF_SECONDS", 0.5)
    assert "minimum" in (workflow.shrink(failing.sqrt_gradient()).whatif.tables or {})
