"""What is saved is what failed: contents from before the failure in memory of their own, in the step training saw."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture import failures
from reprokit.capture.rescue import Made
from reprokit.capture.session import Session
from reprokit.program.memory import same_bits
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import (
    EXACT,
    batches,
    classify,
    described_once,
    divided_loss,
    fidelity,
    rooted_loss,
    tensors_in,
    update,
)

BAD, STEPS = 11, 20


# -- tensors of a snapshot ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model with a weight used twice, and a bias that is a part of another parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.whole = nn.Parameter(torch.randn(6))
        self.first.bias = nn.Parameter(self.whole.data[1:5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh()) + self.whole[4:]


class Run:
    """A training of `Tied` that fails at step `BAD`; ``starts`` are the parameters that each step began with."""

    def __init__(self, loss: Callable[..., torch.Tensor] = divided_loss) -> None:
        self.model = Tied()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loss = loss
        self.starts: list[dict[str, torch.Tensor]] = []
        self.given: list[torch.Tensor] = []

    def __call__(self) -> None:
        for step, x, y in batches(STEPS):
            self.starts.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
            self.given += (x, y)
            self.step(step, x, y)

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        update(self.optimizer, self.loss(self.model(x), y, step == BAD))

    def live(self) -> Iterator[torch.Tensor]:
        """Every tensor that training goes on with."""
        yield from self.given
        yield from (p for p in self.model.parameters())
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        yield from (t for state in self.optimizer.state.values() for t in tensors_in(state))


class Optimizer(Run):
    """The update itself goes wrong, which shows later."""

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.param_groups[0]["lr"] = float("nan") if step == BAD else 1e-2
        update(self.optimizer, classify(self.model, x, y))


class ByHand(Run):
    """The loop updates its parameters by itself."""

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        rooted_loss(self.model(x), y, step == BAD).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 1e-2 * parameter.grad
                parameter.grad = None


class Raising(Run):
    """The step ends with an exception."""

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        update(self.optimizer, F.cross_entropy(self.model(x), y + (2 if step == BAD else 0)))


def run_with(run: Run, folder: Path, *, is_sharded: bool = False, **options: Any) -> tuple[Snapshot, Snapshot]:
    """The snapshot in memory, which must share none with live tensors, and the one in the file."""
    made: list[Snapshot] = []

    def snapshot_of(training: Any, *arguments: Any) -> Made:
        training.ranks.is_sharded = is_sharded
        found = original(training, *arguments)
        made.append(found.snapshot)
        live = {tensor.untyped_storage().data_ptr() for tensor in run.live()}
        assert live.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in made[0].tensors.values())
        return found

    original = failures.snapshot_of
    session = Session(directory=folder, **options)
    with described_once(), pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit, IndexError):
        patch.setattr(failures, "snapshot_of", snapshot_of)
        with session:
            run()
    return made[0], load(session.snapshots[0])


def named(snapshot: Snapshot, role: str) -> dict[str, torch.Tensor]:
    """The inputs of a snapshot's program that have a role."""
    return {item.name: snapshot.tensors[item.value] for item in snapshot.program.inputs if item.role == role}


WAYS: dict[str, tuple[Callable[[], Run], dict[str, Any], str]] = {
    "loss": (Run, {}, "forward"),
    "gradient": (lambda: Run(rooted_loss), {"watch": "every-step"}, "backward"),
    "gradient, going back": (lambda: Run(rooted_loss), {"watch": "deferred"}, "backward"),
    "optimizer": (Optimizer, {}, "optimizer"),
    "by hand": (ByHand, {}, "backward"),
    "exception": (Raising, {}, "forward"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_snapshot_holds_what_the_step_began_with_in_memory_of_its_own(way: str, tmp_path: Path) -> None:
    make, options, phase = WAYS[way]
    run = make()
    in_memory, in_file = run_with(run, tmp_path, **options)
    assert (in_file.step, in_file.failure.phase, fidelity(in_file)) == (BAD, phase, EXACT)
    for snapshot in (in_memory, in_file):
        parameters = named(snapshot, "parameter")
        assert parameters.keys() >= {"first.weight", "first.bias", "whole", "head.weight"}
        for name, content in parameters.items():
            assert same_bits(content, run.starts[BAD][name])


def test_what_shares_memory_in_the_model_shares_it_in_the_snapshot(tmp_path: Path) -> None:
    for snapshot in run_with(Run(rooted_loss), tmp_path, watch="deferred"):
        parameters = named(snapshot, "parameter")
        assert "second.weight" not in parameters  # one tensor, one input
        pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in parameters.items()}
        assert pointers["whole"] == pointers["first.bias"]
        assert len(set(pointers.values())) == len(pointers) - 1
        parameters.pop("first.bias")
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in parameters.values())


def test_a_snapshot_without_a_replay_has_memory_of_its_own(tmp_path: Path) -> None:
    run_with(Run(), tmp_path, is_sharded=True)


NAN = math.nan


@pytest.mark.parametrize("same, other", [(NAN, -NAN), (1.5, 1.5), (complex(NAN, 1), complex(NAN, 1))])
def test_bits_that_agree(same: complex, other: complex) -> None:
    assert same_bits(torch.tensor([same, 0.0]), torch.tensor([other, 0.0]))


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (NAN, 0.5), (complex(NAN, 1), complex(NAN, 2)), (1, True)])
def test_bits_that_differ(one: complex, other: complex) -> None:
    assert not same_bits(torch.tensor(one), torch.tensor(other))
