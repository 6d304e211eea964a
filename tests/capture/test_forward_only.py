"""Runs without a backward pass: the first call of a model whose output is nan or inf is saved when the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from tests.capture.traps_checks import update
from tests.conftest import Run

SCRIPT = """\
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.bn(self.a(x)))
        return self.b(h) + torch.log(h.mean(-1, keepdim=True) + 1 - 2 * (x[:1, :1] > 9))


torch.manual_seed(0)
net, loss_of = Net().eval(), nn.CrossEntropyLoss()
with torch.no_grad():
    for batch in range(6):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        x[0, 0] = 10.0 if batch == 2 and sys.argv[1:] else 0.0
        loss = loss_of(net(x * 1.0), y)
print("the end")
"""


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        return {"out": torch.log(x) + self.shift}, 0


def test_the_first_bad_forward_pass_is_saved_at_the_end(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "infer.py").write_text(SCRIPT)
    done = run_reprokit("capture", "infer.py", "bad")
    assert done.returncode == 3 and done.stdout == "the end\n", done.stderr
    assert "captured nan from `torch.log` at step 2 -> infer-step2.repro.pt" in done.stderr
    assert "in <Net>, infer.py:14: return self.b(h) + torch.log(" in done.stderr
    snapshot = reprokit.load(tmp_path / "infer-step2.repro.pt")
    assert (snapshot.failure.phase, snapshot.fidelity) == ("forward", "exact")
    assert reprokit.shrink(snapshot, max_time=20, fast=True).program.num_calls < 4
    healthy = run_reprokit("capture", "infer.py")
    assert healthy.returncode == 0 and not list(tmp_path.glob("infer-step2-1*"))
    lines = "forward passes but no backward pass was seen, so no step was checked, and no output of a model was nan or"
    assert lines in healthy.stderr


def test_trace_counts_the_calls_of_each_model(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "infer.py").write_text(SCRIPT)
    done = run_reprokit("trace", "--steps", "0,2,99", "--tensor", "output", "--tensor", "h", "--json", "infer.py", "x")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["module"] for row in rows if row["step"] == 0] == [
        "a",
        "bn",
        "<Net>",
        "b",
        "<Net>",
        "<CrossEntropyLoss>",
    ]
    bad = {(row["step"], row["module"]) for row in rows if row["nonfinite"]}
    assert bad == {(2, "<Net>"), (2, "<CrossEntropyLoss>")} and {row["call"] for row in rows} == {0}
    torch.manual_seed(0)
    module: dict[str, object] = {"__name__": "infer"}
    exec(compile(SCRIPT.split("with torch.no_grad")[0], "infer.py", "exec"), module)
    net = module["net"]
    assert isinstance(net, nn.Module)
    x = torch.randn(5, 4)
    x[0, 0] = 0.0
    expected = net(x).detach()
    found = next(row for row in rows if row["step"] == 0 and row["module"] == "<Net>" and row["tensor"] == "output")
    assert [found["min"], found["max"], found["mean"]] == pytest.approx(
        [expected.min().item(), expected.max().item(), expected.mean().item()], rel=1e-6
    )


@pytest.mark.parametrize(("value", "is_saved"), [(-1.0, True), (float("inf"), True), (0.0, False)])
def test_minus_infinity_alone_may_be_a_mask(
    value: float, is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Logarithm()
    with reprokit.capture(name="block", quiet=True) as session:
        for number in (1.0, value, 2.0):
            net(torch.tensor([1.0, number]))
    assert bool(session.snapshots) is is_saved
    if is_saved:
        failure = session.results[0]["failure"]
        assert failure["step"] == 1 and (failure["call"], failure["input"]) in (("torch.log", None), (None, "x"))


def test_exceptions_of_a_run_without_a_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError), reprokit.capture(name="shape", quiet=True) as session, torch.no_grad():
        for size in (2, 3):
            Logarithm()(torch.ones(size))
    assert session.results[0]["failure"]["call"] == "torch.Tensor.add"
    with pytest.raises(ValueError), reprokit.capture(name="check", quiet=True) as session, torch.no_grad():
        for number in (1.0, -1.0, 2.0):
            if not Logarithm()(torch.tensor([1.0, number]))[0]["out"].isfinite().all():
                raise ValueError
    assert (session.results[0]["failure"]["kind"], session.results[0]["failure"]["call"]) == ("nan", "torch.log")
    with pytest.raises(ValueError), reprokit.trace(tensors=["output"]) as rows, torch.no_grad():
        Logarithm()(torch.ones(2))
        raise ValueError
    assert [row["max"] for row in rows] == [0.0]


def test_a_bad_output_before_a_training_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = Logarithm()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with reprokit.capture(name="block", quiet=True, at_step=0) as session:
        with torch.no_grad():
            net(torch.tensor([-1.0, 1.0]))
        for _ in range(4):
            update(optimizer, net(torch.tensor([2.0, 3.0]))[0]["out"].sum())
    assert [result["failure"]["kind"] for result in session.results] == ["none"]
    with reprokit.trace(tensors=["output"]) as rows:
        net(torch.tensor([2.0, 3.0]))
        update(optimizer, net(torch.tensor([4.0, 5.0]))[0]["out"].sum())
    assert [row["call"] for row in rows] == [0] and rows[0]["max"] > 1.2  # the call that the update is made of
