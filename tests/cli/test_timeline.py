"""``reprokit timeline``: the steps before a failure in every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from reprokit.cli import main
from reprokit.series.events import LineLog
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
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = run_reprokit("timeline", "x.pt", "--to", "tensorboard", "-o", "runs")
    assert done.returncode == 0, done.stderr
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [event.value for event in events.Scalars("loss")][:3] == [2.0, 1.0, 0.0]


HEALTHY = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(4, 2)).pow(2).mean() * (1e4 if step == 11 else 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_numbers_of_a_run_without_a_failure(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(HEALTHY)
    done = run_reprokit("capture", "--record", "2", "train.py")
    assert "no numbers are kept (`--numbers FILE` keeps them)" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # the contract: no file
    done = run_reprokit("capture", "--record", "1", "--numbers", "run.jsonl", "train.py")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1) and "numbers to run.jsonl" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(12)) and "grad_norm/weight" in rows[0]
    table = run_reprokit("timeline", "run.jsonl").stdout
    assert table.split()[:2] == ["step", "loss"]
    assert "2 parameters recorded in 12 steps" in table
    again = run_reprokit("timeline", "run.jsonl", "--to", "jsonl").stdout
    assert [json.loads(line) for line in again.splitlines()] == rows
    assert run_reprokit("capture", "--numbers", "run.jsonl", "train.py").returncode == 2  # it exists
    assert run_reprokit("capture", "-f", "--record", "4", "--numbers", "run.jsonl", "train.py").returncode == 0
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 1.0}\n')
    assert "--record 1" in run_reprokit("timeline", "run.jsonl").stdout and "--record 1" not in table
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    assert run_reprokit("timeline", "other.jsonl").returncode == 2


BY_HAND = """\
import torch
w = torch.ones(2, requires_grad=True)
for step in range(4):
    w.sum().square().backward()
    with torch.no_grad():
        w -= 0.01 * w.grad
    w.grad = None
"""


def test_a_run_without_an_optimizer_says_that_it_has_written_no_numbers(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    done = run_reprokit("capture", "--numbers", "run.jsonl", "train.py")
    assert done.returncode == 0 and not (tmp_path / "run.jsonl").exists()
    told = "no numbers were written to run.jsonl: no step of `torch.optim` was measured"
    assert [told in line for line in done.stderr.splitlines()] == [False, True]


def test_numbers_that_cannot_be_written_are_named_once(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text(f"import shutil; shutil.rmtree('gone')\n{HEALTHY}")
    done = run_reprokit("capture", "--record", "2", "--numbers", "gone/run.jsonl", "train.py")
    assert done.returncode == 0 and done.stderr.count("gone/run.jsonl'; it is not called again") == 1


ROW = '{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[" * 200_000, f"{'[' * 200_000}\n", f"[]\n{ROW}", f"\n{ROW}", "\xff\n"),
        *('{"step": 1e999}\n', '{"step": -1}\n', '{"step": true}\n', f'{{"step": 1, "a": 1{"0" * 400}}}\n'),
        *('{"step": 1, "a": [1]}\n', '{"step": 1, "a": "b"}\n', f'{ROW}{{"step": 1,\n'),
    ],
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text(text, encoding="latin-1")
    assert main(["timeline", str(tmp_path / "run.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"reprokit: error: `{tmp_path}/run.jsonl` was not written by reprokit")


@pytest.mark.parametrize("limit", ["characters", "items"])
def test_a_file_of_numbers_has_a_limit(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows without a column in common would make a table that is far larger than the file."""
    rows = [{"step": number, f"n\x1b{number}": 1.0} for number in range(30)]
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["timeline", str(tmp_path / "run.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "n\\x1b3" in printed
    monkeypatch.setenv("REPROKIT_LIMITS", f"{limit}=500")
    assert main(["timeline", str(tmp_path / "run.jsonl")]) == 1
    assert f"has more than 500 {limit}" in capsys.readouterr().err


def test_a_log_of_lines_is_bounded(tmp_path: Path) -> None:
    log = LineLog(lambda: tmp_path / "run.jsonl", most_bytes=20)
    for number in range(50):
        log.add(f"{number:04}")
    kept = [(tmp_path / name).read_text().split() for name in ("run.jsonl.1", "run.jsonl")]
    assert [*map(int, kept[0]), *map(int, kept[1])] == list(range(50 - len(kept[0] + kept[1]), 50))
    assert len(list(tmp_path.iterdir())) == 2 and len(kept[0]) == 5
