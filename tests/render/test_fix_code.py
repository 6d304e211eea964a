"""The code of a fix: put in place of the line that it is about, it makes the user's own step finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.locate.diagnose import diagnose
from reprokit.locate.diagnosis import Fix
from reprokit.render.fix_code import fix_code
from reprokit.snapshot.format import Snapshot
from tests.conftest import import_benchmark
from tests.shrink.failing import record

X = torch.tensor([0.0, 1.0, 2.0])


def load(source: str, folder: Path) -> Any:
    """The function `step` of a source file."""
    path = folder / "train.py"
    path.write_text(source)
    namespace: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace["step"]


def fix_of(snapshot: Snapshot) -> Fix:
    fix = diagnose(snapshot, write=fix_code).fix
    assert fix is not None and fix.helped
    return fix


HEAD = "import torch\nimport torch.nn.functional as F\n"
STEPS = {
    "a method": ("def step(x):\n    y = x.log()\n    return y.sum()\n", "y = x.clamp(min=1e-6).log()"),
    "an edge": (
        "def step(x):\n    dot = x.clamp(max=1.0).mean() * 1.5\n    return 2 * torch.acos(dot)\n",
        "return torch.acos(dot.clamp(min=-0.999999, max=0.999999)) * 2",
    ),
    "a division": (
        "def step(x):\n    total = x[:1].sum()\n    scaled = total / x[0]\n    return scaled\n",
        "scaled = total / x[0].clamp(min=1e-6)",
    ),
    "a trap": (
        "def step(energy):\n    out = torch.where(energy > 0, torch.sqrt(energy), 0.0)\n    return out.sum()\n",
        "masked_fill(energy <= 0.0, ",
    ),
    "a loop": (
        "def step(x):\n    for row in range(3):\n        x = torch.log(x + row - row)\n    return x.sum()\n",
        "clamp(min=1e-6)",
    ),
    "a softmax": (
        "def step(x):\n    weights = torch.log(torch.softmax(x * 100, 0))\n    return weights.sum()\n",
        "torch.log_softmax(x * 100, 0)",
    ),
    "in place": ("def step(x):\n    y = x + 0\n    y.log_()\n    return y.sum()\n", "y.log_()"),
    "two lines": (
        "def step(x):\n    a = torch.log(x)\n    b = torch.sqrt(x - 1)\n    return (a + b).sum()\n",
        "b = torch.sqrt((x - 1).clamp(min=1e-6))",
    ),
    "attributes and items": (
        "def step(x):\n    scales = {'x': x.sum() - 3}\n    step.total = x[1]\n"
        "    ratio = step.total / scales['x']\n    return ratio\n",
        'ratio = step.total / scales["x"].clamp(min=1e-6)',
    ),
    "half precision": (
        "def step(x):\n    half = x.half() * 30000\n    scale = half.sum() / 100\n    return scale\n",
        "half.float()",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_code_in_place_of_its_line_makes_the_step_finite(name: str, tmp_path: Path) -> None:
    body, expected = STEPS[name]
    step, given = load(HEAD + body, tmp_path), body[len("def step(") :].split(")")[0]

    def run(**tensors: torch.Tensor) -> None:
        step(tensors[given]).backward()

    fix = fix_of(record(run, **{given: X.clone().requires_grad_()}))
    assert expected in fix.code
    x = X.clone().requires_grad_()
    pasted = import_benchmark("pasting").paste(fix.code, "train.py", HEAD + body)
    loss = load(pasted, tmp_path)(x)
    loss.backward()
    assert x.grad is not None and loss.isfinite() and x.grad.isfinite().all()
