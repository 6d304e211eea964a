"""What has led to a failure: pairs of loops that fail in the same call for different causes, and what is claimed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import reprokit
from reprokit.capture import experiments
from reprokit.capture.experiments import Experiments
from reprokit.capture.session import Session
from reprokit.cli.app import main
from reprokit.limits import CpuLimit
from reprokit.native import clock
from reprokit.program.dataflow import same_bits
from reprokit.series.unlike import Reading, drift, growth, unlike
from reprokit.snapshot.format import Snapshot, load
from reprokit.words import number_words

STEPS = 24


class Scale(nn.Module):
    """Multiplies by the exponential of what a layer gives, and of a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.layer(x)) * torch.exp(self.scale)


def train(at: Callable[[int, torch.Tensor, torch.optim.Optimizer], object]) -> Scale:
    """`STEPS` steps; ``at`` may change the batch or the optimizer of each."""
    model, generator = Scale(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.rand(8, 4, generator=generator)
        at(step, x, optimizer)
        loss = (model(x) - 5).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def drifting() -> None:
    """Of the learned number the loss is linear, so it falls by its learning rate in every step; the data are usual."""
    model, generator = Scale(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([{"params": [model.scale], "lr": 8.0}, {"params": model.layer.parameters(), "lr": 0.0}])
    for _ in range(STEPS):
        loss = (model(torch.rand(8, 4, generator=generator)) * 0).sum() - model.scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def diverging() -> None:
    """A learning rate that suits the first batches, and is ten times too large when the data have grown."""
    model, generator = nn.Linear(4, 1, bias=False), torch.Generator().manual_seed(1)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(2 * STEPS):
        x = torch.rand(8, 4, generator=generator) * min(6.0, 1 + step / 4)
        loss = (model(x).squeeze(1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adding_gradients(length: int, lr: float) -> None:
    """Gradients are set to zero before every so many backward passes, after which there is an update; never if 0."""
    model, generator = nn.Linear(8, 1), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(4 * STEPS):
        loss = (model(torch.rand(8, 8, generator=generator)) - 9).pow(4).mean()
        if length and step % length == 0:
            optimizer.zero_grad()
        loss.backward()
        if not length or step % length == length - 1:
            optimizer.step()


def carried() -> None:
    """A state that is handed from step to step grows fourfold in each."""
    model, state = Scale(), torch.full((8, 4), 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        loss = model(state).mean().log1p()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = 4 * state + 0 * model.layer.weight.detach()


def ignored_labels() -> None:
    """All labels of one batch are ignored, so that the loss is an average of nothing."""
    model, generator = nn.Linear(4, 3), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = torch.rand(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        y[:] = -100 if step == 12 else y
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def falling_temperature(as_given: Callable[[float], Any] = float) -> None:
    """The scores are divided by a number that falls to nothing, and the loss takes their exponentials."""
    model, generator = nn.Linear(4, 3), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(STEPS):
        temperature = as_given(0.6**step)
        loss = (model(torch.rand(8, 4, generator=generator)).abs() / temperature).exp().mean().log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def jumping(falling: float) -> torch.Tensor:
    return torch.tensor(0.5 if falling > 0.01 else 0.001)


def measured(falling: float) -> torch.Tensor:
    """As `jumping`, of data."""
    return torch.full((4,), 1.0 if falling > 0.01 else 1000.0).max().reciprocal()


class Tempered(nn.Module):
    """Has a temperature that somebody sets, and a batch norm whose buffers somebody averages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.temperature = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x).pow(2).mean() / self.temperature).exp()


def cooled(at: Callable[[int, Tempered], object]) -> None:
    model, generator = Tempered(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(STEPS):
        at(step, model)
        loss = model(torch.rand(8, 4, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def set_temperature(step: int, model: Tempered) -> None:
    model.temperature = 1.0 if step < 12 else 1e-4


def without_batch_statistics(step: int, model: Tempered) -> None:
    if step == 0:
        model.layers[1].running_var.fill_(1e-9)
        model.layers[1].momentum = 0.0
    model.train(step < 12)


def write_weight(step: int, model: Tempered) -> None:
    if step == 12:
        with torch.no_grad():
            model.layers[1].weight.mul_(1e3)


def lower_variance(step: int, model: Tempered) -> None:
    model.layers[1].momentum = 0.0
    model.eval()
    with torch.no_grad():
        model.layers[1].running_var.sub_(0.1)


class Averages(nn.Module):
    """Divides by averages that fall to nothing where no sample counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("counts", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counts.mul_(0.01).add_(torch.tensor([1.0, 1.0, 0.0]))
        return (self.layer(x).mean(0) / self.counts).pow(2).log1p().sum()


def decaying_counts() -> None:
    model, generator = Averages(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        loss = model(torch.rand(8, 4, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def half_precision() -> None:
    """The exponential of what grows in every batch is beyond half precision, long before it is beyond any other."""
    model, generator = nn.Linear(4, 1), torch.Generator().manual_seed(1)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(STEPS):
        x = torch.rand(8, 4, generator=generator) * (1 + step)
        with torch.autocast("cpu", torch.float16):
            loss = model(x).mean().exp().log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def half_throughout(limit: float = math.inf) -> list[torch.Tensor]:
    """As `half_precision`, of a model and data that are in half precision themselves. Beyond a ``limit`` data are
    negative, of which no precision has a logarithm."""
    model, generator = nn.Linear(4, 1).half(), torch.Generator().manual_seed(1)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    for step in range(STEPS):
        x = (torch.rand(8, 4, generator=generator) * (1 + step) * (1 if step < limit else -1)).half()
        loss = model(x).mean().exp().log() if limit == math.inf else model(x).mean().log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*model.state_dict().values(), *(state["momentum_buffer"] for state in optimizer.state.values())]


def lost_state(at: Callable[[int, torch.optim.Optimizer], object]) -> None:
    """The gradients of the first steps are large, so that those of later ones move the weights by little."""
    model, generator = nn.Linear(4, 1), torch.Generator().manual_seed(1)
    nn.init.constant_(model.weight, 0.01)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.0, 0.999))
    for step in range(STEPS):
        loss = (60 * model(torch.rand(8, 4, generator=generator))).cosh().pow(2).mean().log1p()
        optimizer = at(step, optimizer) or optimizer  # type: ignore[assignment]
        optimizer.param_groups[0]["lr"] = 1.0 if step >= 3 else 1e-6
        optimizer.zero_grad()
        (loss * (1e5 if step < 3 else 1)).backward()
        optimizer.step()


def empty(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 12:
        optimizer.state.clear()


def another(step: int, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    return torch.optim.Adam(optimizer.param_groups[0]["params"], betas=(0.0, 0.999)) if step == 12 else None


def write_moments(step: int, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values() if step == 12 else ():
        state["exp_avg_sq"].zero_()


def one_large_gradient() -> None:
    """The gradient is a thousand times larger in one step, after which the numbers overflow."""
    weight = nn.Parameter(torch.full((4,), 2.0))
    optimizer = torch.optim.SGD([weight], lr=0.02)
    for step in range(STEPS):
        factor = 1 if step != 12 else 3000
        loss = ((weight - 2.1).square().sum() * factor).exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def captured(folder: Path, loop: Callable[[], object], **options: object) -> Snapshot:
    file = folder / "s.pt"
    settings: dict[str, Any] = {"quiet": True, "history": 2 * STEPS, **options}
    with contextlib.suppress(IndexError), reprokit.capture(file, **settings):
        loop()
    return load(file)


def odd_rows(step: int, x: torch.Tensor, _: torch.optim.Optimizer) -> None:
    if step >= 12:
        x[2:4] *= 1e4


def odd_batch(step: int, x: torch.Tensor, _: torch.optim.Optimizer) -> None:
    if step >= 12:
        x *= 1e4


def raised_rate(step: int, _: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 if step < 12 else 1e3


@pytest.mark.parametrize(
    ("loop", "kind", "words"),
    [
        (
            lambda: train(odd_rows),
            "data",
            ("`x`", "in rows 2-3 of step 12", "rows 2-3 of `x` of step 11 in their place"),
        ),
        (lambda: train(odd_batch), "data", ("`x`", "in step 12", "in its place")),
        (lambda: train(raised_rate), "setting", ("`lr` went from 0.01 to 1000 at step 12", "as before")),
        (diverging, "setting", ("The run diverged", "a learning rate of 0.2", "a tenth of the learning rate")),
        (drifting, "state", ("`scale` rose by 8 in each of", "`scale` held at")),
        (ignored_labels, "data", ("`y` is -100 everywhere in step 12, and was 0 to 2 in steps 0-11", "in its place")),
        (falling_temperature, "setting", ("`temperature` fell from", "`temperature` at 1 as before")),
        (
            lambda: falling_temperature(torch.tensor),
            "setting",
            ("`temperature` fell from", "`temperature` of step 0 in"),
        ),
        (lambda: falling_temperature(jumping), "setting", ("`temperature` went from 0.5 to 0.001 at step", "of step")),
        (lambda: falling_temperature(measured), "unknown", ("It depends on `temperature` of step",)),
        (lambda: cooled(set_temperature), "setting", ("`temperature` went from 1 to 0.0001 at step 12",)),
        (lambda: cooled(without_batch_statistics), "setting", ("`training` went from True to False at step 12",)),
        (lambda: cooled(write_weight), "state", ("`layers.1.weight` went from", "test_cause.py:", "as before")),
        (decaying_counts, "state", ("`counts` falls in each of", "least element", "held at its value before step")),
        (lambda: cooled(lower_variance), "state", ("`layers.1.running_var` is", "held at its value before step")),
        (lambda: adding_gradients(0, 1e-3), "state", ("Nothing has set the gradients to zero", "before each step the")),
        (lambda: adding_gradients(4, 1e-3), "setting", ("of the learning rate the",)),
        (lambda: lost_state(empty), "state", ("The state of Adam is empty before the update of step 12", "state of")),
        (
            lambda: lost_state(another),
            "state",
            ("The state of Adam is empty before the update of step 12", "as before"),
        ),
        (lambda: lost_state(write_moments), "state", ("`exp_avg_sq` of `weight` went from", "to 0 at step 12, which")),
        (one_large_gradient, "setting", ("The norm of the gradients was", "gradients clipped to a norm of")),
        (half_precision, "numerics", ("float16 under autocast", "With autocast off")),
        (half_throughout, "numerics", ("in float16", "With float32 in the place of half precision", "do this exp in")),
        (carried, "state", ("`state`, which is carried from step to step, grows by 4 times", "in its place")),
    ],
)
def test_cause_is_what_an_experiment_has_shown(
    tmp_path: Path, loop: Callable[[], object], kind: str, words: tuple[str, ...]
) -> None:
    snapshot = captured(tmp_path, loop)
    assert snapshot.fidelity == "exact" and snapshot.cause is not None
    told = json.loads(json.dumps(snapshot.summary()))["cause"]
    assert told["class"] == kind and all(word in told["text"] for word in words), told
    assert told["interventions"][-1]["removes"] and math.isfinite(told["interventions"][-1]["loss"])


def test_state_in_half_precision_comes_back_from_float32(tmp_path: Path) -> None:
    bare, watched = half_throughout(), list[torch.Tensor]()
    assert captured(tmp_path, lambda: watched.extend(half_throughout()), after="continue").cause is not None
    assert all(map(same_bits, bare, watched))
    cause = captured(tmp_path, lambda: half_throughout(5), overwrite=True).cause
    assert cause is not None and cause.kind != "numerics" and "float32" not in cause.text


def test_batch_on_which_a_failure_depends_is_told_without_a_class(tmp_path: Path) -> None:
    def loop() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        for step in range(STEPS):
            x = torch.tensor([0.3 if step == 12 else 3.0, -0.5, 0.0, 0.0])
            loss = (weight * x).sum().acosh()  # of which there is no rule
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    cause = captured(tmp_path, loop).cause
    assert cause is not None and cause.kind == "unknown"
    assert "With `x` of step 11 in its place" in cause.text and "no experiment has decided" in cause.text


@pytest.mark.parametrize("read", ["loss", "exception"])
def test_input_on_which_a_failure_depends_is_named(tmp_path: Path, read: str) -> None:
    def loop() -> None:
        model, generator = nn.Embedding(8, 3), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            ids = torch.randint(8, (6,), generator=generator)
            target = torch.rand(6, 3, generator=generator) + 0.5
            ids[2], target[0, 0] = 9 if (step, read) == (12, "exception") else 1, -1 if step == 12 else 1
            loss = (model(ids).exp() - target.log()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    cause = captured(tmp_path, loop, on=("nonfinite", "exception")).cause
    name, shown = ("ids", "without the exception") if read == "exception" else ("target.log()", "stay finite")
    assert cause is not None and f"With `{name}` of step 11 in its place" in cause.text and shown in cause.text


def test_nothing_is_claimed_of_a_step_that_is_like_the_others(tmp_path: Path) -> None:
    def loop() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        for step in range(STEPS):
            loss = (weight * 0.5).sum().sqrt() * math.copysign(1.0, 12.0 - step) ** 0.5
            loss = (loss * 0 if step == 12 else loss).digamma()  # of which there is no rule
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert captured(tmp_path, loop).cause is None


def losses_of(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], lr: float = 1e-3) -> None:
    """Steps with a weight and a batch of ones, in step 12 with a zero: nothing is larger than before."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=lr)
    for step in range(STEPS):
        x = torch.ones(4)
        x[1] = float(step != 12)
        loss = loss_of(weight, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_nothing_is_claimed_of_an_overflow_whose_operands_are_like_the_others(tmp_path: Path) -> None:
    """A rule fits, and its fix helps; but data, a setting or the model may have made the operand large."""
    cause = captured(tmp_path, lambda: losses_of(lambda w, x: (w * (x - 3) * -11).sum().exp(), lr=0.0)).cause
    assert cause is None or cause.kind == "unknown"


def zero_by_zero(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.dropout((weight * x) / x, 0.5).sum()


def half_overflow(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weight * (12 - 2 * x)).half().exp().float().mean().log()


@pytest.mark.parametrize(
    ("loss_of", "kind", "words", "change"),
    [
        (zero_by_zero, "numerics", ("Zero divided by zero at ", "1 of 4 elements divides 0 by 0"), "keep the divisor"),
        (half_overflow, "numerics", ("Half precision overflow at ", "times the largest float16 number"), "do this exp"),
    ],
)
def test_a_rule_decides_by_a_fix_that_was_tried(
    tmp_path: Path,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    kind: str,
    words: tuple[str, ...],
    change: str,
) -> None:
    torch.manual_seed(0)
    snapshot = captured(tmp_path, lambda: losses_of(loss_of))
    assert snapshot.cause is not None
    told = json.loads(json.dumps(snapshot.summary()))["cause"]
    assert told["class"] == kind and all(word in told["text"] for word in words), told
    tried = told["interventions"][-1]
    assert tried["change"].startswith(change) and tried["removes"] and math.isfinite(tried["loss"])
    finite = f"The step stays finite (loss {number_words(tried['loss'])})"
    assert f"{finite} after this change: {tried['change']}." in told["text"]
    assert captured(tmp_path, lambda: losses_of(loss_of), overwrite=True, cause=False).cause is None


def test_a_rule_decides_an_exception(tmp_path: Path) -> None:
    def empty(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        lengths = x.long()
        packed = torch.nn.utils.rnn.pack_padded_sequence(weight.expand(4, 4, 4), lengths, True, False)
        return packed.data.sum()

    with pytest.raises(RuntimeError, match="greater than 0"):
        captured(tmp_path, lambda: losses_of(empty))
    cause = load(tmp_path / "s.pt").cause
    assert cause is not None and cause.kind == "data"
    assert "1 of 4 lengths is zero or less: row 1. The call returns after this change: give every" in cause.text


def test_rules_leave_the_training_as_it_was(tmp_path: Path) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, bool]:
        torch.manual_seed(3)
        losses_of(zero_by_zero)
        return torch.get_rng_state(), torch.rand(3), torch.is_grad_enabled()

    bare = run()
    with reprokit.capture(tmp_path / "s.pt", quiet=True, history=2 * STEPS, after="continue"):
        watched = run()
    cause = load(tmp_path / "s.pt").cause
    assert cause is not None and cause.kind == "numerics"
    assert torch.equal(bare[0], watched[0]) and torch.equal(bare[1], watched[1]) and bare[2] == watched[2]


def test_the_fix_of_a_call_comes_second_where_the_cause_lies_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exponential of a number that drifts overflows; a clamp makes the step finite with a usual loss."""
    snapshot = captured(tmp_path, drifting)
    assert snapshot.cause is not None and snapshot.cause.kind == "state"
    assert main(["shrink", str(tmp_path / "s.pt"), "-o", str(tmp_path / "out"), "--no-whatif"]) == 0
    screen = capsys.readouterr().err
    assert screen.index("cause: `scale` rose by 8") < screen.index("finite too, but the cause is hidden: clamp")
    for name in ("summary.md", "issue.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "alone makes it finite too, but hides the cause: clamp" in text and "and helped" not in text
    assert "**Also tried:**" in (tmp_path / "out" / "summary.md").read_text()


def test_no_experiment_runs_when_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiments, "run", lambda self: pytest.fail("the steps were played again"))
    assert captured(tmp_path, lambda: train(odd_batch), cause=False).cause is None


def odd_row(step: int, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    if step == STEPS - 4:
        x[3] = 900.0


@pytest.mark.parametrize("limit", ["_CONTROL_SECONDS", "_MOST_SECONDS"])
def test_what_was_unlike_is_named_where_no_time_is_left(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts need no experiment, and without the control they come from the data alone."""
    monkeypatch.setattr(experiments, limit, 0.0)
    found = captured(tmp_path, lambda: train(odd_row)).cause
    assert found is not None and found.kind == "unknown" and found.interventions == ()
    assert found.evidence[0].startswith("`x` is ") and "to 900 in row 3 of step 20" in found.evidence[0]
    assert found.text.startswith(found.evidence[0])
    reasons = {
        "_CONTROL_SECONDS": "no experiment was made, because playing 21 steps again takes more than 0 s of CPU time",
        "_MOST_SECONDS": "not tried, because experiments had used 0 s of CPU time: row 3 of `x` of step 19",
    }
    assert found.why_not is not None and reasons[limit] in found.why_not


def test_limits_are_counted_in_plays_not_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine so busy that each look at the clock is an hour later, all is as on an idle one."""
    hours = itertools.count(0.0, 3600.0)

    def busy(seconds: float) -> CpuLimit:
        return CpuLimit(seconds, now=lambda: (0.0, 0.0))

    idle = captured(tmp_path, lambda: train(odd_row)).cause
    monkeypatch.setattr(experiments, "limited", busy)
    monkeypatch.setattr(clock, "monotonic", lambda: next(hours))
    assert captured(tmp_path, lambda: train(odd_row), overwrite=True).cause == idle
    assert idle is not None and idle.kind == "data" and idle.why_not is None


def test_experiments_get_as_many_plays_as_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A play takes one CPU second here: the control one, and two changes of the two seconds that are left for them."""
    played = [0]
    play = Experiments._play

    def counting(self: Experiments, *given: Any) -> Any:
        played[0] += 1
        return play(self, *given)

    monkeypatch.setattr(Experiments, "_play", counting)
    monkeypatch.setattr(experiments, "limited", lambda seconds: CpuLimit(seconds, now=lambda: (played[0], 0.0)))
    monkeypatch.setattr(experiments, "_TIMES", 2)
    monkeypatch.setattr(experiments, "_LEAST_SECONDS", 0.0)
    found = captured(tmp_path, lambda: losses_of(zero_by_zero)).cause
    assert found is not None and played[0] <= 3
    tried = [one for one in found.interventions if one.steps > 1]
    assert len(tried) == played[0] - 1


def test_a_rule_is_no_cause_where_the_steps_before_were_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_control = captured(tmp_path, lambda: losses_of(zero_by_zero)).cause
    monkeypatch.setattr(experiments, "_CONTROL_SECONDS", 0.0)
    without = captured(tmp_path, lambda: losses_of(zero_by_zero), overwrite=True).cause
    assert with_control is not None and with_control.kind == "numerics" and with_control.why_not is None
    assert without is not None and without.kind == "unknown" and without.why_not is not None
    words = "Zero divided by zero", "The step stays finite", "keep the divisor above a small number"
    assert all(one in without.text and one in with_control.text for one in words)  # what the rule has shown of the step


def test_steps_that_were_not_kept_are_named(tmp_path: Path) -> None:
    found = captured(tmp_path, lambda: train(odd_row), history=0).cause
    assert found is not None and found.kind == "unknown"
    assert found.why_not == "no experiment was made, because the steps before were not kept"


def test_a_play_that_is_not_what_training_did_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss depends on something that no replay puts back."""
    calls = itertools.count()

    class Counting(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 1e-3 * next(calls))

    monkeypatch.setattr(sys.modules[__name__], "Scale", Counting)
    found = captured(tmp_path, lambda: train(odd_row)).cause
    assert found is not None and found.kind == "unknown"
    assert "to 900 in row 3 of step 20" in found.text
    assert found.why_not is not None and "had other losses than in training" in found.why_not


def test_what_was_not_tried_is_one_line_on_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiments, "_CONTROL_SECONDS", 0.0)
    captured(tmp_path, lambda: train(odd_row), quiet=False)
    line = "No experiment was made, because playing 21 steps again takes more than 0 s of CPU time."
    assert [one for one in capsys.readouterr().err.splitlines() if one == f"reprokit:   {line}"]
    file, folder = str(tmp_path / "s.pt"), tmp_path / "out"
    assert main(["show", file, "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert (cause["tried"], cause["why_not"]) == (False, line[0].lower() + line[1:-1])
    assert main(["show", file]) == 0
    shown = capsys.readouterr()
    assert line in " ".join((shown.out + shown.err).split())
    assert main(["shrink", file, "-o", str(folder), "--no-whatif"]) == 0
    for name in ("summary.md", "issue.md", "report.html"):
        assert line in " ".join((folder / name).read_text().split())


def test_only_the_option_that_jumped_is_put_back(tmp_path: Path) -> None:
    """The rate of another group falls in the same step, and is what it was in the experiment."""

    def loop() -> None:
        model, generator = Scale(), torch.Generator().manual_seed(1)
        groups = [{"params": model.layer.parameters()}, {"params": [model.scale], "lr": 1e-3}]
        optimizer = torch.optim.SGD(groups, lr=1e-2)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 1e-2 if step < 12 else 1e3
            loss = (model(torch.rand(8, 4, generator=generator)) - 5).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.append(optimizer.param_groups[1]["lr"])

    rates: list[float] = []
    seen: list[list[float]] = []
    step_of = torch.optim.SGD.step

    def step(self: torch.optim.SGD, closure: None = None) -> None:
        seen.append([group["lr"] for group in self.param_groups])
        step_of(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        snapshot = captured(tmp_path, loop)
    assert snapshot.cause is not None and "`lr` at 0.01 as before" in snapshot.cause.text
    assert {rates[1] for rates in seen} == {1e-3} and [0.01, 0.001] in seen[-3:]


def test_an_event_was_finite_before_the_experiment_too(tmp_path: Path) -> None:
    def loop() -> None:
        torch.manual_seed(0)
        model, generator = (
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)),
            torch.Generator().manual_seed(1),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(80):
            x = torch.randn(16, 4, generator=generator)
            optimizer.param_groups[0]["lr"] = 0.02 if step < 50 else 5.0
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    cause = captured(tmp_path, loop, on=("spike",)).cause
    assert cause is not None and cause.kind == "setting" and "steps end with a usual loss (0." in cause.text


def test_gradients_of_weights_that_were_loaded_first_are_clipped_in_the_control(tmp_path: Path) -> None:
    def loop() -> None:
        model, generator = nn.Linear(4, 1), torch.Generator().manual_seed(1)
        model.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.ones(1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss = model(torch.rand(8, 4, generator=generator) * (1e25 if step == 2 else 1.0)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    cause = captured(tmp_path, loop).cause
    assert cause is not None and cause.kind == "data"


def swapped_labels() -> None:
    """In five steps the labels are those of other classes, in the usual range."""
    model, generator = nn.Linear(2, 2), torch.Generator().manual_seed(1)
    nn.init.eye_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(120):
        y = torch.randint(2, (16,), generator=generator)
        x = nn.functional.one_hot(y, 2) * 4 + torch.rand(16, 2, generator=generator)
        y = 1 - y if 80 <= step < 85 else y  # for good would be another task
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_spike_of_several_batches_is_that_of_all_of_them(tmp_path: Path) -> None:
    cause = captured(tmp_path, swapped_labels, on=("spike",)).cause
    assert cause is not None and cause.kind == "data"
    assert cause.text.startswith("It depends on") and "of steps 80-" in cause.text and "step 79 in its" in cause.text


def test_a_step_with_two_updates_counts_once(tmp_path: Path) -> None:
    def loop() -> None:
        model, generator = Scale(), torch.Generator().manual_seed(1)
        optimizers = [torch.optim.SGD(part, lr=1e-2) for part in (model.layer.parameters(), [model.scale])]
        for step in range(STEPS):
            x = torch.rand(8, 4, generator=generator) * (1e4 if step == 12 else 1.0)
            for optimizer in optimizers:
                loss = (model(x) - 5).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    cause = captured(tmp_path, loop).cause
    assert cause is not None and cause.kind == "data" and 10 <= cause.interventions[-1].steps <= 13


def test_output_of_the_users_code_is_not_printed_by_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loud(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("in forward", file=sys.stderr)
            return super().forward(x)

    def counted(**options: object) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "Scale", Loud)
            snapshot = captured(tmp_path, lambda: train(odd_batch), **options)
        assert (snapshot.cause is None) == (options.get("cause") is False)
        return capsys.readouterr().err.count("in forward")

    assert counted() == counted(cause=False, overwrite=True)


def test_experiments_leave_the_training_as_it_was(tmp_path: Path) -> None:
    bare = train(odd_batch)
    with reprokit.capture(tmp_path / "s.pt", quiet=True, history=2 * STEPS, after="continue"):
        watched = train(odd_batch)
    assert load(tmp_path / "s.pt").cause is not None
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), watched.state_dict()[name].nan_to_num())


def from_numpy(kind: str) -> list[torch.Tensor]:
    """Batches in NumPy's memory, in step 20 with two large rows: of an array of its own for each or of one for all,
    which something writes behind the loop's back in a ``race``."""
    torch.manual_seed(0)
    model, rng, memory = nn.Linear(4, 1), np.random.default_rng(0), np.zeros((8, 4), np.float32)
    model.register_buffer("mean", torch.from_numpy(np.zeros(4, np.float32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        memory = np.zeros((8, 4), np.float32) if kind == "fresh" else memory
        memory[:] = rng.random((8, 4), dtype=np.float32)
        memory[2:4] *= 1e4 if step == 20 else 1
        x = torch.from_numpy(memory)
        out = model(x - model.mean)
        if kind == "race" and step == 20:
            memory[[3, 7]] += 7
        loss = out.abs().exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return [*model.state_dict().values()]


@pytest.mark.parametrize("kind", ["fresh", "reused", "race"])
def test_an_input_is_what_the_step_read(kind: str, tmp_path: Path) -> None:
    bare = from_numpy(kind)
    watched: list[torch.Tensor] = []
    snapshot = captured(tmp_path, lambda: watched.extend(from_numpy(kind)), after="continue")
    assert all(map(same_bits, bare, watched))
    assert snapshot.step == 20 and snapshot.fidelity == "exact" and snapshot.cause is not None
    cause, since = snapshot.cause, "`x` of step 20 is no longer what it was when the step read it"
    assert cause.kind == "data" and cause.text.startswith("`x` is 0.0"), cause
    assert (since in cause.text) == (kind == "race") == any(since in line for line in cause.evidence)
    assert kind != "race" or "; rows 3, 7 are 7." in cause.text


def test_memory_that_nobody_writes_is_copied_once(tmp_path: Path) -> None:
    x, model = torch.from_numpy(np.ones((8, 4), np.float32)), Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Session(directory=tmp_path, quiet=True, history=2 * STEPS) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        tape = session._loop.tape
        assert len(tape.saved) == 1 and not list(tape.rewritten())
        x.numpy()[2] = 5
        assert [(then[2, 0].item(), now[2, 0].item()) for _, now, then in tape.rewritten()] == [(1, 5)]


class Seen:
    """What a model keeps of its calls, in an object of its own."""

    def __init__(self) -> None:
        self.count, self.steps, self.last = 0, list[int](), torch.zeros(())

    def add(self, x: torch.Tensor) -> None:
        self.count += 1
        self.steps.append(self.count)
        self.last.copy_(x.detach().mean())


class Counting(Scale):
    """Counts its calls in an attribute, a list and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.calls, self.seen = 0, list[int](), Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls.append(self.count)
        self.seen.add(x)
        return super().forward(x)


def test_what_the_model_counts_is_what_it_counts_unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Scale", Counting)
    models = [train(odd_batch)]
    assert captured(tmp_path, lambda: models.append(train(odd_batch)), after="continue").cause is not None
    bare, watched = models
    assert isinstance(bare, Counting) and isinstance(watched, Counting)
    assert (bare.count, bare.calls, bare.seen.count) == (watched.count, watched.calls, watched.seen.count)
    assert bare.seen.steps == watched.seen.steps and bare.seen.last == watched.seen.last


def test_batch_of_another_size_or_type_is_told(tmp_path: Path) -> None:
    def loop(last: torch.Tensor) -> None:
        layer = nn.Linear(2, 3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        for x in (*(torch.rand(8, 2) for _ in range(12)), last):
            loss = (layer(x.float()) / layer(x.float()).std(0)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, which is asked for the spread of one
        single = captured(tmp_path, lambda: loop(torch.rand(1, 2))).cause
    assert single is not None and any("has 1 row in step 12, and had 8 or more" in line for line in single.evidence)
    half = captured(tmp_path, lambda: loop(torch.ones(8, 2, dtype=torch.bfloat16)), overwrite=True).cause
    assert half is None or all("had 8" not in line for line in half.evidence)


def readings(*values: float) -> list[Reading]:
    return [Reading(step, value, value) for step, value in enumerate(values)]


def test_jump_is_beyond_all_of_before_in_the_failing_step() -> None:
    found = unlike("x", "batch", readings(1, -2, 1, 30, 40))
    assert found is not None and (found.since, found.before, found.now) == (3, (-2, 1), (30, 30))
    assert unlike("x", "batch", readings(1, -2, 1, 30, 1)) is None
    assert unlike("x", "batch", readings(0, 0, 0, 30)) is None  # nothing is known of what is usual
    assert unlike("x", "batch", readings(30)) is None


def test_drift_goes_the_same_way_by_the_same_amount() -> None:
    found = drift("s", "state", readings(5, 0, -1, -2, -3, -4, -5))
    assert (
        found is not None and (found.first, found.now) == (1, (-5, -5)) and "fell by 1 in each of 5 steps" in found.text
    )
    assert drift("s", "state", readings(0, -1, -2, -1, -2, -3, -4)) is None
    assert drift("s", "state", readings(0, 0, 0, 0, 0, 0, 0)) is None


def test_growth_is_by_a_factor_in_every_step() -> None:
    found = growth("h", "carried", readings(9, 1, 2, 4, 8, 16, 32))
    assert found is not None and found.first == 1 and "grows by 2 times in each" in found.text
    assert growth("h", "carried", readings(1, 2, 4, 8, 4, 8, 16)) is None
