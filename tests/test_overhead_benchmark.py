"""The benchmarks of cost: that they run, that what they measure really watches, and that it can be switched off.

No time is asserted here. A detector that notices nothing, or stays behind when switched off, would make every figure of
the benchmark wrong, so each is given a training that is bad.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from reprokit.capture.mode import CaptureStop
from tests.conftest import ROOT, Run, import_benchmark

BENCHMARKS = ROOT / "benchmarks"
DETECTORS = [name for name in import_benchmark("overhead").VARIANTS if name != "control"]

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield import_benchmark("overhead")
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_notices_when_on_and_is_gone_when_off(overhead: ModuleType, name: str) -> None:
    training = overhead.make("mlp")
    variant = overhead.VARIANTS[name](training)
    variant.warm_up(0.0)
    with torch.no_grad():
        next(training.model.parameters()).fill_(math.nan)
    training.step()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in training.model.modules())
    assert not training.optimizer._optimizer_step_pre_hooks
    variant.on()
    with pytest.raises((overhead.Noticed, CaptureStop, RuntimeError, ValueError)):
        variant.step()
    if isinstance(variant, overhead.Reprokit):
        variant.session.take_away()  # as the end of its block would


@pytest.mark.slow
def test_overhead_runs(run_python: Run, tmp_path: Path) -> None:
    files = ("--json", "result.json", "--markdown", "table.md")
    done = run_python(str(BENCHMARKS / "overhead.py"), "--quick", "--shapes", "mlp", *files)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == result
    rows = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in ("control", *DETECTORS)]
    shape = result["shapes"]["mlp"]
    assert shape["modules"] == 6
    assert set(shape["variants"]) == {"control", *DETECTORS}
    for name, row in shape["variants"].items():
        assert row["quadruples"] in ((2,) if name in ("control", "reprokit") else (1, 2))
        for clock in ("cpu", "wall"):
            assert 0 < row[clock]["low"] <= row[clock]["median"] <= row[clock]["high"]
        assert name in done.stderr
    every_step = shape["variants"]["reprokit_every_step"]
    assert every_step["copies"] == every_step["watched_steps"] > 0
    assert every_step["copy_bytes"] == shape["state_bytes"]
