"""The benchmarks of cost: that they run, that what they measure really watches, and that it can be switched off.

No time is asserted here. A detector that notices nothing, or stays behind when switched off, would make every figure of
the benchmark wrong, so each is given a training that is bad.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from reprokit.capture.mode import CaptureStop
from tests.conftest import ROOT, import_benchmark

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
