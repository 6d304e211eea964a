"""Going back in time: failures that show late are saved at the step where they happened, exactly."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reprokit
from reprokit.snapshot.format import load
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    WATCHES,
    Gated,
    Loop,
    batches,
    check_caught,
    check_exact,
    check_silent,
    classify,
    divided_loss,
    ending,
    fidelity,
    plain_net,
    scaled_update,
    update,
    where,
)

HISTORIES = (7, None)
RARE = 17


class Words(nn.Module):
    """A table of which one row is used rarely."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head((self.table(rows) * weights[..., None]).sum(1))


def words(x: torch.Tensor, rare: bool) -> torch.Tensor:
    """Rows 0 to 9, and the rare one where it is asked for."""
    rows = (x.abs() * 10).long() % 10
    if rare:
        rows[0, 0] = RARE
    return rows


# -- runs of hundreds of steps ---------------------------------------------------------------------------------------


def row_poisoned_by_its_own_rate(steps: int = 450, poisoned: int = 400, used: int = 431) -> list[torch.Tensor]:
    """The schedule of the rare rows is infinite at one step, and infinity times a zero gradient is NaN."""
    torch.manual_seed(0)
    model, rare, total = Words(), nn.Parameter(torch.randn(3, 4)), torch.zeros(())
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [rare]}], lr=0.01, momentum=0.9)
    for step, x, y in batches(steps):
        optimizer.param_groups[1]["lr"] = float(1 / torch.tensor(float(abs(poisoned - step))).sqrt())
        wanted = torch.tensor([[step == used]])
        logits = model(words(x, False), torch.ones(8, 4)) + model.head(torch.where(wanted, rare, 0.0)).mean(0)
        loss = F.cross_entropy(logits, y)
        update(optimizer, loss)
        total = total + loss.detach()  # as many loops do
    return ending(model, rare, [total])


@pytest.mark.parametrize("history", HISTORIES)
def test_a_parameter_poisoned_by_its_own_rate(history: int | None, tmp_path: Path) -> None:
    snapshot = check_caught(row_poisoned_by_its_own_rate, tmp_path, history=history)
    assert where(snapshot) == (400, "optimizer", "torch.optim.SGD.step")
    assert fidelity(snapshot) == EXACT
    assert [item.step for item in snapshot.timeline][-1] == 400
    assert all(math.isfinite(item.loss) for item in snapshot.timeline)


@pytest.mark.parametrize("earlier", [0, 40])
def test_what_diverges_from_its_start_is_played_from_its_start(earlier: int, tmp_path: Path) -> None:
    """The loss rises from the first step of a model on, and its square overflows in step 7; another one was first."""

    def loop() -> None:
        for num_steps, rate in ((earlier, 0.01), (40, 1e3)):
            torch.manual_seed(1)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for _ in range(num_steps):
                x = torch.randn(16, 4)
                update(optimizer, (model(x).squeeze(1) - x[:, 0]).pow(2).mean())

    with reprokit.capture(tmp_path / "s.pt", quiet=True):
        loop()
    snapshot = load(tmp_path / "s.pt")
    assert snapshot.failure.kind == "inf" and snapshot.step > earlier + 3 and snapshot.layers is not None
    assert sorted({row.step for row in snapshot.layers}) == list(range(earlier, snapshot.step + 1))


def test_without_copies_the_snapshot_says_that_there_was_no_going_back(tmp_path: Path) -> None:
    snapshot = check_caught(lambda: row_poisoned_by_its_own_rate(60, 40, 47), tmp_path, history=0)
    assert 40 <= snapshot.step <= 47
    assert snapshot.fidelity == "unfaithful" and snapshot.fidelity_note
    assert snapshot.settings.history_bytes == 0


# -- a gradient that is swallowed -----------------------------------------------------------------------------------


# -- everything a loop changes beside the parameters ----------------------------------------------------------------


# What else a loop may have: its name -> how it is made.
PARTS: dict[str, Callable[[torch.optim.Optimizer, Gated], Any]] = {
    "schedule": lambda optimizer, model: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 13),
    "average": lambda optimizer, model: copy.deepcopy(model),
    "clamp": lambda optimizer, model: 0.2,
    "target": lambda optimizer, model: copy.deepcopy(model),
    "scaler": lambda optimizer, model: torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=5),
    "clip": lambda optimizer, model: 0.5,
    "noise": lambda optimizer, model: 0.1,
}


def rich_loop(*names: str, bad: bool = True) -> Loop:
    """60 steps with the named parts; the gate becomes NaN in the update of step 40 and is read in step 47."""

    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Gated()
        groups = [{"params": model.body.parameters()}, {"params": [model.gate]}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        parts = {name: PARTS[name](optimizer, model) for name in names}
        for step, x, y in batches(60):
            rate = optimizer.param_groups[1]["lr"]
            if bad and step == 40:
                optimizer.param_groups[1]["lr"] = math.inf
            rich_step(model, optimizer, parts, step, x, y)
            if bad and step == 40:
                assert not torch.isfinite(model.gate).any()
                optimizer.param_groups[1]["lr"] = rate
        return ending(model, optimizer, parts)

    return loop


def rich_step(
    model: Gated, optimizer: torch.optim.Optimizer, parts: dict[str, Any], step: int, x: torch.Tensor, y: torch.Tensor
) -> None:
    """One step with whatever parts there are."""
    if "noise" in parts:
        x = x + parts["noise"] * torch.randn_like(x) * random.random()
    with torch.autocast("cpu", dtype=torch.float16, enabled="scaler" in parts):
        loss = F.cross_entropy(model(x, step == 47), y)
        if "target" in parts:
            with torch.no_grad():
                wanted = parts["target"](x, False).softmax(-1)
            loss = loss + F.cross_entropy(model(x, False), wanted)
    if "scaler" in parts:
        scaled_update(parts["scaler"], optimizer, loss)
    else:
        optimizer.zero_grad()
        loss.backward()
        if "clip" in parts:
            torch.nn.utils.clip_grad_norm_(model.body.parameters(), parts["clip"])
        optimizer.step()
    after_step(model, parts, step)


def after_step(model: Gated, parts: dict[str, Any], step: int) -> None:
    """What loops do with the weights once they are updated."""
    with torch.no_grad():
        if "average" in parts:
            for old, new in zip(parts["average"].parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        if "clamp" in parts:
            for parameter in model.body.parameters():
                parameter.clamp_(-parts["clamp"], parts["clamp"])
    if "target" in parts and step % 5 == 4:
        parts["target"].body.load_state_dict(model.body.state_dict())
    if "schedule" in parts:
        parts["schedule"].step()


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("names", [(), *((name,) for name in PARTS)], ids=lambda names: "-".join(names) or "nothing")
def test_a_late_failure_is_found_at_its_own_step(names: tuple[str, ...], history: int | None, tmp_path: Path) -> None:
    check_exact((40, "optimizer", "torch.optim.SGD.step"), rich_loop(*names), tmp_path, history=history)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("names", [(), *((name,) for name in PARTS)], ids=lambda names: "-".join(names) or "nothing")
def test_copies_disturb_nothing(
    names: tuple[str, ...], history: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_silent(rich_loop(*names, bad=False), tmp_path, capsys, history=history)


# -- what cannot be seen --------------------------------------------------------------------------------------------


def test_writes_that_the_tape_cannot_see_make_the_snapshot_unfaithful(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Gated()
        with torch.DisableTorchFunction():
            memory = model.body[0].weight.detach().numpy()
        optimizer = torch.optim.SGD([{"params": model.body.parameters()}, {"params": [model.gate]}], lr=0.01)
        for step, x, y in batches(60):
            optimizer.param_groups[1]["lr"] = math.inf if step == 40 else 0.01
            rich_step(model, optimizer, {}, step, x, y)
            memory *= 0.9
        return ending(model)

    snapshot = check_caught(loop, tmp_path, history=7)
    assert snapshot.fidelity == "unfaithful" and snapshot.fidelity_note


@pytest.mark.parametrize("make", [np.arange, lambda n: list(range(n))], ids=["array", "list"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["alone", "in a tuple"])
def test_an_index_that_the_loop_shuffles_in_place(is_pair: bool, make: Callable[[int], Any], tmp_path: Path) -> None:
    """Each epoch shuffles the index of the rows; NaN shows an epoch after the update that made it."""

    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        shuffle = random.Random(0).shuffle
        model, table, order = Gated(), torch.randn(24, 4), make(16)
        optimizer = torch.optim.SGD([{"params": model.body.parameters()}, {"params": [model.gate]}], lr=0.01)
        for step, _, y in batches(60):
            optimizer.param_groups[1]["lr"] = math.inf if step == 40 else 0.01
            shuffle(order)
            rich_step(model, optimizer, {}, step, table[(order, slice(None))] if is_pair else table[order], y.repeat(2))
        return ending(model)

    check_exact((40, "optimizer", "torch.optim.SGD.step"), loop, tmp_path, history=50)


# -- the timeline ---------------------------------------------------------------------------------------------------


def test_the_timeline_shows_the_growth_before_the_failure(tmp_path: Path) -> None:
    losses: list[float] = []
    norms: list[float] = []

    def loop() -> list[torch.Tensor]:
        losses.clear()
        norms.clear()
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0)
        for step, x, y in batches(12):
            loss = classify(model, x * 2.0**step, y) * (math.nan if step == 11 else 1.0)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
        return ending(model)

    timeline = check_caught(loop, tmp_path).timeline
    assert [item.step for item in timeline] == list(range(12))
    assert [item.loss for item in timeline[:-1]] == losses[:-1]
    assert [item.grad_norm for item in timeline[:-1]] == norms[:-1]
    assert [item.lr for item in timeline[:-1]] == pytest.approx([0.01 * 2.0**step for step in range(11)])
    assert all(item.scale is None and item.seconds > 0 for item in timeline[:-1])


# -- what comes behind a failing step --------------------------------------------------------------------------------


def averaged() -> list[torch.Tensor]:
    """After the last step a model in training mode runs often, without gradients, for the statistics of its copy."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step, x, y in batches():
        optimizer.param_groups[0]["lr"] = 1e38 if step == BAD_STEP - 1 else 0.01
        update(optimizer, classify(model, x, y))
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([x for _, x, _ in batches(200)], average)
    return ending(model, average)


def with_temperature() -> list[torch.Tensor]:
    """A tensor of no module has an optimizer of its own; a target network is written through ``data``."""
    model, target = plain_net(), plain_net(1).requires_grad_(False)
    temperature = torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.Adam([temperature])]
    for step, x, y in batches():
        logits = model(x) + target(x)
        loss = divided_loss(logits, y, step == BAD_STEP) * temperature.exp()
        update(optimizers[0], loss.mean())
        update(optimizers[1], -(temperature * (logits.mean() - 1).detach()).mean())
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.data.mul_(0.9).add_(0.1 * new.data)
    return ending(model, target, temperature)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loop", [averaged, with_temperature])
def test_what_comes_behind_the_failing_step_does_not_hide_it(loop: Loop, watch: str, tmp_path: Path) -> None:
    snapshot = check_caught(functools.partial(seeded, loop), tmp_path, watch=watch, history=1000)
    assert snapshot.step == BAD_STEP
    assert fidelity(snapshot) == EXACT


def seeded(loop: Loop) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return loop()
