"""``--at-step``: healthy steps are saved by the road of every verdict, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import reprokit
from reprokit.errors import UsageError
from tests.capture.traps_checks import update
from tests.conftest import Run

SCRIPT = """\
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(12):
    loss = net(torch.randn(6, 4)).pow(2).mean() * (float("nan") if step == 9 and sys.argv[1:] else 1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()
print(sum(p.sum().item() for p in net.parameters()), torch.rand(1).item())
sys.exit(7)
"""


def no_json(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


def test_healthy_steps_are_saved_and_the_script_ends_as_without_capture(
    tmp_path: Path, run_reprokit: Run, run_python: Run
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = run_python("train.py")
    done = run_reprokit("capture", "--at-step", "3,7", "train.py")
    assert (done.returncode, done.stdout) == (7, bare.stdout)
    assert "saved step 3, which is healthy -> train-step3.repro.pt" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["train-step3.repro.pt", "train-step7.repro.pt"]
    shown = json.loads(run_reprokit("show", "--json", "train-step7.repro.pt").stdout)
    assert (shown["failure"]["kind"], shown["failure"]["step"], shown["fidelity"]) == ("none", 7, "exact")
    assert shown["failure"]["call"] is None and shown["failure"]["observed_at"] == ""
    assert [row["step"] for row in shown["timeline"]] == list(range(8))
    assert "healthy step, saved on request, step 7" in run_reprokit("show", "train-step7.repro.pt").stderr
    shrunk = run_reprokit("shrink", "train-step7.repro.pt")
    assert shrunk.returncode == 2 and "there is no failure to shrink" in shrunk.stderr and "hint: " in shrunk.stderr
    rows = run_reprokit("trace", "--json", "train-step7.repro.pt").stdout
    assert {"grad_weight", "output", "grad_output"} <= {json.loads(row)["tensor"] for row in rows.splitlines()}


def test_a_failure_after_a_step_that_was_asked_for_has_a_file_of_its_own(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_reprokit("capture", "--at-step", "8", "--json", "-o", "x.pt", "train.py", "bad")
    assert done.returncode == 3, done.stderr
    lines = [json.loads(line, parse_constant=no_json) for line in done.stdout.splitlines()]
    assert [(line["failure"]["kind"], line["failure"]["step"]) for line in lines] == [("none", 8), ("nan", 9)]
    assert lines[1]["timeline"][-1]["loss"] == "nan"
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["x-step8.pt", "x.pt"]
    shown = run_reprokit("show", "--json", "x.pt").stdout
    assert json.loads(shown, parse_constant=no_json)["timeline"][-1]["loss"] == "nan"


def test_a_step_that_never_came_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with reprokit.capture(at_step=5) as session:
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            update(optimizer, weight.sum())
    assert not session.snapshots
    assert "step 5 of `--at-step` is not saved: the training ended before it was over" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["3", -1, [1, 2.5], True])
def test_steps_are_numbers(value: Any) -> None:
    with pytest.raises(UsageError, match="`at_step` cannot be"), reprokit.capture(at_step=value):
        pass


# -- several optimizers and several models ------------------------------------------------------------------------


def gan(num_steps: int, failing: str = "", at: int = -1, num_critic: int = 1) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(num_steps):
        real = torch.randn(8, 2)
        loss = (critic(real) - 1).pow(2).mean() + critic(generator(torch.randn(8, 4)).detach()).pow(2).mean()
        update(of_critic, loss * (torch.nan if failing == "critic" and step == at else 1.0))
        if step % num_critic == num_critic - 1:
            loss = (critic(generator(torch.randn(8, 4))) - 1).pow(2).mean()
            update(of_generator, loss * (torch.nan if failing == "generator" and step == at else 1.0))


@pytest.mark.parametrize("failing", ["critic", "generator"])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_iterations_of_two_optimizers_are_counted_once(failing: str, at: int, tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", quiet=True, record="1") as session:
        gan(12, failing, at)
    (result,) = session.results
    assert (result["failure"]["step"], result["fidelity"]) == (at, "exact")
    snapshot = reprokit.load(tmp_path / "x.pt")
    for row in snapshot.recorded or ():
        assert any("critic" in name for name in row.grad_norm)
        is_over = row.step < at
        assert any("generator" in name for name in row.grad_norm) or not is_over


@pytest.mark.parametrize("at", [14, 19, 29])
def test_iterations_of_a_critic_that_steps_more_often(at: int, tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        gan(40, "generator", at, num_critic=5)
    assert [result["failure"]["step"] for result in session.results] == [at]


def test_iterations_of_three_optimizers_in_uneven_turns(tmp_path: Path) -> None:
    parts = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    seen = []
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        for step in range(24):
            seen.append(session.num_steps)
            for turn in (0, *((1 + step % 3 // 2,) if step % 3 else ())):
                update(optimizers[turn], parts[turn](torch.randn(4, 2)).pow(2).mean())
    assert seen[9:] == list(range(9, 24))


def test_every_update_of_clients_that_train_in_turns_is_an_iteration(tmp_path: Path) -> None:
    """Each makes three steps with a new optimizer, as in federated training."""
    clients = [nn.Linear(2, 1) for _ in range(3)]
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        for turn in range(4):
            for client in clients:
                optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
                for step in range(3):
                    is_bad = turn == 3 and client is clients[1] and step == 1
                    update(optimizer, client(torch.randn(4, 2)).pow(2).mean() * (torch.nan if is_bad else 1.0))
    assert [result["failure"]["step"] for result in session.results] == [3 * 9 + 3 + 1]


def test_a_step_of_two_optimizers_is_saved_whole(tmp_path: Path) -> None:
    with reprokit.capture(tmp_path / "x.pt", quiet=True, at_step=[2, 3]) as session:
        gan(6)
    assert [path.name for path in session.snapshots] == ["x-step2.pt", "x-step3.pt"]
    for path in session.snapshots:
        snapshot = reprokit.load(path)
        assert snapshot.fidelity == "exact", snapshot.fidelity_note
        assert sum(call.is_optimizer_step for call in snapshot.program.calls) == 2


def test_models_of_one_process_have_their_own_timelines(tmp_path: Path) -> None:
    """The second one diverges and the loop goes on to the third, whose own failure is saved with its own steps."""
    begins: list[int] = []
    with reprokit.capture(tmp_path / "x.pt", quiet=True) as session:
        for trial, rate in enumerate([0.01, 50.0, 0.05]):
            torch.manual_seed(trial)
            net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
            for step in range(30):
                x = torch.randn(16, 4)
                loss = (net(x).squeeze(1) - x[:, 0]).pow(2).mean()
                if trial == 1 and not torch.isfinite(loss):
                    break
                update(optimizer, loss * (torch.nan if trial == 2 and step == 12 else 1.0))
            begins.append(session.num_steps)
    (result,) = session.results
    begin = begins[1]
    assert result["failure"]["step"] == begin + 12 and result["capture"]["began_at"] == begin
    assert [row["step"] for row in result["timeline"]] == list(range(begin, begin + 13))
    assert {row["lr"] for row in result["timeline"][:-1]} == {0.05}


def test_norms_are_those_before_clipping(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    norms = []
    with reprokit.capture(quiet=True, record="1:weight", on_numbers=seen.append):
        for _ in range(5):
            optimizer.zero_grad()
            (net(torch.randn(8, 4)).sum() * 1e5).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
            optimizer.step()
    for row, norm in zip(seen, norms, strict=True):
        assert row["grad_norm"] == pytest.approx(norm) and row["clipped_to"] == pytest.approx(1.0)
        assert 1.0 < row["grad_norm/weight"] <= norm and "grad_norm/bias" not in row
