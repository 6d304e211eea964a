"""A capture that does less to keep its budget: which steps are noted, what a failure in the others is saved with."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import reprokit
from reprokit.capture.run import budget
from reprokit.capture.run.budget import Budget, Meter
from reprokit.capture.session import Session
from reprokit.errors import ReprokitError, UsageError
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot, load
from tests.capture.loops import LOOPS
from tests.conftest import Run

UPDATED_BY_HAND = ("manual_update",)


def train(session: Session | None, every: int, bad_step: int, in_model: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    if session is not None and every != 1:
        session._run_state.budget.every = every
        session._run_state.choose()
    for step in range(12):
        x = torch.randn(8, 4)
        if in_model and step == bad_step:
            x[2] = torch.inf
        z = model(x).mean(1)
        if not in_model and step == bad_step:
            z = torch.log(z - z)
        optimizer.zero_grad()
        (z**2).mean().backward()
        optimizer.step()


def captured(
    path: Path, *, every: int = 1, from_step: int | None = None, bad: int = 9, in_model: bool = False
) -> Snapshot:
    with reprokit.capture(path / "x.pt", from_step=from_step, quiet=True) as session:
        train(session, every, bad, in_model)
    assert torch._C._len_torch_function_stack() == 0
    return load(path / "x.pt")


@pytest.mark.parametrize(("every", "bad"), [(1, 9), (3, 9), (4, 8)])
def test_a_noted_step_is_exact(every: int, bad: int, tmp_path: Path) -> None:
    snapshot = captured(tmp_path, every=every, bad=bad)
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (bad, "exact", "torch.log")
    assert (snapshot.settings.noted_every or 1) == every


@pytest.mark.parametrize(("every", "noted"), [(4, "only every 4th step was noted"), (0, "no step was noted")])
def test_a_step_that_was_not_noted(every: int, noted: str, tmp_path: Path) -> None:
    snapshot = captured(tmp_path, every=every)
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (9, "unfaithful", None)
    assert f"step 9 was not noted: {noted}" in snapshot.fidelity_note
    assert "`--from-step 9`" in snapshot.fidelity_note
    assert snapshot.settings.noted_every == every
    with pytest.raises(ReprokitError) as caught:
        shrink(snapshot)
    assert caught.value.hint is not None and "--from-step" in caught.value.hint
    assert not snapshot.summary()["failure"]["shows_cause"]


def test_only_losses_are_checked_and_steps_inside_backward_calls_count(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step_inside = model.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        session._run_state.budget.every = 0
        session._run_state.choose()
        for step in range(9):
            loss = model(torch.randn(8, 4)).square().mean()
            if step == 7:
                step_inside.remove()
                loss = torch.log(-loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert session._tape.only_judges
    snapshot = load(tmp_path / "x.pt")
    assert (snapshot.step, snapshot.fidelity) == (14, "unfaithful")
    assert torch._C._len_torch_function_stack() == 0


def test_losses_are_checked_after_a_step_whose_closure_began_anew_when_nothing_was_to_be_noted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean() * scale
        loss.backward()
        return loss

    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        session._run_state.budget.every = 0  # from the second call of the closure on
        for step in range(6):
            scale = float("nan") if step == 4 else 1.0
            optimizer.step(closure)
    snapshot = load(tmp_path / "x.pt")
    assert (snapshot.step, snapshot.observed_at) == (4, "loss")
    assert torch._C._len_torch_function_stack() == 0


def test_a_grad_scaler_that_comes_late_is_followed(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        session._run_state.budget.every = 0
        session._run_state.choose()
        for step in range(120):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            if step < 3:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert session._run_state.iterations.completed == 120
    assert session.snapshots == []


def test_of_a_step_that_was_not_noted_the_models_are_known(tmp_path: Path) -> None:
    snapshot = captured(tmp_path, every=4, in_model=True)
    assert (snapshot.step, snapshot.failure.input_name, snapshot.failure.phase) == (9, "x", "forward")
    assert snapshot.fidelity == "unfaithful"


@pytest.mark.parametrize("from_step", [0, 7, 9])
def test_from_a_step_on_everything_is_noted(from_step: int, tmp_path: Path) -> None:
    snapshot = captured(tmp_path, from_step=from_step)
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (9, "exact", "torch.log")


def test_a_failure_before_the_first_noted_step(tmp_path: Path) -> None:
    snapshot = captured(tmp_path, from_step=10)
    assert snapshot.step == 9
    assert "step 9 comes before step 10" in snapshot.fidelity_note


def test_going_back_works_from_the_first_noted_step_on(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", from_step=3, watch="deferred", quiet=True) as session:
        train(session, 1, 6, in_model=False)
    snapshot = load(tmp_path / "x.pt")
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (6, "exact", "torch.log")


@pytest.mark.parametrize("loop", LOOPS)
def test_stepping_down_changes_no_bit(loop: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every window is exceeded, so that the steps between two noted ones become more and more, until none is noted."""
    monkeypatch.setattr(budget, "WINDOW", 1)
    expected = loop(False)
    with reprokit.capture(budget=1e-6) as session:
        session._run_state.budget.start_measuring()
        actual = loop(False)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert session.snapshots == []
    assert all(not vars(owner).get(name) for owner, name in session._run_state.budget.parts)
    said = [line for line in capsys.readouterr().err.splitlines() if "budget" in line]
    told = [line.removeprefix("reprokit: ").partition(":")[0] for line in said]
    steps_down = ["noting every 64th step", "noting no step, only checking losses"]
    assert told == ([] if loop.__name__ in UPDATED_BY_HAND else steps_down)


def test_the_parts_are_methods(tmp_path: Path) -> None:
    for owner, name in Session(directory=tmp_path)._run_state.budget.parts:
        assert callable(getattr(type(owner), name))


def test_modes_of_the_loop_stay_where_they_are(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", from_step=3, quiet=True) as session, torch.device("cpu"):
        level = torch._C._len_torch_function_stack()
        train(session, 1, 99, in_model=False)
        assert torch._C._len_torch_function_stack() == level + 1
        assert torch._C._get_function_stack_at(0) is session._tape
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("options", [{"history": 1}, {"watch": "every-step"}])
def test_clocks_do_not_stay(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that copy the state are not measured, so that there may be none to measure."""
    monkeypatch.setattr(budget, "_MOST_SEEN", 5)
    with reprokit.capture(quiet=True, **options) as session:
        kept = session._run_state.budget
        kept._next = 0.0
        train(None, 1, 99, in_model=False)
        assert kept._meter is None


class Worker:
    """Spends CPU time; ``outer`` calls ``inner``."""

    def inner(self, seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def outer(self, seconds: float) -> None:
        self.inner(seconds)


def test_a_meter_counts_nested_methods_once() -> None:
    worker = Worker()
    meter = Meter([(worker, "inner"), (worker, "outer")])
    meter.open()
    for is_usual in (True, True, False):
        worker.outer(0.02)
        Worker().inner(0.06 if is_usual else 0.2)
        meter.end_step(is_usual=is_usual)
    meter.close()
    assert meter.num_steps == 2
    assert 0.55 < meter.share < 0.8  # of 0.08 s 0.02 are seen, which stand for 0.03
    assert not vars(worker)


@pytest.mark.parametrize(
    ("share", "limit", "every", "noted"),
    [(0.3, 10, 4, "every 4th"), (0.11, 10, 2, "every 2nd"), (2.5, 10, 32, "every 32nd"), (0.5, 0.1, 64, "every 64th")],
)
def test_the_step_down_follows_from_the_share(share: float, limit: float, every: int, noted: str) -> None:
    said: list[str] = []
    kept = Budget(limit)
    kept.say = said.append
    kept.start_measuring()
    now = 0.0
    kept.end_step(now, 0)
    assert kept._meter is not None
    meter = kept._meter
    meter._own, meter._all = share, 1 + share
    meter.num_steps = budget.WINDOW
    kept.end_step(now, 1)  # a step with a copy, which does not count
    assert kept.every == every
    assert len(said) == 1 and f"noting {noted}" in said[0]
    assert [step for step in range(1, 100) if kept.notes(step)] == (list(range(every, 100, every)) if every else [])


def test_two_windows_tell_what_noting_costs() -> None:
    """Of 30% five do not depend on noting, so that every fourth step would be too many after the first step down."""
    kept = Budget(10.0)
    kept.start_measuring()
    for share, every in ((0.30, 4), (0.05 + 0.25 / 2, 8)):
        kept.end_step(0.0, 0)
        assert kept._meter is not None
        kept._meter._own, kept._meter._all = share, 1 + share
        kept._meter.num_steps = budget.WINDOW
        kept.every, kept._earlier = (1, None) if every == 4 else (2, (1, 0.30))
        kept.end_step(0.0, 1)
        assert kept.every == every


def test_no_step_is_noted_only_if_every_64th_is_too_much() -> None:
    kept = Budget(10.0)
    kept.start_measuring()
    for share, every in ((0.30, 4), (0.29, 64), (0.12, 0)):
        kept.end_step(0.0, 0)
        assert kept._meter is not None
        kept._meter._own, kept._meter._all = share, 1 + share
        kept._meter.num_steps = budget.WINDOW
        kept.end_step(0.0, 1)
        assert kept.every == every


def test_a_clock_does_not_count_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the time takes a second here, and nothing else takes any."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(seconds)))
    calibrations = (budget.clock_seconds, budget.dispatch_seconds)
    for calibration in calibrations:
        calibration.cache_clear()
    part = SimpleNamespace(method=lambda: None)
    meter = Meter([(part, "method")])
    meter.open()
    for _ in range(1000):
        part.method()
    for calibration in calibrations:
        calibration.cache_clear()
    assert 0 <= meter._step_own < 20


def test_a_short_run_never_steps_down() -> None:
    kept = Budget(1e-9)
    for step in range(1000):
        kept.end_step(step * budget.PATIENCE / 1000, 0)
    assert kept.every == 1 and kept._meter is None


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_budget_is_a_percentage_above_zero(value: float) -> None:
    with pytest.raises(UsageError, match="`budget` cannot be"), reprokit.capture(budget=value):
        pass


SCRIPT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.ones(3, 2)).square().mean()
    if step == 2:
        loss = torch.log(-loss.detach()) * loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_command_says_how_to_note_the_step(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_reprokit("capture", "--from-step", "4", "train.py", "--lr", "1")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "reprokit: next: reprokit capture --from-step 2 train.py --lr 1"
    done = run_reprokit("capture", "--from-step", "2", "-f", "-o", "x.pt", "train.py")
    assert done.stderr.splitlines()[-1] == "reprokit: next: reprokit shrink x.pt"
    for wrong in ("0", "-3", "nan", "much"):
        assert run_reprokit("capture", "--budget", wrong, "train.py").returncode == 2


class Refused(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("refused")


def test_an_exception_in_a_backward_pass_is_saved_when_only_losses_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match="refused"), reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        session._run_state.budget.every = 0
        session._run_state.choose()
        for step in range(9):
            out = model(torch.randn(8, 4))
            optimizer.zero_grad()
            (Refused.apply(out) if step == 6 else out).square().mean().backward()
            optimizer.step()
    snapshot = load(tmp_path / "x.pt")
    assert (snapshot.step, snapshot.failure.kind, snapshot.fidelity) == (6, "exception", "unfaithful")
    assert torch._C._len_torch_function_stack() == 0 and session._tape.depth == 0
