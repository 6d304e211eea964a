"""Hooks of the user's: checks that raise over a bad value, hooks that change values, and those that do nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprokit.capture.session import Session
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    batches,
    check_caught,
    described_once,
    ending,
    fidelity,
    rooted_loss,
    where,
)

Setup = Callable[["Net"], Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
]


class Net(nn.Module):
    """Divides by ``count`` between its layers and leaves out what is NaN; ``watch`` is called with the quotient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.second = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 2)
        self.watch: Callable[[torch.Tensor], Any] = lambda hidden: None

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x) * (count / count))
        self.watch(hidden)
        return self.second(torch.where(torch.isnan(hidden), 0.0, hidden))


def finite_or_raise(tensor: Any) -> None:
    for item in tensor if isinstance(tensor, tuple) else (tensor,):
        if isinstance(item, torch.Tensor) and not torch.isfinite(item).all():
            raise RuntimeError("not finite")


def on_modules(method: str, position: int) -> Setup:
    """A check in a hook of every module, of the argument at this position."""

    def setup(model: Net) -> None:
        for part in model.modules():
            getattr(part, method)(lambda *args: finite_or_raise(args[position]))

    return setup


def on_parameters(model: Net) -> None:
    for parameter in model.parameters():
        parameter.register_hook(finite_or_raise)


def on_hidden(model: Net) -> None:
    model.watch = lambda hidden: hidden.register_hook(finite_or_raise)


def in_forward(model: Net) -> None:
    model.watch = finite_or_raise


def anomaly(model: Net) -> contextlib.AbstractContextManager[None]:
    return torch.autograd.detect_anomaly(check_nan=True)


def nothing(model: Net) -> None:
    """No hook."""


def run(setup: Setup, forward_bad: bool) -> list[torch.Tensor]:
    """A loop whose fourth step goes bad inside the model or, with a finite loss, in its backward pass."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with setup(model) or contextlib.nullcontext():
        for step, x, y in batches():
            is_bad = step == BAD_STEP
            logits = model(x, torch.full((), 0.0 if is_bad and forward_bad else 1.0))
            optimizer.zero_grad()
            rooted_loss(logits, y, is_bad and not forward_bad).backward()
            optimizer.step()
    return ending(model)


def raised(setup: Setup, folder: Path, *, forward_bad: bool) -> Snapshot:
    """The snapshot of a run that a check has ended."""
    with described_once(), pytest.raises(RuntimeError), Session(directory=folder) as session:
        run(setup, forward_bad)
    return load(session.snapshots[0])


@pytest.mark.parametrize(
    "setup",
    [
        on_modules("register_full_backward_hook", 1),
        on_modules("register_full_backward_pre_hook", 1),
        on_parameters,
        on_hidden,
        anomaly,
    ],
)
def test_a_check_of_gradients_that_raises_is_not_the_failure(setup: Setup, tmp_path: Path) -> None:
    snapshot = raised(setup, tmp_path, forward_bad=False)
    assert where(snapshot) == (BAD_STEP, "backward", "torch.Tensor.sqrt")
    assert snapshot.observed_at == "gradient"
    assert fidelity(snapshot) == EXACT


@pytest.mark.parametrize(
    "setup", [on_modules("register_forward_hook", 2), on_modules("register_forward_pre_hook", 1), in_forward]
)
def test_a_check_of_values_that_raises_is_not_the_failure(setup: Setup, tmp_path: Path) -> None:
    snapshot = raised(setup, tmp_path, forward_bad=True)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.Tensor.div")
    assert snapshot.observed_at == "output"
    assert fidelity(snapshot) == EXACT


def test_a_norm_that_must_be_finite(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with described_once(), pytest.raises(RuntimeError, match="non-finite"), Session(directory=tmp_path) as session:
        for step, x, _ in batches():
            optimizer.zero_grad()
            (model(x).pow(2).mean() * (1e25 if step == BAD_STEP else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
    snapshot = load(session.snapshots[0])
    assert where(snapshot) == (BAD_STEP, "optimizer", "torch._foreach_norm")
    assert fidelity(snapshot) == EXACT


@pytest.mark.parametrize("is_hook", [True, False])
def test_an_exception_that_no_bad_value_explains_stays_the_failure(is_hook: bool, tmp_path: Path) -> None:
    """The infinite mask was asked for."""

    def stop(hidden: torch.Tensor) -> None:
        if (hidden * 0 + torch.tensor([0.0, -math.inf]).softmax(0).sum()).isfinite().all():
            raise RuntimeError("enough")

    def setup(model: Net) -> None:
        if is_hook:
            model.middle.register_forward_hook(lambda module, args, output: stop(output))
        else:
            model.watch = stop

    snapshot = raised(setup, tmp_path, forward_bad=False)
    assert (snapshot.observed_at, snapshot.failure.exception) == ("exception", ("RuntimeError", "enough"))
    assert "does not raise it" in str(snapshot.fidelity_note)  # Python code did, and a program holds none


def doubling(model: Net) -> None:
    model.middle.register_forward_hook(lambda module, args, output: 2 * output)


def scaling_gradients(model: Net) -> None:
    model.middle.register_full_backward_hook(lambda module, given, out: tuple(0.5 * grad for grad in given))


@pytest.mark.parametrize(
    "setup",
    [
        on_modules("register_full_backward_hook", 0),
        on_modules("register_full_backward_pre_hook", 0),
        doubling,
        scaling_gradients,
        nothing,
    ],
)
def test_hooks_that_do_not_raise_stay_in_the_replay(setup: Setup, tmp_path: Path) -> None:
    snapshot = check_caught(lambda: run(setup, forward_bad=False), tmp_path)
    assert where(snapshot) == (BAD_STEP, "backward", "torch.Tensor.sqrt")
    assert fidelity(snapshot) == EXACT
