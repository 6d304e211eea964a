"""Repros that compare or ask a function of the user's: the words they use themselves are no names of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reprokit.locate.failure import Failure
from reprokit.locate.kinds import FUNCTION, MISMATCH
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.render.script import write_script

WORDS = ["step", "actual", "outcome", "verdict", "runpy"]


def run_script(name: str, kind: str, way: str, folder: Path) -> None:
    """Run the repro of a sum that loses its digits, with an input of this name."""
    calls = (
        Call("torch.Tensor.add", (Ref(0), 1e8), {}, Ref(1)),
        Call("torch.Tensor.sub", (Ref(1), 1e8), {}, Ref(2)),
    )
    program = Program(calls, (Input(0, name),), (Ref(2),))
    failure = Failure(phase="forward", kind=kind, call="torch.Tensor.sub", way=way, value=2, call_index=1)
    path = write_script(program, {0: torch.ones(2)}, failure).write(folder)
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


@pytest.mark.parametrize("name", WORDS)
def test_a_difference_from_float64_is_found(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_script(name, MISMATCH, "fp64", tmp_path)


@pytest.mark.parametrize("name", WORDS)
def test_a_check_sees_the_outcome(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def lost(outcome):\n    return bool((outcome.outputs[0] == 0).all())\n")
    with pytest.raises(AssertionError, match=r"lost\(outcome\) is true"):
        run_script(name, FUNCTION, "mine.py:lost", tmp_path)
