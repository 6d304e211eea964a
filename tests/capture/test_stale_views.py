"""Steps with tensors whose autograd node torch refuses to give: stale views of `torch.no_grad`, inference tensors.

A view that was made in `torch.no_grad` is stale once its base is written with gradients: reading its `grad_fn` raises.
`torch.nn.init.orthogonal_`, `eye_` and others leave one behind, and a script may keep one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""
UPDATE = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS = {
    "orthogonal": """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
nn.init.orthogonal_(model[0].weight, 1.4)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    advantage = torch.randn(1)
    loss = (model(torch.randn(1, 4)).view(-1) * advantage / advantage.std()).mean()
""",
    "recurrent": """
rnn, head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 1)
for name, parameter in rnn.named_parameters():
    if "weight_hh" in name:
        nn.init.orthogonal_(parameter)
rnn.flatten_parameters()
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
for step in range(3):
    returns = torch.randn(1)
    loss = (head(rnn(torch.randn(1, 6, 3))[0][:, -1]).view(-1) / returns.std()).mean()
""",
    "attribute": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        with torch.no_grad():
            self.diagonal = self.weight.diagonal()
        nn.init.eye_(self.weight)

    def forward(self, x):
        with torch.no_grad():
            scale = self.diagonal.abs().max()
        return x @ self.weight / scale

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = (model(torch.randn(8, 4)) * torch.tensor(1.0 - step).log()).mean()
""",
    "again": """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    if step % 3 == 0:
        nn.init.orthogonal_(model[0].weight)
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    y = model(torch.randn(8, 4))
    loss = (y / y.norm()).sum() if step == 3 else y.square().mean()
""",
    "inference": """
teacher, model = nn.Linear(3, 3), nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    x = torch.randn(8, 3)
    with torch.inference_mode():
        target = teacher(x)
        target[0] = target[0] / (2.0 - step)
    loss = (model(x) - target.clone()).square().mean()
""",
}
CALLS = {
    "orthogonal": "torch.Tensor.std",
    "recurrent": "torch.Tensor.std",
    "attribute": "torch.Tensor.log",
    "again": "torch.Tensor.div",
    "inference": "torch.Tensor.div",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_step_is_saved_exactly(name: str, run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS[name] + UPDATE)
    done = run_reprokit("capture", "-o", "bad.pt", "train.py")
    assert done.returncode == 3, done.stderr
    shown: dict[str, Any] = json.loads(run_reprokit("show", "--json", "bad.pt").stdout)
    assert shown["fidelity"] == "exact"
    assert shown["failure"]["call"] == CALLS[name]
