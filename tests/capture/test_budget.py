"""A capture that does less to keep its budget: which steps are noted, what a failure in the others is saved with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprokit
from reprokit.capture import budget
from reprokit.capture.session import Session
from reprokit.cli import main
from reprokit.errors import ReprokitError, UsageError
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot, load
from tests.capture.loops import LOOPS
from tests.capture.traps_checks import update
from tests.conftest import Run

UPDATED_BY_HAND = ("manual_update",)


def train(session: Session | None, every: int, bad_step: int, in_model: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    if session is not None and every != 1:
        session._loop.budget.every, session._loop.budget.is_sparing = every, every != 1
        session._loop.choose()
    for step in range(12):
        x = torch.randn(8, 4)
        if in_model and step == bad_step:
            x[2] = torch.inf
        z = model(x).mean(1)
        if not in_model and step == bad_step:
            z = torch.log(z - z)
        update(optimizer, (z**2).mean())


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


def test_a_step_that_was_not_noted(tmp_path: Path) -> None:
    snapshot = captured(tmp_path, every=4)
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (9, "unfaithful", None)
    assert "step 9 was not noted: only every 4th step was noted" in snapshot.fidelity_note
    assert "`--from-step 9`" in snapshot.fidelity_note
    assert snapshot.settings.noted_every == 4
    with pytest.raises(ReprokitError) as caught:
        shrink(snapshot)
    assert caught.value.hint is not None and "--from-step" in caught.value.hint
    assert not snapshot.summary()["failure"]["shows_cause"]


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
    with reprokit.capture(tmp_path / "x.pt", from_step=3, quiet=True) as session:
        train(session, 1, 6, in_model=False)
    snapshot = load(tmp_path / "x.pt")
    assert (snapshot.step, snapshot.fidelity, snapshot.failure.call) == (6, "exact", "torch.log")


@pytest.mark.parametrize("loop", list(LOOPS)[::3], ids=lambda loop: loop.__name__)
def test_stepping_down_changes_no_bit(loop: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every window is exceeded, so that the steps between two noted ones become more and more."""
    monkeypatch.setattr(budget, "WINDOW", 1)
    monkeypatch.setattr(budget, "BETWEEN", 0.0)
    expected = loop(False)
    with reprokit.capture(budget=1e-6) as session:
        session._loop.budget._next = 0.0
        actual = loop(False)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert session.snapshots == []
    said = [line for line in capsys.readouterr().err.splitlines() if "budget" in line]
    told = [line.removeprefix("reprokit: ").partition(":")[0] for line in said]
    assert told == ([] if loop.__name__ in UPDATED_BY_HAND else ["noting every 64th step"])


def test_steps_are_noted_again_when_that_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "dispatch_seconds", lambda: 1e-6)
    said: list[str] = []
    kept = budget.Budget(10)
    kept.say = said.append
    paces = []
    for num_calls, num_noted in ((20_000, 32), (1_300, 2), (32, 2), (0, 1), (5_000, 32), (9_000, 32)):
        kept.keep(num_calls, num_noted, 32, 1.0)
        paces.append(kept.every)
    assert paces == [4, 4, 1, 1, 1, 2]
    assert [text.partition(":")[0] for text in said] == [
        "noting every 4th step",
        "noting every step again",
        "noting every 2nd step",
    ]


def test_modes_of_the_loop_stay_where_they_are(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", from_step=3, quiet=True) as session, torch.device("cpu"):
        level = torch._C._len_torch_function_stack()
        train(session, 1, 99, in_model=False)
        assert torch._C._len_torch_function_stack() == level + 1
        assert torch._C._get_function_stack_at(0) is session._recorder
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("value", [0, -1, float("nan"), "much", [10]])
def test_a_budget_is_a_percentage_above_zero(value: Any) -> None:
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
        assert main(["capture", "--budget", wrong, str(tmp_path / "train.py")]) == 2
