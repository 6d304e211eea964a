"""What a loop does with a result, or how it ends, between the failing step and the moment in which it is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from reprokit.capture.options import WATCH
from reprokit.snapshot.format import load
from tests.capture.traps_checks import update


class Head(nn.Module):
    """A model that returns a dict, to which the loop adds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not torch.isfinite(x).all():
            raise ValueError("the model refuses what is not finite")
        if not all(parameter.isfinite().all() for parameter in self.parameters()):
            raise ValueError("the model is ruined")
        return {"logits": self.fc(x), "scale": x.abs().mean()}


def ended_by_an_exception() -> None:
    """The step after the bad update raises, in training and when it is played."""
    model, optimizer = made()
    for step in range(8):
        logits = model(torch.ones(4, 3))["logits"]
        total = (logits * (0.0 if step == 5 else 1.0)).square().sum()
        update(optimizer, total.sqrt() + 1.0)


def read_after_backward() -> None:
    """The loop reads its bad loss after the backward call, between two that add up."""
    model, optimizer = made()
    for step in range(8):
        for part in range(3):
            loss = model(torch.ones(4, 3))["logits"].square().mean()
            zero = torch.tensor(0.0 if (step, part) == (5, 1) else 1.0)
            loss = loss * (zero / zero)
            loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad()


def scale_collapses() -> None:
    """A grad scaler leaves the updates of several bad losses out, until its scale is too small."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(9):
        loss = model(torch.ones(4, 3))["logits"].square().mean()
        zero = torch.tensor(0.0 if step >= 5 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss / zero).backward()
        scaler.step(optimizer)
        scaler.update()


def made() -> tuple[Head, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Head()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("watch", WATCH)
@pytest.mark.parametrize("loop", [ended_by_an_exception, read_after_backward, scale_collapses])
def test_the_failing_step_is_saved(loop: Callable[[], None], watch: str, tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), reprokit.capture(tmp_path / "x.pt", watch=watch, quiet=True):  # type: ignore[arg-type]
        loop()
    found = load(tmp_path / "x.pt")
    place = (5, 1) if loop is read_after_backward else (5, 0)
    assert (found.step, found.micro_step, found.fidelity) == (*place, "exact"), found.fidelity_note
    assert found.failure.call is not None
