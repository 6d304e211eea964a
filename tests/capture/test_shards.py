"""Spread parameters as one process sees them: what their last updates and waiting cost, and that they hold nobody."""

from __future__ import annotations

import pytest
import torch
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.rewind import updates
from reprokit.capture.rewind.updates import Updates
from torch import nn

from reprokit.program.ir import Mode

NUM_BYTES = 4 * 64 * 64  # of the parameters of a layer, and of its gradients


class Counted(Updates):
    """Counts the copies."""

    num_copies = 0

    def _copy(self, *args: object) -> bool:
        self.num_copies += 1
        return super()._copy(*args)  # type: ignore[arg-type]


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first copy of an optimizer is due."""
    monkeypatch.setattr(updates, "SHARE", 1e-9)


def layer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(64, 64, bias=False).parameters(), lr=0.1)


def train(kept: Updates, optimizer: torch.optim.Optimizer, num_steps: int, bad: int | None = None) -> None:
    """Update the parameters ``num_steps`` times; with an infinite learning rate in step ``bad``."""
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = torch.inf if step == bad else 0.1
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 1e-3)
        kept.begin(optimizer, step)
        optimizer.step()
        kept.end(optimizer, Entry(kinds.OPTIMIZER, optimizer, (), {}, Mode()))


def test_gradients_over_the_limit_cost_no_copy(once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "DEFAULT_STEP_BYTES", NUM_BYTES - 1)
    kept, optimizer = Counted(), layer()
    train(kept, optimizer, 6, bad=4)
    assert (kept.num_copies, kept.first_bad()) == (0, None)


def test_memory_that_is_full_is_let_go_until_a_copy_is_due(once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "DEFAULT_STEP_BYTES", 3 * NUM_BYTES)
    kept, optimizer = Counted(), layer()
    train(kept, optimizer, 8, bad=6)
    assert (kept.num_copies, kept.first_bad()) == (1, None)
    monkeypatch.setattr(updates, "SHARE", 1e9)
    (parameter,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        parameter.zero_()
    train(kept, optimizer, 2, bad=1)
    found = kept.first_bad()
    assert kept.num_copies == 3 and found is not None
    assert (found.update.step, found.is_same) == (1, True)


def test_a_bad_update_is_found_when_memory_is_full(once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "DEFAULT_STEP_BYTES", 3 * NUM_BYTES)
    kept, optimizer = Counted(), layer()
    train(kept, optimizer, 6, bad=2)
    found = kept.first_bad()
    assert found is not None and (found.update.step, kept.num_copies) == (2, 1)
