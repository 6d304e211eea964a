"""A short form of the benchmark of faults and kills, and what it finds when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.capture.world import World
from tests.conftest import import_benchmark

BENCHMARK = import_benchmark("faults")


def test_a_few_faults_and_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = BENCHMARK.main(["--faults", "12", "--kills", "3", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (code, found["findings"]) == (0, {})
    assert sum(found["counts"].values()) == 15


def test_a_changed_bit_and_a_mode_that_stays_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    due = World.is_due

    def disturbing(self: World, *given: Any) -> Any:
        torch.randn(1)
        return due(self, *given)

    plain = BENCHMARK.plain_trail(True)
    fault = BENCHMARK.Fault(World, "skip", World.skip, 1, RuntimeError, True)
    assert BENCHMARK.findings_of(fault, plain) == []
    monkeypatch.setattr(World, "is_due", disturbing)
    assert BENCHMARK.findings_of(fault, plain) == ["a bit was changed"]
    before = BENCHMARK.hooks()
    with torch.no_grad():
        assert BENCHMARK._differences(before, BENCHMARK.hooks())
