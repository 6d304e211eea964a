"""The benchmark of the reducer on small programs: that every case fails as planted, and what each tool answers.

No time is asserted. What is: that both tools are given the same calls, that the minifier is driven right (with a strict
check it keeps the failure), and that a row says so when a limit is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.program import interpreter
from reprokit.snapshot.format import load
from tests.conftest import import_benchmark

PARTS = ("masked_softmax", "zero_times_log_zero", "zero_by_zero")


@pytest.fixture(scope="module")
def shrink() -> ModuleType:
    return import_benchmark("shrink")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def graphs(shrink: ModuleType) -> Any:
    return shrink.graphs


def test_the_benchmark_of_graphs(
    shrink: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink, "_warm_up", lambda: None)
    file = tmp_path / "result.json"
    assert shrink.main(["--parts", "graphs", "--sizes", "24", "--repeats", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result == json.loads(file.read_text())
    assert [row["name"] for row in result["graphs"]] == list(PARTS)
    for row in result["graphs"]:
        ours, obvious, strict = row["reprokit"], row["minifier"], row["minifier_strict"]
        assert row["name"] in printed.err
        assert row["calls"] == row["graph_calls"] <= 24
        assert ours["is_right"] and ours["alone"] and ours["repro_fails"] and ours["one_minimal"]
        assert not shrink._over("", {**ours, "seconds": 0.0}, shrink.GRAPH_LIMITS)
        assert obvious["calls"] == 0 and not obvious["is_same"]
        assert strict["calls"] == 1 and strict["is_same"]
        assert strict["checks"] > ours["checks"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("cause", "most"), [("mask", 2.4)])
def test_the_command_runs_the_whole_step_once(
    shrink: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, most: float
) -> None:
    """Where the fix is tried. The runs of large parts of it are ``most`` whole steps altogether."""
    file = tmp_path / "snapshot.pt"
    shrink.run_one({"do": "capture", "cause": cause, "file": str(file), **shrink.TINY})
    size, runs = len(load(file).program.calls), list[int]()
    execute, modes = interpreter.execute, interpreter.Modes

    class CountedModes(modes):  # type: ignore[misc, valid-type]
        """Entered once in each run."""

        def __enter__(self) -> Any:
            runs.append(0)
            return super().__enter__()

    def counted(*arguments: Any) -> Any:
        runs[-1] += 1
        return execute(*arguments)

    monkeypatch.setattr(interpreter, "execute", counted)
    monkeypatch.setattr(interpreter, "Modes", CountedModes)
    assert main(["shrink", str(file), "-o", str(tmp_path / "results"), "--no-whatif", "-q"]) == 0
    assert sum(number >= size for number in runs) == 1
    large = [number for number in runs if number >= size // 8]  # half a micro-batch: more than any candidate has
    assert sum(large) <= most * size
    assert "A fix was tried on the captured step and helped" in (tmp_path / "results" / "issue.md").read_text()
