"""Work of our own reads no gradient of a tensor that can have none: torch would warn in a file of ours."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Run

CLONING = """\
import torch

class Averaging(torch.optim.SGD):
    # its state is cloned of the parameter with its graph, as that of `emonavi` in pytorch_optimizer
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("shadow", parameter.clone())
        return super().step(closure)

weight = torch.nn.Parameter(torch.ones(3))
optimizer = Averaging([weight], lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    (weight * 2).sum().backward()
    optimizer.step()
print(weight)
"""


def test_a_state_with_a_graph_gives_no_warning(tmp_path: Path, run_python: Run, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(CLONING)
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--history", "1", "train.py")
    lines = [line for line in watched.stderr.splitlines() if not line.startswith("reprokit:")]
    assert lines == bare.stderr.splitlines()
    assert watched.stdout == bare.stdout
