"""A script that holds anything but torch, literals and what it defines itself is refused."""

from __future__ import annotations

import pytest

from reprokit.locate.failure import Failure
from reprokit.render.gate import RefusedScript, require_closed, require_test

HEAD = "import torch\nimport torch.nn.functional as F\n"

GOOD = [
    "x = torch.tensor([1.0, -2.0])\nprint('x =', x.sqrt())\nassert not torch.isnan(x.sqrt()).any(), 'sqrt(x) is nan'",
    "with torch.autocast('cpu', dtype=torch.float16), torch.no_grad():\n    y = F.softmax(x := torch.zeros(2), -1)",
    "w = torch.nn.Parameter(torch.ones(2))\nopt = torch.optim.Adam([w], lr=1e-3)\nw.grad = torch.ones(2)\nopt.step()",
    "x = torch.ones(3)\nfor parameter in [x]:\n    parameter.grad = None\nx[1:] += float('nan')",
]

MODULE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
    def forward(self, x):
        return self.fc(x) / self.scale
model = Net()
nn.init.ones_(model.fc.weight)
out = model(torch.zeros(1, 2))
"""

BAD = [
    "import os",
    "from torch import hub",
    "exec('1')",
    "eval('1')",
    "__import__('os')",
    "open('x', 'w')",
    "getattr(torch, 'save')",
    "torch.save(1, 'x')",
    "torch.load('x')",
    "torch.hub.load('a', 'b')",
    "torch.utils.collect_env.run('id')",
    "torch.classes.load_library('x')",
    "x = torch.ones(1)\nx.numpy().tofile('x')",
    "x = torch.ones(1)\nx.apply_(print)",
    "x = torch.ones(1)\nx.__class__",
    "().__class__.__base__.__subclasses__()",
    "x = [y for y in (1,)]",
    "x = lambda: 1",
    "print(f'{1}')",
    "torch = 1",
    "print = 1",
    "def f(x=torch.ones(1)):\n    return x",
    "@print\ndef f():\n    pass",
    "class A:\n    pass",
    "class A(torch.nn.Module):\n    x = 1",
    "global x",
    "while True:\n    pass",
    "del x",
    "raise SystemExit",
    "x = 1\nx.__dict__ = 2",
    "import runpy",
    "from pathlib import Path\nPath('x').unlink()",
    "x = (",
    "x = " + "(" * 300 + ")" * 300,
]


@pytest.mark.parametrize("body", [GOOD[0], GOOD[2], GOOD[3], GOOD[1].replace("x := ", "")])
def test_what_scripts_consist_of_is_accepted(body: str) -> None:
    require_closed(HEAD + body)


def test_modules_of_its_own_are_accepted() -> None:
    require_closed(MODULE)


@pytest.mark.parametrize("body", BAD)
def test_anything_else_is_refused(body: str) -> None:
    with pytest.raises(RefusedScript, match="was refused: "):
        require_closed(HEAD + body)


def test_a_module_may_not_define_more_than_init_and_forward() -> None:
    with pytest.raises(RefusedScript, match="class Net"):
        require_closed(MODULE.replace("def forward(self, x)", "def __getattr__(self, x)"))


def test_a_check_of_the_users_runs_only_where_it_was_asked_for() -> None:
    text = HEAD.replace("import torch\n", "import runpy\nfrom pathlib import Path\nimport torch\n")
    text += 'check = runpy.run_path(str(Path(__file__).with_name("c.py")))["bug"]\nassert not check(torch.ones(1))\n'
    require_closed(text, check=("c.py", "bug"))
    for check in (None, ("d.py", "bug"), ("c.py", "other")):
        with pytest.raises(RefusedScript):
            require_closed(text, check=check)


def test_a_test_does_nothing_but_run_the_repro() -> None:
    from reprokit.render.texts import write_test
    from tests.render.programs import masked_softmax, snapshot_of

    text = write_test(snapshot_of(masked_softmax()))
    require_test(text)
    with pytest.raises(RefusedScript):
        require_test(text + "print(1)\n")


@pytest.mark.parametrize("text", ['x"""\nexec(1)\n"""', "x\\", "x\rexec(1)", "x\x0c\nexec(1)", "x\u2028y", "{{ 1 }}"])
def test_a_headline_stays_in_its_docstring(text: str) -> None:
    from dataclasses import replace

    from reprokit.render.texts import write_test
    from tests.render.programs import masked_softmax, snapshot_of

    snapshot = snapshot_of(masked_softmax())
    failure: Failure = replace(snapshot.failure, call=text)
    require_test(write_test(replace(snapshot, failure=failure)))
