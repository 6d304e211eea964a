"""The benchmark of several processes: a DDP cell and a healthy one, what is not run again, and the shares."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import import_benchmark


@pytest.fixture
def many() -> ModuleType:
    """The benchmark."""
    return import_benchmark("many")


@pytest.mark.slow
def test_two_cells_are_judged_and_not_run_again(
    many: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "many.json"
    chosen = ["--kinds", "ddp", "--ranks", "2", "--failures", "healthy", "late", "--culprits", "1", "--json", str(file)]
    assert many.main(chosen) == 0
    matrix = json.loads(file.read_text())["matrix"]
    assert [(row["failure"], row["verified"]) for row in matrix["rows"]] == [("healthy", True), ("late", True)]
    assert {found["share"] for found in matrix["shares"].values()} == {1.0}
    monkeypatch.setattr(many, "_group", None)
    assert many.main(chosen) == 0


def row(many: ModuleType, **given: Any) -> Any:
    return many.Row("ddp", 2, **{"failure": "late", "culprit": 1, **given})


def test_what_a_group_leaves_is_run_by_another_one(many: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cell that a group did not end is the one that hangs."""
    groups: list[tuple[str, ...]] = []

    def group(folder: Path, ranks: int, part: str, kind: str, *cells: str) -> str:
        groups.append(cells)
        ended = [cell for cell in cells if cell != "late-0"][:1]
        for name in (f"{cell}.{rank}.done" for cell in ended for rank in range(2)):
            (folder / name).touch()
        return "hangs"

    monkeypatch.setattr(many, "_group", group)
    rows = [row(many, failure=failure, culprit=0) for failure in ("forward", "late", "backward")]
    found = {measured.failure: measured for measured in many._measured(rows)}
    assert groups == [("forward-0", "late-0", "backward-0"), ("backward-0",)]
    assert [failure for failure, measured in found.items() if measured.hangs] == ["late"]
    assert found["forward"].problem == found["backward"].problem == "0 snapshots"


def test_the_shares_are_compared_with_the_aims(many: ModuleType) -> None:
    right = {"rank_ok": True, "step_ok": True, "origin_ok": True, "verified": True}
    rows = [row(many, **right) for _ in range(9)]
    assert many._summary([*rows, row(many, **{**right, "verified": False})])["missed"] == []
    missed = many._summary([*rows, row(many, hangs=True), row(many, failure="healthy")])["missed"]
    assert missed == ["right rank", "healthy runs with the same bits", "without a hang"]
    assert "right rank" in many._table(many._summary(rows)) and "ddp           9 of 9" in many._table(
        many._summary(rows)
    )
