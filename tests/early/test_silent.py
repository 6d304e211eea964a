"""Layers that learn nothing, and scales that collapse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import reprokit
from reprokit.capture.early_warning import EventStep
from reprokit.rules.match import diagnose
from tests.capture.traps_checks import update
from tests.early import mlp


class _Watched:
    """A session under way with what it has told."""

    def __init__(self, session: reprokit.Session, events: list[reprokit.TrainingEvent]) -> None:
        self.session = session
        self.events = events


@contextlib.contextmanager
def _watched(folder: Path, *on: str) -> Iterator[_Watched]:
    torch.manual_seed(0)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(folder / "run.pt", on=on, on_event=events.append, quiet=True, budget="off") as session:
        yield _Watched(session, events)


def _train(model: nn.Module, num_steps: int = 80) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(num_steps):
        x = torch.randn(8, 16)
        update(optimizer, (model(x) - x.sum(1, keepdim=True)).pow(2).mean())


def test_a_dead_layer_is_named_in_an_issue_without_a_repro(tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 1)
        with torch.no_grad():
            model[0].bias.fill_(-1e3)
        _train(model)
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.place) == ("silent", "error", "1")
    failure = result["failure"]
    assert (failure["kind"], failure["call"], failure["module"]) == ("silent", "torch.nn.functional.relu", "1")
    assert failure["silence"] == event.evidence and event.evidence.endswith("; all of its outputs are 0")
    assert failure["event"]["source"] == "0.weight"
    assert (failure["event"]["quantity"], failure["event"]["value"]) == ("share of zeros", 1.0)
    assert failure["step"] == 0  # it has been so from the start
    snapshot = reprokit.load(tmp_path / "run.pt")
    reduction = reprokit.shrink(snapshot, whatif=False)
    assert reduction.program == snapshot.program and reduction.reproduces == "5/5"
    rendered = reprokit.render(reduction, snapshot, tmp_path / "out")
    assert rendered.repro is None
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"issue.md", "reduction.pt", "report.html", "summary.md"}
    issue = rendered.issue.read_text()
    assert "A gradient that is not zero everywhere reaches `0.weight`." in issue
    assert "There is no repro: no row of the batch and no option of step 0 stands out." in issue


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


class _Branches(nn.Module):
    """Two branches, of which one can be cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 1)
        self.way = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.way != "no_grad"):
            left = self.left(x)
        if self.way == "detach":
            left = left.detach()
        elif self.way == "rest":  # by design: it takes no part
            left = torch.zeros(len(x), 8)
        return self.head(torch.cat([left, self.right(x)], 1))


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize(
    ("way", "call", "place"),
    [
        ("detach", "torch.Tensor.detach", "left"),
        ("no_grad", "torch.nn.functional.linear", "left"),
        ("rest", None, None),
    ],
)
def test_a_branch_that_is_cut_off_is_named(
    way: str, call: str | None, place: str | None, sets_to_none: bool, tmp_path: Path
) -> None:
    with _watched(tmp_path, "early") as watched:
        model = _Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            model.way = way if step >= 60 else ""
            x = torch.randn(8, 16)
            optimizer.zero_grad(set_to_none=sets_to_none)
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
    if call is None:
        assert not watched.events and not watched.session.snapshots
        return
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.began_at, event.place) == ("dead", "error", 60, place)
    assert (result["failure"]["step"], result["failure"]["call"]) == (60, call)
    assert result["failure"]["event"]["source"] == "left.weight"
    snapshot = reprokit.load(tmp_path / "run.pt")
    found = diagnose(snapshot)
    assert (
        found.id == "cut-from-graph" and ("`no_grad`" if way == "no_grad" else "out of the graph") in found.evidence[0]
    )


@pytest.mark.parametrize("begins", [0, 60])
def test_a_gradient_that_is_zero_from_a_step_on_is_dated(begins: int, tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            if step == begins:
                nn.init.constant_(model[2].bias, -1e3)
            x = torch.randn(8, 16)
            update(optimizer, (model(x) - x.sum(1, keepdim=True)).pow(2).mean())
    (event,), (result,) = watched.events, watched.session.results
    assert (event.began_at, event.place, result["failure"]["step"]) == (begins, "3", begins)
    since = f"since step {begins}" if begins else "in 20 steps"
    words = (
        f"no gradient has reached `0.weight`, `0.bias`, `2.weight` and 1 more {since}; `torch.nn.functional.relu` lets"
    )
    assert event.kind == ("dead" if begins else "silent") and event.evidence.startswith(words)


def test_a_net_that_dies_of_one_update_is_told_though_it_takes_some_steps(tmp_path: Path) -> None:
    """More than half of the gradients are zero before the end: behind a ReLU that is usual."""
    with _watched(tmp_path, "dead") as watched:
        torch.manual_seed(0)
        model = mlp(12, 20, 20, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        shares = []
        for step in range(260):
            x = torch.rand(32, 12, generator=torch.Generator().manual_seed(step))
            optimizer.param_groups[0]["lr"] = 30.0 if step == 60 else 0.01
            update(optimizer, (model(x) - x.sum(1, keepdim=True) - 2).pow(2).mean())
            shares.append((model[2].weight.grad == 0).float().mean().item())
    begins = shares.index(1.0)
    assert 61 < begins < 68 and 0.5 < shares[begins - 1] < 1.0
    (event,) = watched.events
    assert (event.kind, event.began_at) == ("dead", begins)


def test_a_layer_that_fades_under_a_decay_gives_no_event(tmp_path: Path) -> None:
    """Its units die one by one; the last one takes the gradient of the layer before with it."""
    with _watched(tmp_path, "early") as watched:
        model = mlp(10, 32, 32, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=3.0)
        is_silent = []
        for _ in range(400):
            update(optimizer, nn.functional.cross_entropy(model(torch.randn(32, 10)), torch.randint(0, 2, (32,))))
            is_silent.append(not model[0].weight.grad.any())
    assert is_silent[-1] and not is_silent[100]
    assert not watched.events


def test_looks_for_silent_parameters_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that rest in turn are no reason to play steps all the time."""
    looks: list[None] = []
    look = EventStep.measured
    monkeypatch.setattr(EventStep, "measured", lambda *given: (looks.append(None), look(*given))[1])
    with _watched(tmp_path, "dead") as watched:
        experts, head = nn.ModuleList(nn.Linear(16, 16) for _ in range(12)), nn.Linear(16, 1)
        optimizer = torch.optim.SGD([*experts.parameters(), *head.parameters()], lr=0.01)
        for step in range(200):
            update(optimizer, head(experts[step // 5 % 12](torch.randn(8, 16))).pow(2).mean())
        assert len(looks) < 4
    assert not watched.events


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


class _Residual(nn.Module):
    """A layer in a residual block, which learns nothing once its activation is dead."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inp, self.layer, self.act, self.out = nn.Linear(6, 8), nn.Linear(8, 8), act, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        return self.out(x + self.act(self.layer(x)))


@pytest.mark.parametrize("act", [nn.ReLU(), torch.relu_])
def test_the_bias_behind_a_dead_activation_is_named(
    act: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    with _watched(tmp_path, "dead"):
        model = _Residual(act)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            if step == 60:
                nn.init.constant_(model.layer.bias, -40.0)
            x = torch.randn(8, 6)
            update(optimizer, nn.functional.mse_loss(model(x), x[:, :3].tanh()))
    snapshot = reprokit.load(tmp_path / "run.pt")
    assert str(snapshot.failure.call).rpartition(".")[2].rstrip("_") == "relu"
    found = diagnose(snapshot)
    assert found.id == "dead-relu-bias" and "The bias `layer.bias` " in found.mechanism
