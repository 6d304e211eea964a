"""Threads, streams, folders, names and memory of the process that is watched."""

from __future__ import annotations

import io
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprokit
from reprokit.cli.app import main
from reprokit.errors import UsageError
from tests.capture.traps_checks import described_once, update


def train(steps: int = 8, bad: int | None = None) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.ones(5, 4) * (float("nan") if step == bad else 1.0)
        loss = model(x).pow(2).mean()
        update(optimizer, loss)


def in_thread(**options: Any) -> None:
    thread = threading.Thread(target=train, kwargs=options)
    thread.start()
    thread.join()


def test_a_second_training_in_a_thread_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reprokit.capture(tmp_path / "s.pt"):
        train()  # whose thread lives on
        in_thread()
        in_thread()
    assert capsys.readouterr().err == "reprokit: a second thread trains, which is not watched\n"


def test_no_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with reprokit.capture(tmp_path / "s.pt") as watched:
        train(bad=3)
    assert len(watched.snapshots) == 1 and capsys.readouterr().out == ""


def test_a_working_folder_that_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with described_once(), reprokit.capture(tmp_path / "s.pt") as absolute:
        folder.rmdir()
        train(bad=3)
    assert [path.name for path in absolute.snapshots] == ["s.pt"]
    with pytest.raises(UsageError, match="does not exist any more"), reprokit.capture():
        pass
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    assert main(["capture", str(tmp_path / "train.py")]) == 2
    assert "reprokit: error: the current folder does not exist any more\n" in said.getvalue()
    os.chdir(tmp_path)


def test_a_long_name_is_no_problem(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / ("x" * 240 + ".pt"), quiet=True) as watched:
        train(bad=2)
    assert len(watched.snapshots) == 1


def held(batches: list[int], *, evaluation: bool, kind: str) -> int:
    """The most bytes of batches of the past that the capture keeps alive at any time."""
    model, most = nn.Linear(8, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
    results = []
    train(3)
    for mib in batches:
        x = torch.zeros(mib * 2**15, 8)
        most = max(most, sum(size for reference, size in alive if reference() is not None))
        alive.append((weakref.ref(x), mib))
        with torch.set_grad_enabled(not evaluation):
            y = model(x) if kind == "module" else nn.functional.linear(x, model.weight)
            y = y.mean()
        if evaluation:
            results.append(y)
        else:
            y.backward()
            optimizer.step()
        del y
    return most


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("sizes", [[60] * 20, [1] * 8 + [60] * 14], ids=["equal", "growing"])
def test_batches_of_steps_that_wait(sizes: list[int], kind: str) -> None:
    with reprokit.capture(quiet=True, history=1000):
        assert held(sizes, evaluation=False, kind=kind) <= 256 + 2 * 60


@pytest.mark.parametrize("kind", ["module", "function"])
def test_batches_of_an_evaluation_whose_results_are_kept(kind: str) -> None:
    with reprokit.capture(quiet=True):
        assert held([20] * 40, evaluation=True, kind=kind) <= 256 + 20
