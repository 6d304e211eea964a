"""Work of our own is unseen: modes and tensor subclasses of a script are asked for its own calls only."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Run

SETTING = """\
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CALLS = []

class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        CALLS.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        CALLS.append(str(function))
        return function(*args, **(kwargs or {}))

class Counting(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        CALLS.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})

class Knowing(torch.Tensor):  # as physical units and masked tensors are: what they do not know is an error
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ not in ("linear", "relu", "mul", "pow", "mean", "backward"):
            raise NotImplementedError(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

def train(kind=torch.Tensor, bad=-1, steps=12):
    for step in range(steps):
        x = torch.randn(5, 4)
        loss = (model(x.as_subclass(kind) if kind is not torch.Tensor else x) * (2.0 if step != bad else float("nan")))
        loss = loss.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""

WAYS = {
    "functions": "with Functions():\n    train()\n",
    "operators": "with Operators():\n    train()\n",
    "both": "with Functions(), Operators():\n    train()\n",
    "subclass": "train(Counting)\n",
    "strict-subclass": "train(Knowing)\n",
    "parameters": """
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4).as_subclass(Counting))
    def forward(self, x):
        return (x * self.weight).sum()
model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
train()
""",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("watch", ["sampled", "every-step"])
def test_modes_and_subclasses_see_the_script_alone(
    tmp_path: Path, run_python: Run, run_reprokit: Run, way: str, watch: str
) -> None:
    (tmp_path / "train.py").write_text(f"{SETTING}{WAYS[way]}print(len(CALLS), *CALLS, sep='\\n')\n")
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--watch", watch, "train.py")
    assert (bare.returncode, watched.returncode) == (0, 0), bare.stderr + watched.stderr
    assert watched.stdout.splitlines() == bare.stdout.splitlines()
    assert "error" not in watched.stderr


@pytest.mark.parametrize("way", ["with Functions():", "with Operators():", "if True:"])
def test_a_failure_under_a_mode_is_saved_and_played(tmp_path: Path, run_reprokit: Run, way: str) -> None:
    (tmp_path / "train.py").write_text(f"{SETTING}{way}\n    train(bad=7)\n")
    watched = run_reprokit("capture", "-o", "bad.pt", "train.py")
    assert watched.returncode == 3, watched.stderr
    shown = json.loads(run_reprokit("show", "bad.pt", "--json").stdout)
    assert shown["fidelity"] == "exact"
    assert shown["failure"]["step"] == 7
    assert shown["failure"]["call"] == "torch.Tensor.mul"


@pytest.mark.parametrize("way", ["functions", "operators", "subclass"])
def test_a_step_saved_in_the_middle_is_seen_once_more(
    tmp_path: Path, run_python: Run, run_reprokit: Run, way: str
) -> None:
    """The calls of the saved step are played again, for which modes and classes are asked, and nothing else is."""
    script = f"{SETTING}{WAYS[way]}print(*CALLS, sep='\\n')\n"
    (tmp_path / "train.py").write_text(script)
    bare = Counter(run_python("train.py").stdout.split("\n"))
    done = run_reprokit("capture", "-o", "s.pt", "--at-step", "5", "--on", "early", "train.py")
    assert done.returncode == 0 and (tmp_path / "s-step5.pt").exists(), done.stderr
    more = Counter(done.stdout.split("\n"))
    more.subtract(bare)
    one_step = {name: -(-count // 12) for name, count in bare.items()}
    assert min(more.values()) >= 0 and 0 < more.total() <= 1.1 * sum(one_step.values())
    ours = {name: count - one_step.get(name, 0) for name, count in more.items() if count > one_step.get(name, 0)}
    assert sum(ours.values()) <= 6, ours  # `Tensor.backward` and clipping are played with a look at what they gave


@pytest.mark.parametrize("way", ["with Functions():", "if True:"])
def test_a_failure_in_the_middle_is_looked_at_unseen(
    tmp_path: Path, run_python: Run, run_reprokit: Run, way: str
) -> None:
    """Steps are played and layers measured; modes and classes are asked about functions that the script calls."""
    train = "train(bad=7)" if "Functions" in way else "train(Counting, bad=7)"
    (tmp_path / "train.py").write_text(f"{SETTING}{way}\n    {train}\nprint(*CALLS, sep='\\n')\n")
    bare = run_python("train.py").stdout.split("\n")
    done = run_reprokit("capture", "-o", "s.pt", "--after-capture", "continue", "--no-cause", "train.py")
    assert done.returncode == 0 and (tmp_path / "s.pt").exists(), done.stderr
    watched = done.stdout.split("\n")
    assert len(watched) > len(bare) and set(watched) == set(bare)
