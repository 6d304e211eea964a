"""Failures of more than one call, captured from real loops: aliasing, second derivatives, checkpoints, chance, custom
functions. The result fails the same way, is what an expert would write, and its repro runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import reprokit
from reprokit.locate.blame import locate
from reprokit.locate.kinds import Key
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot, load
from tests.shrink.failing import ending_of, minimum_of
from tests.shrink.test_minimal import assert_minimal

Hidden = Callable[[torch.Tensor], torch.Tensor]
BAD_STEP = 2


class Net(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Hidden) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4, bias=False)
        self.last = nn.Linear(4, 3)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


def loop(between: Hidden) -> None:
    """Four steps of training; in the third one row of the batch is zero."""
    torch.manual_seed(0)
    model = Net(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(6, 5)
        if step == BAD_STEP:
            x[3] = 0.0
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


class BadBackward(torch.autograd.Function):
    """A norm whose gradient divides by it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return norm.clamp(min=0.1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, norm = ctx.saved_tensors
        return grads[0] * x / norm


class BadForward(torch.autograd.Function):
    """A logarithm with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.log(x) * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2 / ctx.saved_tensors[0]


class Scaled(torch.autograd.Function):
    """Good in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def root(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.pow(2).sum(-1, keepdim=True).sqrt() * hidden


def written_view(hidden: torch.Tensor) -> torch.Tensor:
    """A piece of what a gradient needs is written through a view of it."""
    gate = torch.sigmoid(hidden)
    part = gate.view(-1, 2, 2)[:, 0]
    open_gate = (gate * 3).relu()
    if not hidden[3].detach().any():
        part.mul_(2.0)
    return open_gate + gate


def dropped(hidden: torch.Tensor) -> torch.Tensor:
    """Only what chance keeps is scaled up, beyond the largest number."""
    return F.dropout(torch.where(hidden.abs().sum(-1, keepdim=True) == 0, 2.5e38, hidden), 0.4)


def loop_with_second_derivative() -> None:
    """A gradient penalty on a root: its gradient is finite, that of the gradient is not."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([scale], lr=0.01)
    for step in range(4):
        x = torch.rand(6, 5) + 1
        if step == BAD_STEP:
            x[3, 2] = 0.0
        x.requires_grad_()
        (grad,) = torch.autograd.grad((x * scale).pow(1.5).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (grad.sum() + (x * scale).mean()).backward()
        optimizer.step()


# origin, node, calls, elements, checks at most, how the repro ends
CASES: dict[str, tuple[Callable[[], None], tuple[Any, ...]]] = {
    "custom backward": (
        lambda: loop(lambda h: BadBackward.apply(h) * h),
        ("torch.Tensor.div", None, 1, 2, 8, "AssertionError"),
    ),
    "custom forward": (
        lambda: loop(lambda h: BadForward.apply(h.abs())),
        ("torch.log", None, 1, 1, 6, "AssertionError"),
    ),
    "before a custom function": (
        lambda: loop(lambda h: Scaled.apply(root(h), 3.0)),
        ("torch.Tensor.sqrt", "SqrtBackward0", 1, 2, 8, "AssertionError"),
    ),
    "after a custom function": (
        lambda: loop(lambda h: root(Scaled.apply(h, 3.0))),
        ("torch.Tensor.sqrt", "SqrtBackward0", 1, 2, 8, "AssertionError"),
    ),
    "checkpointed": (
        lambda: loop(lambda h: checkpoint(root, h, use_reentrant=False)),
        ("torch.Tensor.sqrt", "SqrtBackward0", 1, 2, 8, "AssertionError"),
    ),
    "checkpointed with reentry": (
        lambda: loop(lambda h: checkpoint(root, h, use_reentrant=True)),
        ("torch.Tensor.sqrt", "SqrtBackward0", 1, 2, 8, "AssertionError"),
    ),
    "written through a view": (
        lambda: loop(written_view),
        ("torch.Tensor.backward", None, 2, 1, 50, "RuntimeError"),
    ),
    "by chance": (
        lambda: loop(dropped),
        ("torch.nn.functional.dropout", None, 1, 1, 15, "AssertionError"),
    ),
    "second derivative": (
        loop_with_second_derivative,
        ("torch.autograd.grad", "PowBackward0", 1, 1, 65, "AssertionError"),
    ),
}


def captured(case: Callable[[], None], folder: Path) -> Snapshot:
    try:
        with reprokit.capture(folder / "snapshot.pt") as session:
            case()
    except RuntimeError:  # goes on to the user
        pass
    return load(session.snapshots[0])


def key_of(found: Snapshot | Reduction) -> Key:
    failure = locate(found.program, found.tensors)
    assert failure is not None
    return failure.key()


@pytest.mark.parametrize("name", CASES)
def test_captured_failures_become_what_an_expert_would_write(name: str, tmp_path: Path) -> None:
    case, (call, node, calls, elements, checks, ending) = CASES[name]
    snapshot = captured(case, tmp_path)
    assert snapshot.step == BAD_STEP
    assert (snapshot.failure.call, snapshot.failure.backward_node) == (call, node)
    reduction = minimum_of(snapshot)
    summary = reduction.summary()
    assert key_of(reduction) == key_of(snapshot)
    assert (summary["calls"], summary["elements"], summary["one_minimal"]) == (calls, elements, True)
    assert summary["checks"] <= checks
    assert ending_of(reduction) == ending
    assert_minimal(reduction)


def test_a_random_outcome_is_the_same_in_every_process(tmp_path: Path) -> None:
    reduction = minimum_of(captured(CASES["by chance"][0], tmp_path))
    (call,) = reduction.program.calls
    assert call.mode.rng is not None
    for seed in range(6):  # whatever state the process is in
        torch.manual_seed(seed)
        assert locate(reduction.program, reduction.tensors) is not None
        assert ending_of(reduction) == "AssertionError"
