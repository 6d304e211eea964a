"""A torch that lacks a private name loses what hangs on it, in one line, and never all watching."""

from __future__ import annotations

import sys
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


def test_tables_of_modules() -> None:
    norm = torch.nn.BatchNorm1d(2, affine=False)
    assert [*torch_private.hook_tables([norm])] == []
    norm.register_forward_hook(lambda *_: None)
    norm.register_full_backward_hook(lambda *_: None)
    assert [is_backward for _, is_backward in torch_private.hook_tables([norm])] == [False, True]


def test_tables_of_leaves() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not torch_private.hooks_of_leaf(leaf)
    leaf.register_hook(lambda grad: grad)
    leaf.register_post_accumulate_grad_hook(lambda tensor: None)
    assert torch_private.hooks_of_leaf(leaf)
    assert [is_backward for _, is_backward in torch_private.hook_tables([], [leaf])] == [True, True]


def test_the_scale_of_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert torch_private.scale_of(scaler) is None
    scaler.scale(torch.ones(()))
    with torch_private.scaling_by(scaler, torch.tensor(8.0)):
        assert scaler.get_scale() == 8.0
    assert torch_private.scale_of(scaler) == 4.0 and hasattr(scaler, torch_private.UNSCALE)


def test_compiled_functions_are_known() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager")
    assert torch_private.uncompiled(compiled) is double and torch_private.uncompiled(double) is None
    home = sys.modules[torch_private.EVAL_FRAME]
    assert hasattr(home, torch_private.BEFORE_COMPILED) and hasattr(home, "skip_code")
    assert "eager" in getattr(sys.modules[torch_private.BACKENDS], torch_private.BACKEND_TABLE)
    assert hasattr(torch.utils.checkpoint, torch_private.CHECKPOINT_FRAMES)


def test_parameters_of_an_operator() -> None:
    names = [item.name for item in torch_private.positional_parameters(torch.ops.aten.addmm.default)]
    assert names == ["self", "mat1", "mat2"]


def test_many_tensors_in_one_call() -> None:
    assert torch_private.foreach_norm([torch.tensor([3.0, 4.0])], 2)[0] == 5.0


def test_deterministic_algorithms() -> None:
    torch_private.set_deterministic(True, warn_only=True)
    try:
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch_private.set_deterministic(False, warn_only=False)
