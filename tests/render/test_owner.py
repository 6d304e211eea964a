"""Whose question a failure is: that of the code which computed the bad value, not of what drives the training."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import reprokit
from reprokit.program.sites import kind_of_file
from reprokit.render.expectation import expect
from reprokit.snapshot.format import load

LIBRARY = """
import torch

def average(total, count):
    return total / count

class Average(torch.nn.Module):
    def forward(self, total, count):
        return total / count

def train(step, *rest):
    for number in range(4):
        step(number, *rest)

def supervise(number, model, criterion, optimizer):
    update(criterion(model(torch.ones(2, 3) * (number != 2))), optimizer)

def update(loss, optimizer):
    loss.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
USER = """
import library, torch
from torch import nn
net = nn.Linear(3, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
class Log(nn.Module):
    def forward(self, x):
        return x.square().log()
def step(number, divide=torch.div):
    x = torch.ones(2, 3)
    loss = divide(net(x).pow(2).sum(), torch.tensor(0.0 if number == 2 else 1.0))
    library.update(loss, optimizer)
def damaged(number):
    x = torch.full((2, 3), float("nan") if number == 2 else 1.0)
    library.update(library.average(net(x).pow(2).sum(), 2), optimizer)
"""


@pytest.mark.parametrize(
    ("file", "loop", "owner"),
    [
        ("train.py", "library.train(step)", "own"),
        ("<cell 3>", "library.train(step)", "own"),
        ("train.py", "library.train(library.supervise, net, Log(), optimizer)", "own"),
        ("train.py", "library.train(library.supervise, nn.Sequential(net, Log()), nn.Identity(), optimizer)", "own"),
        ("<cell 3>", "library.train(damaged)", "own"),
        ("train.py", "library.train(step, library.average)", "library"),
        ("train.py", "[step(number, library.Average()) for number in range(4)]", "library"),
    ],
)
def test_the_owner_is_whose_line_computed_the_bad_value(
    file: str, loop: str, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType("library")
    path = str(tmp_path / "site-packages" / "library" / "__init__.py")
    exec(compile(LIBRARY, path, "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "library", library)
    file = file if file.startswith("<") else str(tmp_path / file)
    with reprokit.capture(tmp_path / "snap.pt") as session:
        exec(compile(f"{USER}\n{loop}", file, "exec"), {"__name__": "program"})
    snapshot = load(session.snapshots[0])
    assert snapshot.step == 2
    found = expect(snapshot)
    assert found.owner == owner
    assert ("is a question about `library` or the code that calls it." in found.remark) == (owner == "library")


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("<ipython-input-7-a95786>", "In[7]"),
        ("/tmp/ipykernel_4711/596703346.py", "In[7]"),
        ("<ipython-input-8-a95786>", "<ipython-input-8-a95786>"),
        ("<cell 3>", "<cell 3>"),
    ],
)
def test_a_line_of_a_notebook_is_named_by_its_cell(
    file: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {"<ipython-input-7-a95786>": 7, "/tmp/ipykernel_4711/596703346.py": 7}
    compiler = types.SimpleNamespace(format_code_name=lambda n: ("Cell", f"In[{cells[n]}]") if n in cells else None)
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    code = "import torch\nx = torch.zeros(2, requires_grad=True)\n(x.log() * 2).sum().backward()"
    with reprokit.capture(tmp_path / "snap.pt") as session:
        exec(compile(code, file, "exec"), {"__name__": "__main__"})
    snapshot = load(session.snapshots[0])
    assert snapshot.failure.site is not None and expect(snapshot).owner == "own"
    assert (snapshot.failure.site.file, snapshot.failure.site.line) == (place, 3)


@pytest.mark.parametrize(
    ("main", "spec", "file", "kind"),
    [
        ("site-packages/mine/train.py", None, "site-packages/mine/train.py", "user"),
        ("site-packages/mine/train.py", None, "site-packages/mine/models/net.py", "user"),
        ("site-packages/mine/train.py", None, "site-packages/other/net.py", "library"),
        ("site-packages/mine/train.py", "mine.train", "site-packages/mine/net.py", "library"),
        ("site-packages/train.py", None, "site-packages/other.py", "library"),
        (None, None, "other.py", "user"),
    ],
)
def test_the_running_program_is_the_users_wherever_it_lies(
    main: str | None, spec: str | None, file: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("__main__")
    module.__dict__.update({"__file__": str(tmp_path / main)} if main is not None else {}, __spec__=spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert kind_of_file(str(tmp_path / file)) == kind
