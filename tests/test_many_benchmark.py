"""The benchmark of several processes: a DDP cell and a healthy one, what is not run again, and the shares."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

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
