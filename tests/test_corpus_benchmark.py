"""Scoring of the corpus benchmark: a pure function of a case and of what the commands printed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import import_benchmark

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    return import_benchmark("corpus")


CASE: dict[str, Any] = {
    "family": "zero_division",
    "phase": "loss",
    "kind": "nan",
    "first_bad_step": 3,
    "accept_calls": ["div", "Adam.step"],
    "culprit_module": "enc.1",
    "minimal_ops": 1,
    "minimal_numel": 1,
}


def shown(**changes: Any) -> dict[str, Any]:
    failure = {"step": 3, "phase": "forward", "kind": "nan", "call": "torch.Tensor.div", "module": "enc.1.norm"}
    return {"failure": {**failure, **changes}, "fidelity": "exact"}


def shrunk(**changes: Any) -> dict[str, Any]:
    repro = {"lines": 6, "files": ["repro.py"]}
    diagnosis = {"id": "zero-by-zero", "fix": {"helped": True}}
    numbers = {"calls": 1, "elements": 2, "checks": 5, "one_minimal": True}
    return {**numbers, "diagnosis": diagnosis, "repro": repro, **changes}


def repro(corpus: ModuleType, code: int = 1, stdout: str = "y = nan") -> Any:
    return corpus.Finished(code, stdout, "", 1.0)


def issue(corpus: ModuleType) -> str:
    return "\n".join((*corpus.ISSUE_PARTS, "<details>", "</details>"))


def test_a_perfect_row(corpus: ModuleType) -> None:
    row = corpus.score("case", CASE, shown(), shrunk(), [repro(corpus)] * 3, issue(corpus))
    of_files = {"ruff_ok", "report_ok", "pasted"}  # are looked at elsewhere
    assert all(getattr(row, name) for name in corpus.CHECKS.keys() - of_files)
    assert (row.lines, row.checks, row.calls, row.elements) == (6, 5, 1, 2)


WRONG_IN_SHOW = [
    ({"step": 4}, "step"), ({"phase": "backward"}, "phase"), ({"call": "torch.Tensor.mul"}, "blame"),
    ({"call": None}, "blame"), ({"module": "enc.10"}, "module"), ({"module": None}, "module"),
    ({"kind": "inf"}, "kind"),
]  # fmt: skip
WRONG_IN_SHRINK = [
    ({"calls": 2}, "calls_ok"), ({"elements": 3}, "elements_ok"), ({"one_minimal": False}, "one_minimal"),
    ({"repro": {"lines": 6, "files": ["repro.py", "inputs.pt"]}}, "no_side_file"),
    ({"diagnosis": {"id": "where-trap", "fix": {"helped": True}}}, "diagnosis_ok"),
    ({"diagnosis": {"id": "zero-by-zero", "fix": None}}, "fix"),
    ({"diagnosis": {"id": "zero-by-zero", "fix": {"helped": True, "is_plausible": False}}}, "fix"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [*((shown(**made), shrunk(), field) for made, field in WRONG_IN_SHOW),
     *((shown(), shrunk(**made), field) for made, field in WRONG_IN_SHRINK)],
)  # fmt: skip
def test_what_is_wrong(corpus: ModuleType, first: dict[str, Any], second: dict[str, Any], field: str) -> None:
    row = corpus.score("case", CASE, first, second, [repro(corpus)] * 3, issue(corpus))
    assert [name for name in corpus.CHECKS if getattr(row, name) is False] == [field]


def test_a_repro_must_fail_alike_every_time(corpus: ModuleType) -> None:
    one = repro(corpus)
    for runs in ([], [one, one], [one, one, repro(corpus, code=0)], [one, one, repro(corpus, stdout="y = inf")]):
        assert not corpus.score("case", CASE, shown(), shrunk(), runs, issue(corpus)).repro


def test_nothing_captured(corpus: ModuleType) -> None:
    row = corpus.score("case", CASE, None, None, [], issue(corpus))
    assert not row.captured and not row.repro
    assert corpus.summarise([row])["counts"]["captured"] == "0/1"
    assert "case" in corpus.table([row])


def test_the_optimizer_and_the_root_module(corpus: ModuleType) -> None:
    assert corpus.is_accepted("torch.optim.Adam.step", ["Adam.step"])
    assert not corpus.is_accepted("torch.optim.NAdam.step", ["Adam.step"])
    assert corpus.is_inside("<VRNN>", "(root)") and not corpus.is_inside("fc", "(root)")


def test_comparison_names_what_changed(corpus: ModuleType) -> None:
    good, bad = (
        corpus.summarise([corpus.score("case", CASE, shown(step=step), shrunk(), [repro(corpus)] * 3, issue(corpus))])
        for step in (3, 9)
    )
    assert corpus.compare(good, good) == "no case changed"
    assert corpus.compare(good, bad) == "worse   case: step"
    assert corpus.compare(bad, good) == "better  case: step"


def test_the_last_json_line_counts(corpus: ModuleType) -> None:
    done = corpus.Finished(3, '{"script": "prints"}\nstep 1\n{"schema": 1}\n', "", 0.1)
    assert done.json() == {"schema": 1}
    assert corpus.Finished(1, "no json", "", 0.1).json() is None


def test_code_is_judged_by_ruff(corpus: ModuleType, tmp_path: Path) -> None:
    good, unused, wide = tmp_path / "good.py", tmp_path / "unused.py", tmp_path / "wide.py"
    good.write_text("import torch\n\nx = torch.zeros(1)\n")
    unused.write_text("import os\n")
    wide.write_text("x = [1,2]\n")
    assert corpus.is_clean_code([good]) is True
    assert corpus.is_clean_code([good, unused]) is False
    assert corpus.is_clean_code([wide]) is False
    assert corpus.is_clean_code([]) is None


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_a_report_is_opened(corpus: ModuleType, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text("<h1>What happened</h1>")
    bad.write_text("<h1>What happened</h1><script>undefined_function()</script>")
    assert corpus.opens_cleanly(good) is True
    assert corpus.opens_cleanly(bad) is False
    assert corpus.opens_cleanly(tmp_path / "none.html") is False


def test_an_issue_is_whole_within_the_limit_and_private(corpus: ModuleType) -> None:
    text = issue(corpus)
    assert corpus.is_whole_issue(text)
    assert not corpus.is_whole_issue(text.replace("**Expected:**", ""))
    assert not corpus.is_whole_issue(text + "<details>")
    assert not corpus.is_whole_issue(text + "x" * 65_536)
    assert not corpus.is_whole_issue(f"{text} {Path.home()}/train.py")
