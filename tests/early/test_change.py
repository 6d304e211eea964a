"""Settings and data that are unlike the steps before, and a loss that has another level."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reprokit
from reprokit.snapshot.format import load

AT = 70  # the step of every change


class _Run:
    """A training whose parts a test changes in some step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)]
        self.model = nn.Sequential(*layers)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.weight, self.discount, self.labels, self.scale, self.goal = 0.01, 0.9, (1.0, 0.0), 1.0, 1.0
        self.batches: Iterator[torch.Tensor] | None = None

    def step(self) -> None:
        x = self.scale * torch.randn(16, 8) if self.batches is None else next(self.batches)
        y = self.goal * x[:, :1] * x[:, 1:2]
        output = self.model(x)
        real, fake = torch.full((16, 1), self.labels[0]), torch.full((16, 1), self.labels[1])
        loss = F.mse_loss(output, y) + self.weight * output.abs().mean()
        loss = loss + 0.01 * (F.mse_loss(output.tanh(), real) + 0.3 * F.mse_loss(output.sin(), fake))
        loss = loss + 0.01 * (output - (y + self.discount * output.detach())).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def _events(folder: Path, change: Callable[[_Run, int], object], num_steps: int = 120) -> list[reprokit.TrainingEvent]:
    run, events = _Run(), list[reprokit.TrainingEvent]()
    with reprokit.capture(folder / "run.pt", on=("early",), after="continue", on_event=events.append, quiet=True):
        for step in range(num_steps):
            change(run, step)
            run.step()
    return events


def _setting(name: str, value: Any) -> Callable[[_Run], object]:
    return lambda run: setattr(run, name, value)


CHANGES: dict[str, tuple[Callable[[_Run], object], str]] = {
    "mode": (lambda run: run.model.eval(), "went from training mode to eval mode"),
    "frozen": (lambda run: run.model[0].requires_grad_(False), "went from True to False"),
    "dropout": (lambda run: setattr(run.model[3], "p", 0.9), "`3.p` went from 0.1 to 0.9"),
    "rate": (lambda run: run.optimizer.param_groups[0].update(lr=0.04), "`lr` went from 0.002 to 0.04"),
    "factor": (_setting("weight", 1.0), "a number in `self.weight * output.abs().mean()` went from 0.01 to 1"),
    "sign": (_setting("weight", -0.01), "went from 0.01 to -0.01"),
    "discount": (_setting("discount", 1.01), "went from 0.9 to 1.01"),
    "labels": (_setting("labels", (0.0, 1.0)), "went from 1.0 to 0.0"),
    "zeros": (_setting("scale", 0.0), "`x` is 0 everywhere and was"),
    "size": (_setting("scale", 0.01), "`x` is "),
    "batch": (_setting("batches", itertools.repeat(torch.randn(16, 8))), "`x` is the same as in step 70"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_with_its_step(name: str, tmp_path: Path) -> None:
    change, text = CHANGES[name]
    events = _events(tmp_path, lambda run, step: change(run) if step == AT else None)
    found = [one for one in events if one.kind == "change" and text in one.evidence]
    assert found, events
    began = AT + (name == "batch")  # the step before is the first with these values
    assert {(one.severity, one.began_at) for one in found} == {("warning", began)}


def test_a_state_that_is_cleared_again_and_again_is_told_once(tmp_path: Path) -> None:
    """Low-rank updates that are merged and begun anew clear it by plan; one that is lost by mistake is so once."""

    def change(run: _Run, step: int) -> None:
        if step in (60, 120, 180):
            run.optimizer.state.clear()

    (event,) = _events(tmp_path, change, 240)
    assert (event.kind, event.severity, event.began_at) == ("change", "warning", 60)
    assert "the state of " in event.evidence and "counts fewer steps than before" in event.evidence


def test_a_number_that_is_wrong_once_is_an_error(tmp_path: Path) -> None:
    """In a young run, too; and where the loss itself is no 1,000 times as high, the labels are."""
    for at, code in ((7, 1e4), (60, -999999.0)):
        torch.manual_seed(0)
        model, events, file = nn.Linear(8, 1), list[reprokit.TrainingEvent](), tmp_path / f"{at}.pt"
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        with reprokit.capture(file, on=("early",), after="continue", on_event=events.append, quiet=True):
            for step in range(80):
                x = torch.randn(512, 8)
                y = 100 * x[:, :1]
                y[3] = code if step == at else y[3]
                y[3:] = y[3:] * (1e4 if step == at == 7 else 1)
                loss = F.l1_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert [(one.kind, one.severity, one.began_at) for one in events] == [("spike", "error", at)]


def _plan(run: _Run, step: int) -> None:
    """What healthy runs do."""
    run.optimizer.param_groups[0]["lr"] = 2e-3 * 0.1 ** (step // 50)
    run.weight, run.scale = 0.01 * 2 ** (step // 30), 1 + 0.3 * (step // 40)
    run.model[3].p = 0.1 * (1 + step // 40)
    run.discount = 0.9 + 0.0005 * step
    run.model[0].requires_grad_(step >= 60)
    if step % 20 == 19:
        run.model.eval()
        run.model(torch.randn(100, 8))
        run.model.train()


def test_a_plan_is_left_alone(tmp_path: Path) -> None:
    assert not _events(tmp_path, _plan, 160)


@pytest.mark.parametrize("how", ["task", "unit", "decay"])
def test_another_level_of_the_loss(how: str, tmp_path: Path) -> None:
    """Another task has another loss, which is no error; labels in another unit are one, and an option that jumps is.
    The weights are loaded, and their gradients clipped."""
    torch.manual_seed(0)
    body, heads = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1)])
    truth = nn.Sequential(copy.deepcopy(body), nn.Linear(32, 1))
    heads[0].load_state_dict(truth[1].state_dict())
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()], lr=3e-3)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(tmp_path / "run.pt", on=("early",), on_event=events.append, quiet=True) as session:
        for step in range(220):
            x, is_late = torch.randn(64, 8), step >= 160
            y = 10 * truth(x).detach() + 0.3 * torch.randn(64, 1)
            y = 10 * y if is_late and how == "unit" else y
            y = 2 * x[:, 1:2] + 2.5 * torch.randn(64, 1) if is_late and how == "task" else y
            optimizer.param_groups[0]["weight_decay"] = (1 + step / 500) * (80 if is_late and how == "decay" else 0.01)
            loss = F.mse_loss((heads[1] if is_late and how == "task" else heads[0])(body(x)) * 10, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(body.parameters(), 5.0)
            optimizer.step()
    told = [(one.kind, one.severity, one.began_at) for one in events if one.kind == "spike"]
    assert told == [("spike", "warning" if how == "task" else "error", 160)], events
    assert [load(path).fidelity for path in session.snapshots] == ([] if how == "task" else ["exact"])
