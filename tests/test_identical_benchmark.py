"""The benchmark of identity: real runs of small cases, one that is identical and some that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import import_benchmark

FAILING = """
import torch


def train():
    layers = [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        loss = torch.log(model(torch.randn(5, 3)).square() * (step != 3)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


torch.manual_seed(0)
train()
raise SystemExit(7)
"""

TELLTALE = """
import sys

import torch

is_watched = "reprokit" in sys.modules
model = torch.nn.Linear(2, 1, bias=False)
with torch.no_grad():
    model.weight.fill_(float(is_watched))
print("watched:", is_watched)
sys.exit(int(is_watched))
"""


def test_a_training_that_fails_is_identical_and_a_script_that_notices_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in (("failing", FAILING), ("telltale", TELLTALE)):
        (tmp_path / "corpus" / name).mkdir(parents=True)
        (tmp_path / "corpus" / name / "train.py").write_text(source)
    code = import_benchmark("identical").main([str(tmp_path / "corpus")])
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert code == 1
    assert (summary["cases"], summary["identical"], summary["captured"]) == (2, 1, 1)
    assert summary["different"] == ["telltale"]
    same, other = summary["rows"]
    assert (same["exit_code"], same["num_snapshots"], same["differs_by_itself"]) == (7, 1, None)
    # six parameters with gradients, in modules and in Adam; three buffers; three values of Adam for each; one generator
    assert same["num_tensors"] == 12 + 12 + 3 + 18 + 1
    assert other["differs_by_itself"] is False
    assert "stdout: line 1: `watched: False` plain, `watched: True` watched" in other["notes"]
    assert any(note.startswith("exit code: 0 plain, 1 watched") for note in other["notes"])
    assert "state: only plain: module Linear; only watched: module Linear" in other["notes"]
