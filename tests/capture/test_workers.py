"""Worker processes of a data loader are left alone, and what they send is named when it is bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from reprokit.capture.mode import CaptureStop
from reprokit.capture.session import Session
from reprokit.snapshot.format import load
from tests.capture.traps_checks import update


class Rows(Dataset[Any]):
    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.arange(4.0) + i
        if self.bad and i == 9:
            x = x / 0.0 * 0.0
        return x, torch.ones(1), torch._C._len_torch_function_stack()


def train(bad: bool) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    heights: list[int] = []
    for features, target, height in DataLoader(Rows(bad), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        heights += height.tolist()
        loss = nn.functional.mse_loss(model(features), target)
        update(optimizer, loss)
    return heights


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_nothing_is_watched_in_a_worker(tmp_path: Path) -> None:
    with Session(directory=tmp_path) as session:
        assert set(train(False)) == {0}
    assert session.snapshots == []


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_bad_batch_from_a_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureStop), Session(directory=tmp_path) as session:
        train(True)
    snapshot = load(session.snapshots[0])
    assert (snapshot.step, snapshot.failure.call, snapshot.failure.kind) == (2, None, "nan")
    assert snapshot.failure.input_name in ("features", "input")
    assert snapshot.failure.site is not None and "model(features)" in snapshot.failure.site.code
    assert snapshot.fidelity == "exact"
