"""Nothing of reprokit's is traced by a compiler: outputs, graphs, breaks and recompilations are those of a bare run.

The mode on torch's stack is away before a compiled call, and gone for good when a capture is over, also where it was
over inside of a call that the mode was asked about. What `make_fx` and fake tensors trace is not noted.
"""

from __future__ import annotations

import pytest

from tests.conftest import Run

HEAD = """
import warnings

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


class Users(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def train(num_steps, step=optimizer.step, bad=None, model=model):
    for number in range(num_steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        (loss * float("nan") if number == bad else loss).backward()
        if number == bad:
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0)
        step()
        print(number, loss.item())
"""
TAIL = """
for kind, found in sorted(counters.items()):
    for name, count in sorted(found.items()):
        print(kind, name, count)
"""
COMPILED_STEP = "train(3, torch.compile(optimizer.step, backend='eager'))\n"
KINDS = {
    "a compiled optimizer": COMPILED_STEP,
    "a compiled function below modes of the user's": """
def loss_of(a, b):
    return (a - b).pow(2).mean() + a.norm()

loss_of = torch.compile(loss_of, backend="eager")
compiled = torch.compile(model, backend="eager")
for number in range(4):
    with Users(), torch.device("cpu"):
        x = torch.randn(8, 4)
        loss = loss_of(compiled(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, loss.item())
""",
    "a compiled step": """
def whole(x):
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss

whole = torch.compile(whole, backend="eager")
for number in range(4):
    print(whole(torch.randn(8, 4)).item())
""",
    "a compiled model whose parts were called by the loop before": """
class Gate(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(4, 1), Gate()

    def forward(self, x):
        return self.gate(self.inner(x))

gated = Gated()
Gate()(gated.inner(torch.ones(2, 4)))
compiled = torch.compile(gated, backend="eager", fullgraph=True)
optimizer = torch.optim.Adam(gated.parameters(), lr=1e-2)
train(3, optimizer.step, model=compiled)
train(3, optimizer.step, model=nn.Sequential(nn.Identity(), compiled))
""",
    "a function compiled by a part of a model": """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    @torch.compile(backend="eager")
    def scaled(self, x):
        return x.tanh() * 2

    def forward(self, x):
        return self.layer(self.scaled(x))

model = Part()
optimizer.add_param_group({"params": list(model.parameters())})
train(4, model=model)
""",
    "tracing by make_fx": """
from torch.fx.experimental.proxy_tensor import make_fx

def gradient(x):
    y = (x.exp() * x).softmax(-1)
    loss = (y * y).sum()
    loss.backward()
    return x.grad

train(3)
for mode in ("real", "fake", "symbolic"):
    print(make_fx(gradient, tracing_mode=mode)(torch.randn(3, 4, requires_grad=True)).code)
train(3)
""",
    "fake tensors": """
from torch._subclasses.fake_tensor import FakeTensorMode

train(3)
with FakeTensorMode() as fake:
    copy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    loss = copy(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
    print(type(copy[0].weight.grad).__name__, loss.shape)
train(3)
""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_sees_what_it_sees_bare(kind: str, run_python: Run, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(HEAD + KINDS[kind] + TAIL)
    bare, watched = run_python("train.py"), run_reprokit("capture", "train.py")
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert watched.stdout == bare.stdout
    assert "of its own" not in watched.stderr and "not noted" not in watched.stderr


ENDS = {  # how a capture comes to its end, and where torch's stack is looked at
    "in a backward call": "train(3, bad=1)",
    "in a call after an update by hand": """
for number in range(4):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad * (float("nan") if number == 2 else 1)
            parameter.grad = None
with torch.no_grad():
    for parameter in model.parameters():
        parameter.nan_to_num_()
""",
    "in an optimizer": """
optimizer.param_groups[0]["lr"] = float("nan")
train(2)
for parameter in model.parameters():
    parameter.data.nan_to_num_()
optimizer.param_groups[0]["lr"] = 0.01
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_after_a_capture_the_mode_is_gone(end: str, run_python: Run, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    looked = "\nimport sys\nprint(torch._C._len_torch_function_stack(), sys.getprofile())\n"
    (tmp_path / "train.py").write_text(HEAD + ENDS[end] + looked + COMPILED_STEP + TAIL)
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--after-capture", "continue", "--on", "skipped", "-o", "f.pt", "train.py")
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert (tmp_path / "f.pt").exists(), watched.stderr
    assert "0 None" in watched.stdout
    assert watched.stdout == bare.stdout


PROFILED = """
import sys

seen = 0

def profile(frame, event, argument):
    global seen
    seen += event == "call"

sys.setprofile(profile)
{}
print(torch._C._len_torch_function_stack(), sys.getprofile() is profile, sys.gettrace(), seen > 100)
sys.setprofile(None)
"""


@pytest.mark.parametrize("end", ENDS)
def test_beside_a_profiler_the_mode_is_gone_after_a_capture(end: str, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(HEAD + PROFILED.format(ENDS[end]))
    run = run_reprokit("capture", "--after-capture", "continue", "--on", "skipped", "-o", "f.pt", "train.py")
    assert run.returncode == 0 and (tmp_path / "f.pt").exists(), run.stderr
    assert "0 True None True" in run.stdout
