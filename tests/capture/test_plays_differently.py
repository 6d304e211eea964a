"""A step whose calls raise an exception when they are played again: it is saved with what its modules were given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run

ATTRIBUTE = """
import torch
from torch import nn

class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        if getattr(self.layer.weight, "sample", None) is not None:
            raise RuntimeError("clear the samples of" + chr(10) + str(self.layer.weight))
        self.layer.weight.sample = x
        return self.layer(x)

torch.manual_seed(0)
model = Once()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    x = torch.randn(5, 4)
    if number == 4:
        x[2, 1] = float("nan")
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.layer.weight.sample = None
print("end", loss.item())
"""

# The loss is of a tensor subclass that refuses most functions.
EXPANDED_WEIGHTS = """
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for number in range(6):
    x = torch.randn(5, 4)
    if number == 4:
        x[2, 1] = float("nan")
    for parameter in model.parameters():
        parameter.grad_sample = None
    loss = call_for_per_sample_grads(model, loss_reduction="mean")(x).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad_sample.mean(0)
print("end", loss.item())
"""


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (ATTRIBUTE, "RuntimeError: clear the samples of"),
        (EXPANDED_WEIGHTS, "RuntimeError: Expanded Weights encountered but cannot handle function"),
    ],
    ids=["an attribute of a parameter", "a tensor that refuses functions"],
)
def test_a_step_that_raises_when_played_again(
    script: str, error: str, run_python: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    bare = run_python("train.py")
    watched = run_reprokit("capture", "-o", "bad.pt", "--after-capture", "continue", "train.py")
    assert watched.stdout == bare.stdout
    assert "could not save" not in watched.stderr and "error of its own" not in watched.stderr
    shown = json.loads(run_reprokit("show", "bad.pt", "--json").stdout)
    assert shown["failure"]["step"] == 4
    assert shown["fidelity"] == "unfaithful"
    assert f"playing the step again raised {error}" in shown["fidelity_note"]
    assert "\n" not in shown["fidelity_note"]
