"""Capture over training loops of every shape: healthy ones end bit-identical, failing ones are captured exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as optimizers

from reprokit.capture.mode import CaptureStop
from reprokit.capture.session import Session
from reprokit.locate.blame import locate
from reprokit.snapshot.format import load
from tests.capture.loops import LOOPS, Loop


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> object:
    call, backward = torch.nn.Module.__call__, torch.autograd.backward
    zero_grad, clip = torch.optim.Optimizer.zero_grad, torch.nn.utils.clip_grad_norm_
    yield
    assert torch.nn.Module.__call__ is call and "__call__" not in torch.nn.Sequential.__dict__
    assert torch.autograd.backward is backward and torch.optim.Optimizer.zero_grad is zero_grad
    assert torch.nn.utils.clip_grad_norm_ is clip
    assert not optimizers._global_optimizer_pre_hooks and not optimizers._global_optimizer_post_hooks
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_healthy_run_ends_bit_identical(loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = loop(False)
    with Session(directory=tmp_path) as session:
        watched = loop(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert session.snapshots == [] and list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_failing_run_is_captured_exactly(loop: Loop, tmp_path: Path) -> None:
    step, phase, calls = LOOPS[loop]
    with pytest.raises(CaptureStop) as stop, Session(directory=tmp_path) as session:
        loop(True)
    assert stop.value.code == 3
    snapshot = load(session.snapshots[0])
    failure = snapshot.failure
    assert (snapshot.step, failure.phase) == (step, phase)
    assert failure.call in calls
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert failure.site is not None and failure.site.file.endswith(("loops.py", "traps_checks.py"))
    again = locate(snapshot.program, snapshot.tensors)
    assert again == failure


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_after_a_capture_training_goes_on_as_if_nothing_had_happened(loop: Loop, tmp_path: Path) -> None:
    plain = loop(True)
    with Session(directory=tmp_path, after="continue") as session:
        watched = loop(True)
    assert len(session.snapshots) == 1
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(torch.nan_to_num(a.double(), 7.0), torch.nan_to_num(b.double(), 7.0))
