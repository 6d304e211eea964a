"""Both ways of watching give one answer, over loops that hypothesis makes of every feature a training has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import reprokit
from reprokit.snapshot.format import load
from tests.capture.traps_checks import described_once
from tests.conftest import import_benchmark

agree, generated = import_benchmark("agree"), import_benchmark("generated")
FIELDS = {name: st.sampled_from(choices) for name, choices in generated.CHOICES.items()}
LOOPS = st.builds(generated.Loop, **FIELDS).map(generated.Loop.settled)
FEW = settings(derandomize=True, max_examples=5, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@FEW
@given(LOOPS)
def test_the_ways_of_watching_agree(loop: Any) -> None:
    row = agree.compare_ways("generated", loop)
    assert row.agrees and not (row.changed or row.broken), agree.table([row])


@pytest.mark.slow
@settings(FEW, max_examples=2)
@given(LOOPS)
def test_a_healthy_loop_is_left_alone(loop: Any) -> None:
    assert agree.alarms(loop.healthy) == []


@pytest.mark.parametrize(
    "features",
    [
        {"fault": "row", "convert": "grown", "bad_step": 3, "event_step": 2},  # a module is replaced midway
        {"fault": "gate", "norm": "moving", "teacher": "average"},  # buffers are replaced by every forward
        {"fault": "raise_user", "norm": "moving", "teacher": "average"},  # and are as they were after a replay
        {"fault": "loss", "update": "by_data", "convert": "bfloat16", "bad_step": 1},  # converted before it is seen
        {"fault": "overflow", "update": "lbfgs", "history": 1},
        {"fault": "fake", "style": "adversarial"},  # a graph from before the critic's update
        {"fault": "backward", "style": "recurrent"},  # a state that is handed on without its graph
        {"fault": "row", "style": "actor_critic", "norm": "batch", "teacher": "copied"},  # buffers written by the loop
        {"fault": "loss", "batch": "reused"},  # one tensor for all batches
        {"fault": "eps", "zero": "kept", "bad_step": 7},  # a gradient that is None until then
        {"fault": "overflow", "style": "adversarial", "history": 7, "bad_step": 3},  # backward calls before the loss
        {"fault": "backward", "zero": "after", "teacher": "average"},  # gradients are dropped before the step begins
        {"fault": "buffer", "style": "turns", "extra": "evaluation", "is_slow": True},  # a sweep in an evaluation
        {"fault": "loss", "zero": "kept", "losses": "separate", "bad_step": 0},  # gradients of the step that failed
        {"fault": "loss", "update": "by_grad", "bad_step": 0},  # a gradient that is set is not dropped
        {"fault": "input", "batch": "cleared", "accumulate": 3, "losses": "separate"},  # a batch is no gradient
        {"fault": "row", "convert": "bfloat16", "zero": "kept", "bad_step": 5, "event_step": 5},  # gradients converted
        {"fault": "overflow", "block": "random_depth", "batch": "augmented", "accumulate": 3},  # Python's generator
        {"fault": "rate", "freeze": "from", "zero": "kept"},  # a gradient from before the freezing
        {"fault": "write", "style": "turns", "bad_step": 0},  # a ruined row that the step after it does not read
        {"fault": "write", "bad_step": 5, "steps": 6},  # the last thing that a training does
        {"fault": "forward", "norm": "moving", "teacher": "copied", "scaler": True, "bad_step": 0},  # a late flag
    ],
    ids=lambda features: "-".join(str(value) for value in features.values()),
)
def test_a_late_finding_is_what_is_seen_at_once(features: dict[str, Any]) -> None:
    row = agree.compare_ways("loop", generated.Loop(**features).settled())
    assert row.is_same and not (row.untrue or row.changed or row.broken), agree.table([row])


@pytest.mark.parametrize(
    ("features", "way"),
    [
        ({"fault": "rate", "history": 0}, "sampled/0"),
        ({"fault": "buffer", "update": "lbfgs"}, "sampled"),
    ],
)
def test_where_one_cannot_go_back_nothing_is_changed_and_the_doubt_is_said(features: dict[str, Any], way: str) -> None:
    row = agree.compare_ways("loop", generated.Loop(**features).settled())
    assert row.agrees and not (row.changed or row.broken), agree.table([row])
    assert way in row.explained


@pytest.mark.parametrize("clip", ["none", "norm"])
def test_a_bad_loss_that_the_loop_skips_in_its_last_step_is_not_found_late(clip: str) -> None:
    loop = generated.Loop(fault="loss", skip="gradient", clip=clip, bad_step=11)
    row = agree.compare_ways("loop", loop)
    assert set(row.answers.values()) == {agree.SILENT}, agree.table([row])


CORRECTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "method": lambda grad: grad.nan_to_num_(),
    "data": lambda grad: grad.data.copy_(grad.nan_to_num()),
    "index": lambda grad: grad.__setitem__(~grad.isfinite(), 0.0),
}


@pytest.mark.parametrize("watch", ["every-step", "sampled"])
@pytest.mark.parametrize(
    ("correct", "parts", "on"),
    [
        *((correct, "all", ["nonfinite"]) for correct in CORRECTIONS),
        ("method", "all", ["nonfinite", "skipped"]),
        ("method", "the bias", ["nonfinite"]),
    ],
)
def test_gradients_that_are_corrected_in_place(
    tmp_path: Path, watch: Any, correct: str, parts: str, on: list[str]
) -> None:
    """A skipped step if every gradient is finite afterwards, saved on demand; else the step fails."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    with described_once(), reprokit.capture(tmp_path / "f.pt", watch=watch, on=on, after="continue", quiet=True):
        for step in range(8):
            loss = model(torch.randn(2, 300)).square().mean() / (0 if step == 5 else 1)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters() if parts == "all" else [model.bias]:
                CORRECTIONS[correct](parameter.grad)
            optimizer.step()
    saved = [load(path) for path in tmp_path.iterdir()]
    is_skipped = parts == "all" and "skipped" not in on
    expected = [] if is_skipped else [(5, "loss", "exact")]
    assert [(one.step, one.observed_at, one.fidelity) for one in saved] == expected


@pytest.mark.parametrize("correct", ["none", "halved", "corrected", "corrected after backward"])
@pytest.mark.parametrize("watch", ["every-step", "sampled"])
def test_a_corrected_gradient_is_a_skipped_step_however_it_is_watched(tmp_path: Path, watch: Any, correct: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with reprokit.capture(tmp_path / "failed.pt", watch=watch, after="continue", quiet=True):
        for step in range(8):
            loss = model(torch.randn(6, 4)).square().mean() / (0 if step == 5 else 1)
            optimizer.zero_grad()
            if correct == "corrected after backward":
                loss.backward()
                gradients = [parameter.grad for parameter in model.parameters()]
            else:
                gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                corrected = torch.nan_to_num(gradient) if correct.startswith("corrected") else gradient
                parameter.grad = corrected / 2 if correct == "halved" else corrected
            optimizer.step()
    saved = sorted(tmp_path.iterdir())
    assert [load(path).step for path in saved] == ([] if correct.startswith("corrected") else [5])
