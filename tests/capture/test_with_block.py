"""``with reprokit.capture():`` in a program or notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reprokit
from reprokit.errors import UsageError
from reprokit.snapshot.format import load
from tests.capture.loops import functional_loss, learning_rate


def test_the_block_is_left_at_the_failure_and_the_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reached_end = False
    with reprokit.capture() as session:
        functional_loss(True)
        reached_end = True
    assert not reached_end
    assert [path.name for path in session.snapshots] == ["training-step3.repro.pt"]
    assert load(session.snapshots[0]).failure.call == "torch.Tensor.div"
    assert "reprokit shrink" in capsys.readouterr().err


def test_an_existing_file_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    target = tmp_path / "mine.pt"
    target.write_text("precious")
    with pytest.raises(UsageError), reprokit.capture(target):
        raise AssertionError("must not run")
    assert target.read_text() == "precious"


def test_captures_repeat(tmp_path: Path) -> None:
    for name in ("first.pt", "again.pt"):
        with reprokit.capture(tmp_path / name) as session:
            learning_rate(True)
        assert session.snapshots == [tmp_path / name]


def test_importing_reprokit_does_not_import_torch() -> None:
    code = "import sys, reprokit; assert callable(reprokit.capture); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failure_in_the_very_first_step_of_a_new_model(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "first.pt") as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = (model(torch.ones(3, 2)) * 0).sqrt().sum()
        loss.backward()
        optimizer.step()
    snapshot = load(session.snapshots[0])
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (0, "backward", "torch.Tensor.sqrt")
    assert snapshot.fidelity == "exact"
