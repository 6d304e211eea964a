"""Scripts of different kinds are the same bare and watched: `benchmarks/harmless.py` compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SECONDS, import_benchmark

harmless = import_benchmark("harmless")
HERE = Path(__file__).parent
SCRIPTS = [path for path in harmless.find_scripts(HERE) if path.stem != "patched_everything"]  # it takes arguments
DIFFERENT = """
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(4, 2)).mean()
    loss.backward()
    optimizer.step()
value = torch.zeros(2)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A script, and what a run of it was like."""
    script: Path = tmp_path_factory.mktemp("different") / "own" / "script.py"
    script.parent.mkdir()
    script.write_text(DIFFERENT)
    return script, harmless.run(script, script.parent.with_name("run"), (), SECONDS)


def test_there_are_scripts_of_a_dozen_kinds() -> None:
    assert len(SCRIPTS) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_the_same_when_it_is_watched(script: Path, tmp_path: Path) -> None:
    row = harmless.compare_script(script, tmp_path / "run", SECONDS)
    assert row.is_same and not row.reason, "\n".join(harmless.lines_of(row))
    assert row.num_tensors >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("print(1)", "stdout"),
        ("import sys; sys.stderr.write('x\\n')", "stderr"),
        ("import warnings; warnings.warn('x')", "warnings"),
        ("open('made.txt', 'w').close()", "files"),
        ("torch.rand(1)", "left"),
        ("import random; random.random()", "left"),
        ("import numpy; numpy.random.rand()", "left"),
        ("model.weight.data[0, 1] += 1e-6", "left"),
        ("model.bias.grad *= 2", "left"),
        ("value.add_(0.0)", "left"),
        ("import atexit, os; atexit.register(os._exit, 4)", "exit_code"),
    ],
)
def test_every_difference_is_found(change: str, name: str, bare: tuple[Path, Any]) -> None:
    """The second run has one line more."""
    script, first = bare
    script.write_text(DIFFERENT + change + "\n")
    changed = harmless.run(script, script.parent.with_name("run"), (), SECONDS)
    assert name in dict(harmless.differences(first, changed))
    assert not list(harmless.differences(first, first))
