"""What is saved is what failed: contents from before the failure in memory of their own, in the step training saw."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture import failures
from reprokit.capture import fidelity as written
from reprokit.capture.fidelity import Made
from reprokit.capture.save import Describing
from reprokit.capture.session import Session
from reprokit.program.dataflow import same_bits
from reprokit.snapshot.format import Snapshot, load
from reprokit.snapshot.privacy import private
from tests.capture.traps_checks import (
    EXACT,
    Loop,
    batches,
    check_caught,
    classify,
    described_once,
    divided_loss,
    ending,
    fidelity,
    plain_net,
    plain_training,
    rooted_loss,
    silent_root,
    tensors_in,
    update,
    where,
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


def run_with(run: Run, folder: Path, **options: Any) -> tuple[Snapshot, Snapshot]:
    """The snapshot in memory, which must share none with live tensors, and the one in the file."""
    made: list[Snapshot] = []

    class Checked(Describing):
        def snapshot(self) -> Made:
            found = super().snapshot()
            made.append(replace(found.snapshot, tensors=dict(found.snapshot.tensors)))
            live = {tensor.untyped_storage().data_ptr() for tensor in run.live()}
            assert live.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in made[0].tensors.values())
            return found

    session = Session(directory=folder, **options)
    with described_once(), pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit, IndexError):
        patch.setattr(failures, "Describing", Checked)
        with session:
            run()
    return made[0], load(session.snapshots[0])


def named(snapshot: Snapshot, role: str) -> dict[str, torch.Tensor]:
    """The inputs of a snapshot's program that have a role."""
    return {item.name: snapshot.tensors[item.value] for item in snapshot.program.inputs if item.role == role}


WAYS: dict[str, tuple[Callable[[], Run], dict[str, Any], str]] = {
    "loss": (Run, {}, "forward"),
    "gradient": (lambda: Run(rooted_loss), {"watch": "every-step"}, "backward"),
    "gradient, going back": (lambda: Run(rooted_loss), {}, "backward"),
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
    for snapshot in run_with(Run(rooted_loss), tmp_path):
        parameters = named(snapshot, "parameter")
        assert "second.weight" not in parameters  # one tensor, one input
        pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in parameters.items()}
        assert pointers["whole"] == pointers["first.bias"]
        assert len(set(pointers.values())) == len(pointers) - 1
        parameters.pop("first.bias")
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in parameters.values())


# -- attributes of past steps ---------------------------------------------------------------------------------------


class Switched(nn.Module):
    """A model whose gradient is NaN, and its loss finite, when its switch is on; ``turn`` turns it for a step."""

    outside = False  # an attribute of the class, which nobody notes

    def __init__(self, turn: Callable[[Switched, bool], None], is_on: Callable[[Switched], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.turn, self.is_on = turn, is_on
        self.flag, self.num_calls = False, 0
        self.settings, self.seen = SimpleNamespace(power=1.0), []
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.seen.append(self.num_calls)
        logits = self.head(self.norm(self.first(x)))
        if self.is_on(self):
            logits = logits + silent_root(self.head.weight, True)  # which the sentinel does not see
        return logits


def switch(name: str, on: Any, off: Any = None) -> tuple[Callable[[Switched, bool], None], Callable[[Switched], bool]]:
    """A switch that is an attribute of the model or of something in it; without ``off`` it is not there."""
    where, _, attribute = name.rpartition(".")

    def turn(model: Switched, is_on: bool) -> None:
        target = model.get_submodule(where) if where != "settings" else model.settings
        if is_on or off is not None:
            setattr(target, attribute, on if is_on else off)

    def is_on(model: Switched) -> bool:
        target = model.get_submodule(where) if where != "settings" else model.settings
        return bool(getattr(target, attribute, None) == on)

    return turn, is_on


NOTED = {
    "flag": switch("flag", True, False),
    "number of a submodule": switch("drop.p", 1e-9, 0.0),
    "training mode of a submodule": switch("norm.training", False, True),
    "settings": switch("settings.power", 0.5, 1.0),
    "count of its own calls": (lambda model, is_on: None, lambda model: model.num_calls > 5),
    "function": (
        lambda model, is_on: setattr(model, "root", torch.sqrt if is_on else torch.tanh),
        lambda model: model.root is torch.sqrt,
    ),
}


def switched(turn: Any, is_on: Any, made: list[Switched]) -> Loop:
    """A loop whose gradients are NaN from step 5 on, because of the model's switch."""

    def loop() -> list[torch.Tensor]:
        Switched.outside = False
        model = Switched(turn, is_on)
        made.append(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, x, y in batches(12):
            turn(model, step >= 5)
            update(optimizer, classify(model, x, y))
        return ending(model, model.num_calls, model.seen, model.drop.p, model.norm.training, model.settings.power)

    return loop


@pytest.mark.parametrize("name", NOTED)
def test_steps_of_the_past_are_played_with_their_own_attributes(name: str, tmp_path: Path) -> None:
    made: list[Switched] = []
    snapshot = check_caught(switched(*NOTED[name], made), tmp_path)
    assert (where(snapshot), fidelity(snapshot)) == ((5, "backward", "torch.Tensor.sqrt"), EXACT)
    plain, watched = (list(vars(model)) for model in made)
    assert plain == watched and made[0].seen == made[1].seen


UNKNOWN = {
    "attribute of the class": (
        lambda model, is_on: setattr(Switched, "outside", is_on),
        lambda model: model.outside,
    ),
    "items of a list": (lambda model, is_on: None, lambda model: len(model.seen) > 5),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_step_whose_loss_training_saw_otherwise_is_never_the_answer(name: str, tmp_path: Path) -> None:
    snapshot = check_caught(switched(*UNKNOWN[name], []), tmp_path)
    note = str(snapshot.fidelity_note)
    assert snapshot.step == 6 and snapshot.fidelity == "unfaithful"
    # The first step that is played again follows the last copy, whose place depends on its cost.
    assert re.search(r"the loss of step [45] was 0\.\d+ in training and nan in the replay", note), note


class Own(torch.optim.Optimizer):
    """An optimizer with everything outside of its state: a count, a flag, averages, and an inner optimizer."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.t, self.boost, self.counts = 0, 1.0, {"calls": 0}
        self.averages = [torch.zeros_like(p) for p in params]
        self.inner = torch.optim.Adam(params)

    @torch.no_grad()
    def step(self, rates: torch.Tensor, *, weight: float = 1.0) -> None:  # type: ignore[override]
        self.t += 1
        self.counts["calls"] += 1
        rate = self.boost * weight / (1 - 0.9**self.t) / self.counts["calls"]
        for p, average, own in zip(self.param_groups[0]["params"], self.averages, rates, strict=True):
            average.mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(average * rate * own)
        self.inner.step()


def test_steps_of_the_past_are_made_with_what_an_optimizer_had_and_was_given(tmp_path: Path) -> None:
    """The update of step 7 ruins a parameter that is used in step 9."""

    def loop() -> list[torch.Tensor]:
        model, gate = plain_net(), nn.Parameter(torch.ones(2))
        optimizer = Own([*model.parameters(), gate])
        for step, x, y in batches(12):
            loss = F.cross_entropy(model(x) + torch.where(torch.tensor(step >= 9), gate, 0.0), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.boost = 1.0 + step % 3
            rates = torch.tensor([0.1, 0.1, 0.1, 0.1, math.inf if step == 7 else 0.1])
            optimizer.step(rates, weight=1.0 + step % 2)
        return ending(model, gate, optimizer.t, optimizer.averages, optimizer.counts, optimizer.inner)

    snapshot = check_caught(loop, tmp_path)
    assert (where(snapshot)[:2], fidelity(snapshot)) == ((7, "optimizer"), EXACT)


# -- fidelity of the file -------------------------------------------------------------------------------------------


def captured_with(
    change: Callable[[Snapshot], Snapshot], folder: Path, loss_of: Callable[..., torch.Tensor] = divided_loss
) -> tuple[Snapshot, dict[str, Any]]:
    """What is in the file, and what is told, when something changes the snapshot on its way to the disk."""
    with pytest.MonkeyPatch.context() as patch, described_once():
        patch.setattr(written, "private", lambda snapshot, *how: change(private(snapshot, *how)))
        with Session(directory=folder, watch="every-step", after="continue") as session:
            model, optimizer = plain_training()
            for step, x, y in batches():
                update(optimizer, loss_of(model(x) * torch.full((), 0.5), y, step == 3))
    assert [path.suffix for path in folder.iterdir()] == [".pt"]
    return load(session.snapshots[0]), session.results[0]


def with_tensors(snapshot: Snapshot, change: Callable[[torch.Tensor], torch.Tensor], role: str) -> Snapshot:
    changed = {i.value: change(snapshot.tensors[i.value]) for i in snapshot.program.inputs if i.role == role}
    return replace(snapshot, tensors={**snapshot.tensors, **changed})


OTHERWISE: dict[str, tuple[Callable[[Snapshot], Snapshot], str]] = {
    "parameters that are bad already": (
        lambda snapshot: with_tensors(snapshot, lambda tensor: tensor * math.nan, "parameter"),
        "the file fails in another way when it is run: nan in forward",
    ),
    "another step": (
        lambda snapshot: replace(snapshot, program=replace(snapshot.program, calls=snapshot.program.calls[:-2])),
        "the file does not fail when it is run",
    ),
    "another phase": (
        lambda snapshot: replace(snapshot, failure=replace(snapshot.failure, phase="backward")),
        "the file fails in another way when it is run: nan in forward",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_file_that_fails_otherwise_is_not_exact(name: str, tmp_path: Path) -> None:
    change, note = OTHERWISE[name]
    snapshot, told = captured_with(change, tmp_path)
    assert fidelity(snapshot) == ("unfaithful", note) == (told["fidelity"], told["fidelity_note"])


@pytest.mark.parametrize("factor, kind", [(1 + 1e-6, "close"), (1.5, "unfaithful")])
def test_a_file_with_another_loss_is_not_exact(factor: float, kind: str, tmp_path: Path) -> None:
    """A gradient fails, so the loss is a number."""
    change = lambda snapshot: with_tensors(snapshot, lambda tensor: tensor * factor, "parameter")  # noqa: E731
    snapshot, _ = captured_with(change, tmp_path, rooted_loss)
    assert snapshot.fidelity == kind and "the program's loss was" in str(snapshot.fidelity_note)


# -- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_buffer", [False, True])
def test_statistics_that_a_normalisation_made_bad_are_not_said_to_be_given(is_buffer: bool, tmp_path: Path) -> None:
    """The call writes them without telling their version; only buffers have a copy from before the step."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    mean, var = torch.zeros(4), torch.ones(4)
    weight = torch.randn(4, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with Session(tmp_path / "x.pt", quiet=True, after="continue"):
        for step in range(8):
            hidden = (torch.randn(8, 4) * (1e30 if step == 5 else 1.0)) @ weight
            out = norm(hidden) if is_buffer else F.batch_norm(hidden, mean, var, training=True)
            read = norm.running_var if is_buffer else var
            loss = out.square().mean() + (read * 0.0).sum()
            update(optimizer, loss)
    snapshot = load(tmp_path / "x.pt")
    assert snapshot.step == 5
    if is_buffer:
        assert (snapshot.fidelity, snapshot.failure.call) == ("exact", "torch.nn.functional.batch_norm")
    else:
        assert snapshot.fidelity == "unfaithful"
        assert "a normalisation writes `var`, and its value from before the step was not kept" in snapshot.fidelity_note
