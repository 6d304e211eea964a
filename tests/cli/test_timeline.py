"""``reprokit timeline``: the steps before a failure in every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.conftest import Run

SCRIPT = """\
import torch
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.5)
for step in range(4):
    optimizer.zero_grad()
    (weight.sum() * (1 if step < 3 else float("nan"))).backward()
    torch.nn.utils.clip_grad_norm_([weight], 10.0)
    optimizer.step()
"""


def test_steps_as_a_table_lines_csv_and_events(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run_reprokit("capture", "-o", "x.pt", "train.py").returncode == 3
    rows = [json.loads(line) for line in run_reprokit("timeline", "x.pt", "--to", "jsonl").stdout.splitlines()]
    assert [(row["step"], row["loss"], row["lr"]) for row in rows[:-1]] == [(0, 2.0, 0.5), (1, 1.0, 0.5), (2, 0.0, 0.5)]
    assert rows[-1]["loss"] == "nan"  # which JSON has no number for
    assert rows[0]["grad_norm"] == pytest.approx(2**0.5) and "lr" not in rows[-1]
    table = run_reprokit("timeline", "x.pt").stdout.splitlines()
    assert table[0].split()[:2] == ["step", "loss"] and len(table) == 5
    assert run_reprokit("timeline", "x.pt", "--to", "csv", "-o", "x.csv").returncode == 0
    assert [row["loss"] for row in csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text()))][:2] == ["2.0", "1.0"]
    assert run_reprokit("timeline", "x.pt", "--to", "csv", "-o", "x.csv").returncode == 2


def test_events_can_be_read_by_tensorboard(tmp_path: Path, run_reprokit: Run) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "train.py").write_text(SCRIPT)
    run_reprokit("capture", "-o", "x.pt", "train.py")
    done = run_reprokit("timeline", "x.pt", "--to", "tensorboard", "-o", "runs")
    assert done.returncode == 0, done.stderr
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [event.value for event in events.Scalars("loss")][:3] == [2.0, 1.0, 0.0]
