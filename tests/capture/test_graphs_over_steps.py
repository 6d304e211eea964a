"""Graphs that one step makes and a later one goes on with, while parameters are updated in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from reprokit.capture.save import BEGUN_BEFORE
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import described_once, update


def recurrent(cell: nn.Module) -> None:
    """The state of a cell is handed on with its graph: the second backward pass goes through the first one's."""
    head = nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    state = torch.zeros(3, 8)
    for _ in range(4):
        state = cell(torch.randn(3, 4), state)
        loss = head(state).square().mean()
        update(optimizer, loss)


def adversarial(make: Callable[..., torch.optim.Optimizer]) -> None:
    """The critic is updated between the forward pass that both losses share and the backward pass of the second."""
    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = make(critic.parameters(), lr=1e-3), make(generator.parameters(), lr=1e-3)
    for _ in range(3):
        score = critic(generator(torch.randn(6, 4))).mean()
        loss = -score
        first.zero_grad()
        score.backward(retain_graph=True)
        first.step()
        update(second, loss)


FAILING = {
    "gru": (lambda: recurrent(nn.GRUCell(4, 8)), "a second time"),
    "sgd": (lambda: adversarial(torch.optim.SGD), "modified by an inplace operation"),
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("watch", ["every-step", "sampled"])
def test_an_error_of_a_graph_that_crosses_an_update_is_exact(tmp_path: Path, name: str, watch: str) -> None:
    loop, message = FAILING[name]
    snapshot = captured(loop, tmp_path, watch)
    exception = snapshot.failure.exception
    assert snapshot.fidelity == "exact", snapshot.fidelity_note
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (1, "backward", "torch.Tensor.backward")
    assert exception is not None and message in exception[1]
    assert any(call.is_optimizer_step for call in snapshot.program.calls)


@pytest.mark.parametrize("watch", ["every-step", "sampled"])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell])
def test_a_graph_from_before_the_last_copy_is_named(tmp_path: Path, watch: str, cell: type[nn.RNNCellBase]) -> None:
    def loop() -> None:
        model, head = cell(4, 8), nn.Linear(8, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        state = torch.zeros(3, 8)
        for step in range(9):
            state = model(torch.randn(3, 4), state if step == 8 else state.detach())
            update(optimizer, head(state).square().mean())

    snapshot = captured(loop, tmp_path, watch, history=1)
    assert snapshot.fidelity != "exact" and str(snapshot.fidelity_note).startswith(BEGUN_BEFORE)


def windows(bad_step: int) -> None:
    """Backpropagation through windows of four steps: the head is updated in each, the cell at the end of a window."""
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 1)
    slow, quick = torch.optim.SGD(cell.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    state = torch.zeros(3, 8)
    for step in range(bad_step + 2):
        if step % 4 == 0:
            state = state.detach()
        state = cell(torch.randn(3, 4), state)
        loss = head(state).square().mean()
        if step == bad_step:
            loss = loss + (state - state).sum().sqrt()  # finite, with a NaN as its gradient
        quick.zero_grad()
        loss.backward(retain_graph=step % 4 != 3)
        quick.step()
        if step % 4 == 3:
            slow.step()
            slow.zero_grad()


@pytest.mark.parametrize("watch", ["every-step", "sampled"])
def test_a_gradient_that_another_optimizer_uses_later_is_found_where_it_was_made(tmp_path: Path, watch: str) -> None:
    snapshot = captured(lambda: windows(11), tmp_path, watch, history=50)
    assert snapshot.fidelity == "exact", snapshot.fidelity_note
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (11, "backward", "torch.Tensor.sqrt")


@pytest.mark.parametrize("watch", ["sampled", "every-step"])
def test_a_batch_that_two_optimizers_share_is_made_again(tmp_path: Path, watch: str) -> None:
    """One call of the generator serves the critic's step and then its own, whose gradient is infinite."""
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=1e-2) for model in (critic, generator))
    with reprokit.capture(directory=tmp_path, history=8, watch=watch, after="continue", quiet=True) as session:
        for step in range(24):
            fake = generator(torch.randn(8, 4))
            fake = fake + (fake * 0).sqrt() if step == 20 else fake
            update(first, critic(torch.randn(8, 4)).mean() - critic(fake.detach()).mean())
            update(second, -critic(fake).mean())
    snapshot = load(session.snapshots[0])
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (20, "exact", "torch.Tensor.sqrt")


def test_a_healthy_loop_over_windows_is_left_alone(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "failed.pt", after="continue", quiet=True):
        windows(-1)
        windows(100)
    assert not list(tmp_path.iterdir())


def captured(loop: Callable[[], None], folder: Path, watch: str, history: int | None = None) -> Snapshot:
    torch.manual_seed(0)
    path = folder / "failed.pt"
    with (
        described_once(),
        contextlib.suppress(RuntimeError),
        reprokit.capture(path, watch=watch, after="continue", quiet=True, history=history),  # type: ignore[arg-type]
    ):
        loop()
    return load(path)
