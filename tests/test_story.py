"""The story: which layer left its own course first, since when and how fast."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reprokit
from reprokit import Snapshot
from reprokit.cli.app import main as command
from reprokit.series.story import LayerNumbers, chapters

STEPS = range(20)


def rows(module: str, quantity: str, values: dict[int, float], usual: float = 0.3) -> list[LayerNumbers]:
    """A layer that has the usual value but in the steps given."""
    return [LayerNumbers(step, module, **{quantity: values.get(step, usual)}) for step in STEPS]


@pytest.mark.parametrize(
    ("quantity", "values", "step", "words"),
    [
        (
            "gradient",
            {s: 0.3 * 1.8 ** (s - 9) for s in range(10, 20)},
            10,
            "grows from step 10 on, from about 0.3 before",
        ),
        ("gradient", dict.fromkeys(range(15, 20), 3e5), 15, "jumps from about 0.3 to 300000 at step 15"),
        ("activation", {19: math.inf}, 19, "is inf at step 19; before it was about 0.3"),
        ("update", {18: math.nan, 19: math.nan}, 18, "is nan at step 18"),
        ("zeros", dict.fromkeys(range(12, 20), 1.0), 12, "the output of `a` is zero from step 12 on"),
        ("zeros", dict.fromkeys(STEPS, 1.0), 0, "the output of `a` is zero in all of the 20 played steps"),
        ("gradient", dict.fromkeys(STEPS, 0.0), 0, "the gradient of `a` is zero in all of the 20 played steps"),
    ],
)
def test_a_layer_that_leaves_its_course(quantity: str, values: dict[int, float], step: int, words: str) -> None:
    (found,) = chapters([*rows("a", quantity, values), *rows("b", quantity, {})], 20)
    assert (found.step, found.module) == (step, "a") and words in found.text


@pytest.mark.parametrize(
    ("quantity", "values"),
    [
        ("gradient", {10: 3e5}),  # one bad batch, and the layer is back on its course
        ("gradient", {s: 0.3 * 1.05**s for s in STEPS}),
        ("gradient", {s: 0.3 * 0.5**s for s in STEPS}),
        ("zeros", {s: 0.6 + 0.02 * (s % 5) for s in STEPS}),
        ("zeros", {18: 1.0, 19: 1.0}),
        ("activation", {s: (0.1, 0.9)[s % 2] for s in STEPS}),
    ],
)
def test_a_layer_that_does_not(quantity: str, values: dict[int, float]) -> None:
    assert chapters(rows("a", quantity, values), 20) == []


def test_two_steps_are_no_story() -> None:
    assert chapters([LayerNumbers(0, "a", gradient=1.0), LayerNumbers(1, "a", gradient=20.0)], math.inf) == []


@given(st.lists(st.floats() | st.none(), max_size=30), st.sampled_from(["gradient", "update", "activation", "zeros"]))
def test_any_numbers(values: list[float | None], quantity: str) -> None:
    given_rows = [LayerNumbers(step, "a", **{quantity: value}) for step, value in enumerate(values)]
    found = chapters(given_rows, len(values))
    assert all(chapter.step in range(len(values)) and chapter.text for chapter in found)


class Grows(nn.Module):
    """Its first layer's gradient doubles in every step from `GROWS_FROM` on, by a factor behind that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(x))
        hidden = hidden.detach() + self.factor * (hidden - hidden.detach())
        return self.last(hidden)


GROWS_FROM, FAILS_AT = 8, 16


def train_until_nan(path: Path, watch: str = "sampled", history: int | None = 50, noise: bool = False) -> Snapshot:
    torch.manual_seed(0)
    model = Grows()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    calls = itertools.count()
    with reprokit.capture(path, watch=watch, history=history):
        for step in range(30):
            model.factor = 2.0 ** max(0, step - GROWS_FROM + 1)
            loss = model(torch.randn(256, 4)).pow(2).mean()
            if noise:
                loss = loss + 1e-6 * next(calls) if step == 5 else loss
            if step == FAILS_AT:
                loss = loss * float("inf")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return reprokit.load(path)


@pytest.mark.parametrize("watch", ["sampled", "every-step"])
def test_a_captured_nan_has_its_story(tmp_path: Path, watch: str, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = train_until_nan(tmp_path / "a.pt", watch)
    assert snapshot.step == FAILS_AT and snapshot.fidelity == "exact"
    first = chapters(snapshot.layers or (), FAILS_AT)[0]
    assert (first.step, first.module, first.quantity) == (GROWS_FROM, "first", "gradient norm")
    assert "grows" in first.text
    (row,) = [row for row in snapshot.layers or () if (row.step, row.module) == (3, "act")]
    assert row.gradient is None and row.zeros is not None and 0.2 < row.zeros < 0.8
    story = snapshot.summary()["story"]
    assert story[0] == {"step": GROWS_FROM, "module": "first", "quantity": "gradient norm", "text": first.text}
    assert command(["show", str(tmp_path / "a.pt")]) == 0
    assert "gradient norm of `first`" in " ".join(capsys.readouterr().err.split())


def test_the_story_is_of_training_itself(tmp_path: Path) -> None:
    """The gradient and the true update that a hook would have seen in training, in float64, to the last bit."""
    seen: dict[int, tuple[float, float]] = {}
    torch.manual_seed(0)
    model = Grows()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(FAILS_AT):
        model(torch.randn(16, 4)).pow(2).mean().backward()
        parameters = list(model.first.parameters())
        norm = math.hypot(*(torch.linalg.vector_norm(p.grad.double()).item() for p in parameters if p.grad is not None))
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        change = math.hypot(
            *((p.detach().double() - b.double()).norm().item() for p, b in zip(parameters, before, strict=True))
        )
        seen[step] = norm, change / math.hypot(*(b.double().norm().item() for b in before))
        optimizer.zero_grad()
    torch.manual_seed(0)
    model = Grows()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with reprokit.capture(tmp_path / "a.pt", history=50):
        for step in range(30):
            loss = model(torch.randn(16, 4)).pow(2).mean()
            (loss * (float("inf") if step == FAILS_AT else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [row for row in reprokit.load(tmp_path / "a.pt").layers or () if row.module == "first"]
    played = {row.step: (row.gradient, row.update) for row in rows if row.step < FAILS_AT}
    assert len(played) >= 10 and played == {step: seen[step] for step in played}


def test_no_story_of_steps_that_do_not_repeat(tmp_path: Path) -> None:
    """A loss that depends on what is not put back ends the story before its step; without copies there is none."""
    told = train_until_nan(tmp_path / "a.pt", noise=True).layers or []
    assert told and max(row.step for row in told) >= 5
    assert train_until_nan(tmp_path / "b.pt", history=0).layers is None


def test_report_and_issue_show_it(tmp_path: Path) -> None:
    train_until_nan(tmp_path / "a.pt")
    assert command(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / "out"), "--no-whatif"]) == 0
    report, issue = ((tmp_path / "out" / name).read_text() for name in ("report.html", "issue.md"))
    assert "The gradient norm of `first` grows" in issue
    assert 'id="layers"' in report and report.count('<table class="heat"') == 4 and "heat-8" in report
