"""The benchmark of identity: real runs of small cases, one that is identical and some that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="module")
def identical() -> ModuleType:
    return import_benchmark("identical")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, source in (("failing", FAILING), ("telltale", TELLTALE)):
        folder = tmp_path / "corpus" / name
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(source)
    return tmp_path / "corpus"


def test_a_training_that_fails_is_identical(
    identical: ModuleType, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.json"
    code = identical.main([str(corpus), "--case", "failing", "--json", str(file)])
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert code == 0, printed.err
    assert json.loads(file.read_text()) == summary
    assert (summary["cases"], summary["identical"], summary["captured"]) == (1, 1, 1)
    row = summary["rows"][0]
    assert (row["exit_code"], row["num_snapshots"], row["differs_by_itself"]) == (7, 1, None)
    # six parameters with gradients, in modules and in Adam; three buffers; three values of Adam for each; one generator
    assert row["num_tensors"] == 12 + 12 + 3 + 18 + 1
    assert "1 of 1 identical, 1 captured" in printed.err


def test_a_script_that_notices_is_different(
    identical: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = identical.main([str(corpus), "--case", "telltale"])
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert code == 1
    assert (summary["identical"], summary["different"]) == (0, ["telltale"])
    assert summary["counts"] == {"stdout_same": "0/1", "exit_same": "0/1", "state_same": "0/1"}
    row = summary["rows"][0]
    assert row["differs_by_itself"] is False
    assert "stdout: line 1: `watched: False` plain, `watched: True` watched" in row["notes"]
    assert any(note.startswith("exit code: 0 plain, 1 watched") for note in row["notes"])
    assert "state: only plain: module Linear; only watched: module Linear" in row["notes"]
    assert printed.err.count("DIFFER") == 3
