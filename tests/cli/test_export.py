"""``reprokit export --before``: training that goes on from the files repeats the failing step bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprokit.snapshot.format import load, save
from tests.conftest import Run

LOOP = """\
import random
import sys

import torch
from torch import nn

FAULT = {fault!r}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.b = nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, *, is_bad):
        x = self.b(self.drop(torch.tanh(self.norm(self.a(x))))) * (1 + random.random())
        if is_bad and FAULT == "forward":
            x = torch.log(x - x.detach().max())
        if is_bad and FAULT == "backward":
            x = torch.where(x > 9, torch.sqrt(x * 0), x)
        return x


def batch(step):
    return torch.linspace(-1, 1, 24, dtype=torch.float64).roll(step).float().reshape(6, 4)


def make():
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    first = [*net.a.parameters(), *net.norm.parameters()]
    groups = [dict(params=first, lr=1e-3), dict(params=list(net.b.parameters()))]
    return net, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))


def train(net, optimizer, step):
    is_bad = step == 7
    state = [v.sum().item() for values in optimizer.state.values() for v in values.values()]
    before = [t.double().sum().item() for t in net.state_dict().values()]
    loss = net(batch(step), is_bad=is_bad).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if is_bad and FAULT == "optimizer":
        optimizer.param_groups[0]["lr"] = float("inf")
    grads = [p.grad.sum().item() for p in net.parameters() if p.grad is not None]
    optimizer.step()
    return loss.item(), grads, before, state


if __name__ == "__main__":
    net, optimizer = make()
    for step in range(8):
        print(repr(train(net, optimizer, step)), flush=True)
"""
RESUME = """\
import random
import torch
from train import make, train

net, optimizer = make()
torch.manual_seed(5)
net.load_state_dict(torch.load("state/model.pt", weights_only=True))
optimizer.load_state_dict(torch.load("state/optimizer.pt", weights_only=True))
states = torch.load("state/rng.pt", weights_only=True)
torch.set_rng_state(states["torch"])
version, words, gauss = states["python"].values()
random.setstate((version, tuple(words), gauss))
print(repr(train(net, optimizer, 7)))
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("backward", ["--history", "3"]),
        ("optimizer", ["--watch", "every-step"]),
        ("forward", []),
    ],
)
def test_a_resumed_run_repeats_the_failing_step(fault: str, words: list[str], tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(fault=fault))
    (tmp_path / "resume.py").write_text(RESUME)
    bare = run_python("train.py").stdout.splitlines()
    captured = run_python("-m", "reprokit", "capture", *words, "-o", "x.pt", "train.py")
    assert captured.returncode == 3, captured.stderr
    done = run_python("-m", "reprokit", "export", "x.pt", "--before", "-o", "state", "--json")
    assert done.returncode == 0, done.stderr
    files = ["state/model.pt", "state/optimizer.pt", "state/rng.pt"]
    assert json.loads(done.stdout) == {"schema": 1, "step": 7, "files": files}
    assert run_python("resume.py").stdout.splitlines() == [bare[7]]
    snapshot = load(tmp_path / "x.pt")  # holds the parameters once
    assert snapshot.before is not None
    one = snapshot.before.modules[""]["a.weight"]
    held = [snapshot.tensors[item.value] for item in snapshot.program.inputs if item.name == "a.weight"]
    assert all(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for tensor in held)


def test_several_roots_and_what_cannot_be_kept(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "train.py").write_text("""\
import torch
from torch import nn
torch.manual_seed(0)
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
class Odd(torch.optim.SGD):
    pass
ours, theirs = Odd(G.parameters(), lr=0.1), torch.optim.Adam(D.parameters())
ours.param_groups[0]["who"] = object()
for step in range(4):
    for optimizer in (ours, theirs):
        optimizer.zero_grad()
        D(G(torch.ones(3, 2))).sum().mul(1 if step < 3 else float("nan")).backward()
        optimizer.step()
""")
    assert run_python("-m", "reprokit", "capture", "-o", "x.pt", "train.py").returncode == 3
    done = run_python("-m", "reprokit", "export", "x.pt", "--before")
    assert "left out the state of `Odd`: `who` is no plain value" in done.stderr
    model = torch.load(tmp_path / "x-before" / "model.pt", weights_only=True)
    assert sorted(model) == ["D", "G"] and model["G"]["weight"].shape == (2, 2)
    assert list(torch.load(tmp_path / "x-before" / "optimizer.pt", weights_only=True)) == ["theirs"]
    again = run_python("-m", "reprokit", "export", "x.pt", "--before")
    assert again.returncode == 2 and "is not empty" in again.stderr
    save(replace(load(tmp_path / "x.pt"), before=None), tmp_path / "old.pt")
    old = run_python("-m", "reprokit", "export", "old.pt", "--before")
    assert old.returncode == 1
    assert old.stderr.startswith("reprokit: error: `old.pt` holds no state from before the step\nhint: ")
