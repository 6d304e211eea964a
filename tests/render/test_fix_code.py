"""The code of a fix: put in place of the line that it is about, it makes the user's own step finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.render.fix_code import fix_code
from reprokit.rules.diagnosis import TriedFix
from reprokit.rules.match import diagnose
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


def fix_of(snapshot: Snapshot) -> TriedFix:
    fix = diagnose(snapshot, write=fix_code).fix
    assert fix is not None and fix.helped
    return fix


HEAD = "import torch\nimport torch.nn.functional as F\n"
STEPS = {
    "an edge": (
        "def step(x):\n    dot = x.clamp(max=1.0).mean() * 1.5\n    return 2 * torch.acos(dot)\n",
        "return 2 * torch.acos(dot.clamp(min=-0.999999, max=0.999999))",
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
    "attributes and items": (
        "def step(x):\n    scales = {'x': x.sum() - 3}\n    step.total = x[1]\n"
        "    ratio = step.total / scales['x']\n    return ratio\n",
        "ratio = step.total / scales['x'].clamp(min=1e-6)",
    ),
    "half precision": (
        "def step(x):\n    half = x.half() * 30000\n    scale = half.sum() / 100\n    return scale\n",
        "half.float()",
    ),
    "a comprehension": (
        "def step(x):\n    return sum([torch.log(x[row] * 2) for row in range(3)])\n",
        "return sum([torch.log((x[row] * 2).clamp(min=1e-6)) for row in range(3)])",
    ),
    "an attribute": (
        "class Scale(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.by = torch.nn.Parameter(torch.zeros(3))\n    def forward(self, x):\n        return x / self.by\n"
        "scale = Scale()\ndef step(x):\n    return scale(x).sum()\n",
        "return x / self.by.clamp(min=1e-6)",
    ),
    "one inside another": (
        "def step(x):\n    y = 2 * torch.log(torch.log(x) * 0 + x) ** 2\n    return y.sum()\n",
        "y = 2 * torch.log((torch.log(x.clamp(min=1e-6)) * 0 + x).clamp(min=1e-6)) ** 2",
    ),
    "a dictionary": (
        'def step(x):\n    out = {"loss": torch.log(x).sum(), "count": 3}\n    return out["loss"]\n',
        'out = {"loss": torch.log(x.clamp(min=1e-6)).sum(), "count": 3}',
    ),
    "a number from Python": (
        "def step(x):\n    beta = 0.9\n    y = torch.log(x) * (1.0 - beta)  # x > 0\n    return y.sum()\n",
        "y = torch.log(x.clamp(min=1e-6)) * (1.0 - beta)",
    ),
    "a loss of several lines": (
        "def step(x):\n    target = torch.full((3,), -1)\n"
        "    loss = F.cross_entropy(x.view(3, -1), target.view(-1), ignore_index=-1)\n    return loss\n",
        'loss = F.cross_entropy(x.view(3, -1), target.view(-1), ignore_index=-1, reduction="sum") / torch.ne(',
    ),
    "letters of two bytes": (
        'def step(x):\n    größe = len("äö"); y = größe * torch.log(x)\n    return y.sum()\n',
        'größe = len("äö")\ny = größe * torch.log(x.clamp(min=1e-6))',
    ),
    "two powers": (
        "def step(x):\n    std = ((x[:1] - 0.0) ** 2).mean() ** 0.5 + (x - 1.0).sum() * 0\n    return std\n",
        "std = ((x[:1] - 0.0) ** 2).mean().clamp(min=1e-6) ** 0.5",
    ),
    "a chain of methods": (
        "def step(x):\n    y = (\n        x.mul(2)\n        .log()\n        .add(1)\n    )\n    return y.sum()\n",
        "y = x.mul(2).clamp(min=1e-6).log().add(1)",
    ),
    "the head of a block": (
        "def step(x):\n    with torch.enable_grad():\n        if (\n            x.sum() > 0\n"
        "            and torch.log(x).sum() < 9\n        ):  # always\n            return torch.sqrt(x - 1).sum()\n",
        "return torch.sqrt((x - 1).clamp(min=1e-6)).sum()",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_code_in_place_of_its_line_makes_the_step_finite(name: str, tmp_path: Path) -> None:
    body, expected = STEPS[name]
    step, given = load(HEAD + body, tmp_path), body.split("def step(")[1].split(")")[0]

    def run(**tensors: torch.Tensor) -> None:
        step(tensors[given]).backward()

    fix = fix_of(record(run, **{given: X.clone().requires_grad_()}))
    assert expected in fix.code
    x = X.clone().requires_grad_()
    pasted = import_benchmark("pasting").paste(fix.code, "train.py", HEAD + body)
    loss = load(pasted, tmp_path)(x)
    loss.backward()
    assert x.grad is not None and loss.isfinite() and x.grad.isfinite().all()


ALONE = {
    "a text over several lines": (
        'def step(x):\n    y, text = torch.log(x), """\n    a\n"""\n    return y.sum()\n',
        "torch.log(x.clamp(min=1e-6))",
    ),
    "in place": ("def step(x):\n    y = x + 0\n    y.log_()\n    return y.sum()\n", "y.copy_(y + 1e-6)"),
    "a call that would run twice": (
        "def step(x):\n    out = torch.where(x > 0, torch.sqrt(x.cumsum(0)), 0.0)\n    return out.sum()\n",
        "cumsum.masked_fill(cumsum <= 0.0, 1.0)",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_stand_in_the_place_of_its_line_says_so(name: str, tmp_path: Path) -> None:
    body, expected = ALONE[name]
    step = load(HEAD + body, tmp_path)

    def run(x: torch.Tensor) -> None:
        step(x).backward()

    code = fix_of(record(run, x=X.clone().requires_grad_())).code
    assert code.startswith("# in train.py:") and expected in code


def test_operands_inside_a_library_have_no_names_of_the_line_that_calls_it(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "averages.py").write_text("def average(total, count):\n    return total.sum() / count\n")
    body = "def step(x):\n    out = average(x, x.sum() - 3) + x.mean() / step.scale\n    return out\nstep.scale = 2.0\n"
    source = f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom averages import average\n{body}"
    step = load(source, tmp_path)

    def run(x: torch.Tensor) -> None:
        step(x).backward()

    code = fix_of(record(run, x=torch.ones(3, requires_grad=True))).code
    assert ", in what it calls" in code and "scale" not in code


def test_a_number_in_front_of_the_operand_stays_there(tmp_path: Path) -> None:
    step = load("def step(x):\n    y = 2 * x\n    return y.sum()\n", tmp_path)
    assert "2 * x.float()" in fix_of(record(step, x=torch.tensor([40000.0]).half())).code
