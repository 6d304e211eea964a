"""Scoring of the corpus benchmark: a pure function of a case and of what the commands printed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.conftest import import_benchmark


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
