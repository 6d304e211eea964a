"""Healthy runs give no event, end with the same bits as without capture, and cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reprokit
from reprokit.capture.early.detectors import BATCH, Alarm, Detectors, Numbers
from reprokit.capture.options import Watch
from tests.early import healthy


@pytest.mark.parametrize("run", healthy.RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_run_gives_no_event(run: Callable[[], None], seed: int, tmp_path: Path) -> None:
    events: list[reprokit.TrainingEvent] = []
    torch.manual_seed(seed)
    output = tmp_path / "run.repro.pt"
    with reprokit.capture(output, on=("nonfinite", "early"), on_event=events.append, quiet=True) as session:
        run()
    assert not events
    assert not session.snapshots
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("watch", ["sampled", "deferred"])
def test_a_loss_that_the_loop_writes_into_after_the_step(watch: Watch, tmp_path: Path) -> None:
    """For its log, as a sum over processes does; numbers are looked at some steps later."""
    events: list[reprokit.TrainingEvent] = []
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=watch == "sampled")
    with reprokit.capture(tmp_path / "run.pt", on=("early",), watch=watch, on_event=events.append, quiet=True):
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


def test_detectors_take_five_microseconds_a_step_at_most() -> None:
    alarms: list[Alarm] = []
    detectors = Detectors(("spike", "explosion", "dead", "scale"), alarms.append)
    norm, scale = torch.tensor(0.5), torch.tensor(1024.0)
    rows = [Numbers(n, n, 1.0 + (n % 7) / 10, 0.1, norm, scale, 0.0, None, {}) for n in range(2000)]
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for begin in range(0, len(rows), BATCH):
            detectors.see(rows[begin : begin + BATCH])
        best = min(best, (time.thread_time() - started) / len(rows))
    assert not alarms
    assert best < 5e-6 * 3  # three times the number of docs/watching.md: test machines are busy
