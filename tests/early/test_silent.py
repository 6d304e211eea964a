"""Layers that learn nothing, hooks that repair gradients, and scales that collapse."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import reprokit
from reprokit.capture.failure_text import cause_line
from tests.early.healthy import mlp


class _Watched:
    """A session under way with what it has told."""

    def __init__(self, session: reprokit.Session, events: list[reprokit.TrainingEvent]) -> None:
        self.session = session
        self.events = events


@contextlib.contextmanager
def _watched(folder: Path, *on: str) -> Iterator[_Watched]:
    torch.manual_seed(0)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(folder / "run.pt", on=on, on_event=events.append, quiet=True) as session:
        yield _Watched(session, events)


def _train(model: nn.Module, num_steps: int = 80) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(num_steps):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()


def test_a_dead_layer_is_named_and_reduced_to_itself(tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 1)
        with torch.no_grad():
            model[0].bias.fill_(-1e3)
        _train(model)
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.place) == ("dead", "error", "0")
    failure = result["failure"]
    assert (failure["kind"], failure["call"], failure["module"]) == ("dead", "torch.nn.functional.relu", "1")
    assert failure["event"]["source"] == "0.weight"
    assert (failure["event"]["quantity"], failure["event"]["value"]) == ("share of zeros", 1.0)
    lead = f"step {failure['step']}: the gradient of `0.weight` is zero in every step"  # when it began is not known
    assert str(cause_line(result)).startswith(lead)
    snapshot = reprokit.load(tmp_path / "run.pt")
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    assert "F.relu(" in text and "F.linear(" in text
    assert "assert share < 1.0" in text


def test_a_gradient_of_zero_by_design_gives_no_event(tmp_path: Path) -> None:
    class Unused(nn.Module):
        """A parameter that only takes part so that it has a gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(16, 32, 1)
            self.extra = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + 0.0 * self.extra.sum()

    with _watched(tmp_path, "early") as watched:
        _train(Unused())
    assert not watched.session.snapshots
    assert not watched.events


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_hook_that_repairs_gradients_is_told(is_repaired: bool, tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = nn.Linear(4, 8)
        for parameter in model.parameters():
            parameter.register_hook(torch.nan_to_num if is_repaired else lambda gradient: gradient * 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(40):
            h = model(torch.randn(4, 4))
            root = torch.sqrt(h * (h > 0)) if is_repaired else h.abs()
            torch.where(h > 0, root, h * 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if not is_repaired:
        assert not watched.events
        return
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity) == ("dead", "error")
    assert "the gradient of `weight` is nan in step " in event.evidence
    assert (result["failure"]["kind"], result["failure"]["call"]) == ("nan", "torch.sqrt")


def test_a_scale_that_collapses_leads_to_the_first_overflow(tmp_path: Path) -> None:
    with _watched(tmp_path, "scale") as watched:
        model = mlp(16, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(80):
            x = torch.randn(8, 16)
            with torch.autocast("cpu", torch.float16):
                y = model(x)
                loss = (y.float() - x.sum(1, keepdim=True)).pow(2).mean()
            if step >= 50:
                loss = loss + y.float().mul(1e30).sum()  # its gradient is more than half precision holds
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.began_at) == ("scale", "error", 50)
    assert result["failure"]["step"] == 50
    assert result["failure"]["kind"] in ("inf", "nan")


def test_a_dead_layer_keeps_what_makes_it_dead(tmp_path: Path) -> None:
    """A parameter far from the dead activation: the repro without the bias, or with equal classes, shows nothing."""
    with _watched(tmp_path, "dead"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        with torch.no_grad():
            model[2].bias.fill_(-25.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(80):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 3, (8,))).backward()
            optimizer.step()
    snapshot = reprokit.load(tmp_path / "run.pt")
    assert snapshot.failure.call == "torch.nn.functional.relu"
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    (tmp_path / "alive.py").write_text(text.replace("relu(", "tanh("))
    assert subprocess.run([sys.executable, str(tmp_path / "alive.py")], check=False).returncode == 0, text
