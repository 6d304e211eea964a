"""``--record``, ``on_numbers`` and ``session.note``: numbers of a run that is healthy until its last step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprokit
from reprokit.errors import UsageError
from reprokit.snapshot.format import load
from tests.capture.traps_checks import update
from tests.conftest import Run

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
class Net(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](self[0](x)))
net = Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
net.lost = nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(12):
    loss = net(torch.randn(4, 4)).pow(2).mean() * (float("nan") if step == 11 else 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sum(p.sum().item() for p in net.parameters()))
"""


def train(steps: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with reprokit.capture(quiet=True, **options) as session:
        for step in range(steps):
            update(optimizer, net(torch.ones(2, 3)).sum())
            session.note(accuracy=step / 10, seen=torch.tensor(step))
    return net, session


def test_norms_of_every_step_are_those_of_the_parameters() -> None:
    seen: list[dict[str, float]] = []
    net, _ = train(4, record="1", on_numbers=seen.append)
    assert [row["step"] for row in seen] == [0, 1, 2, 3]
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        assert seen[-1][f"weight_norm/{name}"] == pytest.approx(float(parameter.detach().norm()))
        assert seen[-1][f"grad_norm/{name}"] == pytest.approx(float(parameter.grad.norm()))
        assert seen[-1][f"zeros/{name}"] == pytest.approx(float((parameter.grad == 0).float().mean()))
        change = 0.01 * parameter.grad
        ratio = change.norm() / (parameter.detach() + change).norm()
        assert seen[-1][f"update/{name}"] == pytest.approx(float(ratio), rel=1e-4)
    assert math.isfinite(seen[-1]["loss"]) and seen[-1]["lr"] == 0.01


def test_a_callback_that_raises_is_not_called_again(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[object] = []

    def broken(numbers: dict[str, float]) -> None:
        calls.append(numbers)
        raise RuntimeError("no connection")

    bare, _ = train(5)
    net, _ = train(5, record="1", on_numbers=broken)
    assert len(calls) == 1 and "`on_numbers` raised RuntimeError: no connection" in capsys.readouterr().err
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), net.parameters(), strict=True))


def test_numbers_and_notes_are_in_the_snapshot(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with reprokit.capture(tmp_path / "x.pt", quiet=True, record="1") as session:
        for step in range(5):
            update(optimizer, weight.sum() * (math.nan if step == 4 else 1.0))
            session.note(accuracy=step / 10)
    snapshot = load(tmp_path / "x.pt")
    assert [row.noted for row in snapshot.timeline[:4]] == [{"accuracy": step / 10} for step in range(4)]
    assert snapshot.recorded is not None and [row.step for row in snapshot.recorded] == [0, 1, 2, 3]
    assert snapshot.recorded[0].total == pytest.approx(2**0.5)


@pytest.mark.parametrize("value", ["high", None, torch.ones(2)])
def test_notes_are_numbers(value: Any) -> None:
    with reprokit.capture(quiet=True) as session, pytest.raises(UsageError, match="`accuracy` cannot be"):
        session.note(accuracy=value)


@pytest.mark.parametrize("text", ["often", "0", "-1", "1.5"])
def test_paces(text: str) -> None:
    with pytest.raises(UsageError, match="`record` cannot be"), reprokit.capture(record=text):
        pass


def test_parameters_without_gradient_are_printed_once(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_reprokit("capture", "--record", "auto", "-o", "x.pt", "train.py")
    assert done.returncode == 3
    assert done.stderr.count("no gradient has reached `lost.weight` and `lost.bias` at step 2") == 1
    silent = run_reprokit("capture", "-f", "-o", "x.pt", "train.py")
    assert "no gradient" not in silent.stderr
    every = run_reprokit("capture", "-f", "-o", "x.pt", "--record", "1:0.*", "train.py")
    assert "no gradient" not in every.stderr and every.returncode == 3
    table = run_reprokit("timeline", "x.pt").stdout
    assert "2 parameters recorded in 11 steps" in table and "pattern" not in table
    page = run_reprokit("timeline", "x.pt", "--to", "html").stdout
    assert page.count("<figure>") == 5 and "Update over weight" in page and "0.weight" in page and "https:" not in page
    header = run_reprokit("timeline", "x.pt", "--to", "csv").stdout.splitlines()[0]
    assert "grad_norm/0.weight" in header and "grad_norm/2.weight" not in header


# -- patterns ----------------------------------------------------------------------------------------------------------
