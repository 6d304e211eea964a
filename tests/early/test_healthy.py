"""Healthy runs give no event, and end with the same bits as without capture."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import reprokit
from tests.conftest import import_benchmark

HEALTHY = import_benchmark("healthy_runs")


RUNS = (
    "warm_restarts", "gan", "tiny_batches", "gaussian_likelihood", "wgan_gp", "lstm_clipped", "mixed_precision",
    "sparse_activations",
)  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_gives_no_event(name: str, tmp_path: Path) -> None:
    """Some runs of the benchmark `watching.py`, with a seed that no rule was made with."""
    events: list[reprokit.TrainingEvent] = []
    torch.manual_seed(1)
    random.seed(1)
    output = tmp_path / "run.repro.pt"
    with reprokit.capture(output, on=("nonfinite", "early"), on_event=events.append, quiet=True) as session:
        getattr(HEALTHY, name)(1)
    assert not events
    assert not session.snapshots
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_loss_that_the_loop_writes_into_after_the_step(is_scaled: bool, tmp_path: Path) -> None:
    """For its log, as a sum over processes does; numbers are looked at some steps later."""
    events: list[reprokit.TrainingEvent] = []
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=is_scaled)
    with reprokit.capture(tmp_path / "run.pt", on=("early",), on_event=events.append, quiet=True):
        for step in range(80):
            x = torch.randn(16, 8)
            loss = (model(x) - x.tanh().sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            loss.detach().mul_(1e12 if step > 60 else 1.0)
    assert not events


def _trained(folder: Path | None) -> list[torch.Tensor]:
    """The parameters, gradients and generator state after a run, watched if there is a folder."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loop() -> None:
        for step in range(120):
            x = torch.randn(16, 8)
            y = x.sum(1, keepdim=True) * (1e4 if step == 90 else 1.0)
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    if folder is None:
        loop()
    else:
        on = ("nonfinite", "early")
        with reprokit.capture(folder / "run.pt", on=on, after="continue", quiet=True):
            loop()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    versions = torch.tensor([tensor._version for tensor in (*model.parameters(), *model.buffers())])
    return [*model.state_dict().values(), *gradients, versions, torch.get_rng_state()]


def test_a_watched_run_ends_with_the_bits_of_a_bare_one(tmp_path: Path) -> None:
    pairs = zip(_trained(None), _trained(tmp_path), strict=True)
    assert all(torch.equal(bare, watched) for bare, watched in pairs)
