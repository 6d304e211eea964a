"""A torch that lacks a private name loses what hangs on it, in one line, and never all watching."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reprokit import torch_private
from tests.conftest import Run

LOOP = """
import pkgutil, sys

LACKS = {lacks}
resolve = pkgutil.resolve_name

def resolve_name(name):
    if any(name.startswith(lacking) for lacking in LACKS):
        raise AttributeError(name)
    return resolve(name)

for name in [name for name in sys.modules if name.partition(".")[0] == "reprokit"]:
    del sys.modules[name]
pkgutil.resolve_name = resolve_name
import reprokit
import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with reprokit.capture("s.pt"):
    for step in range(4):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)).relu() - 9.0 * (step == 2)).sqrt().mean()
        loss.backward()
        optimizer.step()
print("the loop ended")
"""
OPTIONAL = [name for name in torch_private.NAMES if name not in torch_private.REQUIRED]


def test_this_torch_has_every_name() -> None:
    assert torch_private.LOST == {}
    assert torch_private.lacking([]) is None
    torch_private.require()


def test_all_optional_names_may_be_missing(run_python: Run, tmp_path: Path) -> None:
    result = run_python("-c", LOOP.format(lacks=OPTIONAL))
    assert (tmp_path / "s.pt").exists(), result.stderr
    (line,) = [line for line in result.stderr.splitlines() if " lacks " in line]
    assert line.startswith(f"reprokit: torch {torch.__version__} lacks ")
    assert "`torch._C._current_graph_task_id`" in line and "checkpoint" in line


@pytest.mark.parametrize("name", torch_private.REQUIRED)
def test_the_loop_runs_where_nothing_can_be_watched(name: str, run_python: Run) -> None:
    result = run_python("-c", LOOP.format(lacks=[name]))
    assert result.stdout == "the loop ended\n"
    (line,) = result.stderr.splitlines()
    assert "cannot watch this run" in line and name in line
