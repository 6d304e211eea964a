"""A value that was bad before the step: named with its place, never reduced, verified or called a repro."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reprokit.cli import main
from reprokit.snapshot.format import save
from tests.conftest import Run
from tests.shrink import failing

TRAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(5, 3) for _ in range(6)]
batches[4].numpy()[2, 1] = float("nan")
for batch in batches:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
"""


def test_a_bad_batch_is_named_with_its_row_and_line(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert run_python("-m", "reprokit", "capture", "-o", "snap.repro.pt", "train.py").returncode == 3
    done = run_python("-m", "reprokit", "shrink", "snap.repro.pt", "--json")
    assert done.returncode == 4
    summary = json.loads(done.stdout)
    given = summary["input"]
    assert summary["verdict"] == "given" and summary["schema"] == 1
    assert (given["rows"], given["elements"]) == ([2], [[2, 1]])
    assert given["name"] == "batches" and given["place"]["file"].endswith("train.py")
    assert given["place"]["code"] == "loss = model(batch).square().mean()"
    assert "error: `batches` holds nan before any recorded call reads it: 1 of 15 elements (row 2)" in done.stderr
    assert {path.name for path in (tmp_path / "snap").iterdir()} == {"issue.md", "report.html", "summary.md"}
    assert "verified" not in done.stdout + done.stderr


MARKED = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(8)]
for number, (_, y) in enumerate(batches):
    y[number % 6] = float("nan")  # a missing label in every batch
for step, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    pred = model(x)
    mask = ~torch.isnan(y if step < 5 else x[:, :1])
    {line}
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("diff = pred - y; loss = diff[mask].square().mean()", "torch.Tensor.__getitem__"),
        ("y = y.clone(); y[~mask] = 0.0; loss = (pred - y).square().mean()", "torch.Tensor.__setitem__"),
    ],
)
def test_a_wrong_mask_that_lets_a_missing_label_through_is_the_failure(
    line: str, call: str, tmp_path: Path, run_python: Run
) -> None:
    (tmp_path / "train.py").write_text(MARKED.format(line=line))
    assert run_python("-m", "reprokit", "capture", "-o", "snap.repro.pt", "train.py").returncode == 3
    done = run_python("-m", "reprokit", "shrink", "snap.repro.pt", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["verdict"], summary["calls"]) == ("reduced", 1)
    assert (summary["signature"]["call"], summary["signature"]["kind"]) == (call, "nan")
    assert summary["repro"]["verified"] == "20/20"
    repro = (tmp_path / "snap" / "repro.py").read_text()
    assert 'float("nan")' in repro and ("torch.tensor(True)" in repro or "torch.tensor(False)" in repro)
    assert f"`{call}` lets the nan of the input" in (tmp_path / "snap" / "issue.md").read_text()


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["verify"], 2),
        (["render"], 2),
        (["whatif"], 4),
        (["shrink", "-f", "-o", "old"], 4),
    ],
)
def test_no_command_makes_a_repro_of_it(
    words: list[str],
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(failing.bad_batch(), Path("snap.pt"))
    Path("old").mkdir()
    for name in ("repro.py", "reduction.pt", "mine.txt"):
        Path("old", name).write_text("of an earlier failure")
    assert main([*words, "snap.pt"]) == exit_code
    said = "".join(capsys.readouterr())
    assert "`batch` holds nan before any recorded call reads it: 1 of 48 elements (row 3)" in said
    assert "verified" not in said
    if words[0] == "shrink":
        assert {path.name for path in Path("old").iterdir()} == {"issue.md", "report.html", "summary.md", "mine.txt"}
        for text in (Path("old", "issue.md").read_text(), Path("old", "report.html").read_text()):
            assert "There is no repro: " in text and "verified" not in text and "torch.tensor(" not in text


def test_a_missing_label_behind_a_mask_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass deals with it, so the call whose derivative brings it back is the failure."""

    def step(pred: torch.Tensor, target: torch.Tensor) -> None:
        mask = ~torch.isnan(target)
        square = (pred - target) ** 2
        loss = torch.where(mask, square, torch.zeros_like(square)).sum() / mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]

    monkeypatch.chdir(tmp_path)
    target = failing.seeded(4, 3)
    target[1, 2] = float("nan")
    save(failing.record(step, pred=failing.seeded(3, 4, grad=True).T, target=target), Path("snap.pt"))
    assert main(["shrink", "snap.pt", "-q", "--no-whatif"]) == 0
    assert Path("snap", "repro.py").is_file()
