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

from reprokit.capture.save import OTHER_GRADIENTS
from reprokit.capture.session import Session
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    batches,
    check_caught,
    check_exact,
    described_once,
    ending,
    fidelity,
    rooted_loss,
    silent_root,
    update,
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


def run(setup: Setup, forward_bad: bool) -> list[torch.Tensor]:
    """A loop whose fourth step goes bad inside the model or, with a finite loss, in its backward pass."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with setup(model) or contextlib.nullcontext():
        for step, x, y in batches():
            is_bad = step == BAD_STEP
            logits = model(x, torch.full((), 0.0 if is_bad and forward_bad else 1.0))
            update(optimizer, rooted_loss(logits, y, is_bad and not forward_bad))
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
    assert "running the file does not" in str(snapshot.fidelity_note)  # Python code did, and a program holds none


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
    ],
)
def test_hooks_that_do_not_raise_stay_in_the_replay(setup: Setup, tmp_path: Path) -> None:
    check_exact((BAD_STEP, "backward", "torch.Tensor.sqrt"), lambda: run(setup, forward_bad=False), tmp_path)


def double_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "leaf": lambda model: model.second.weight.register_hook(lambda grad: 3 * grad),
    "backward": lambda model: model.second.register_full_backward_hook(lambda _, given, __: (2 * given[0],)),
    "backward pre": lambda model: model.second.register_full_backward_pre_hook(lambda _, out: (2 * out[0],)),
    "accumulated": lambda model: model.second.weight.register_post_accumulate_grad_hook(double_gradient),
}


def late_root(logits: torch.Tensor, first: nn.Linear, bad: bool) -> torch.Tensor:
    """A loss whose gradient is NaN for one layer only."""
    return logits.pow(2).mean() + silent_root(first.weight, bad)


@pytest.mark.parametrize(("watch", "is_late"), [("sampled", False), ("every-step", False), ("sampled", True)])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_hooks_change_are_not_exact(change: str, watch: Any, is_late: bool, tmp_path: Path) -> None:
    """Also in a step that is found late, after others with these hooks."""

    def loop() -> list[torch.Tensor]:
        model = Net()
        CHANGES[change](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, x, _ in batches(9):
            update(optimizer, late_root(model(x, torch.ones(())), model.first, step == bad_step))
        return ending(model)

    bad_step, history = (7, 50) if is_late else (BAD_STEP, None)
    snapshot = check_caught(loop, tmp_path, watch=watch, history=history)
    assert where(snapshot) == (bad_step, "backward", "torch.Tensor.sqrt")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("close", OTHER_GRADIENTS)


def test_a_failure_that_a_backward_hook_makes(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model, num_calls = Net(), [0]

        def divide(module: nn.Module, given: Any, out: Any) -> Any:
            num_calls[0] += 1
            return (given[0] / (0.0 if num_calls[0] > BAD_STEP else 1.0),)

        model.second.register_full_backward_hook(divide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _, x, _ in batches():
            update(optimizer, model(x, torch.ones(())).pow(2).mean())
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert (snapshot.step, snapshot.failure.call, snapshot.fidelity) == (BAD_STEP, None, "unfaithful")
    assert "did not occur again" in str(snapshot.fidelity_note) and OTHER_GRADIENTS in str(snapshot.fidelity_note)
