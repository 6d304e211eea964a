"""Lines of the tool go where stderr led before the script began: what the script collects of its stderr is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run

TRAIN = """\
import sys, torch

def train():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = (model(torch.ones(2, 3)) * (float("nan") if step == 3 else 1.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("mine", file=sys.stderr)
"""

COLLECTED = {
    "redirected": """
import contextlib, io
with contextlib.redirect_stderr(io.StringIO()) as collected:
    train()
print(repr(collected.getvalue()))
""",
    "replaced": """
sys.stderr = open("mine.log", "w")
train()
sys.stderr.close()
print(open("mine.log").read())
""",
    "descriptor": """
import os
kept, file = os.dup(2), os.open("mine.log", os.O_WRONLY | os.O_CREAT)
os.dup2(file, 2)
train()
sys.stderr.flush()
os.dup2(kept, 2)
print(open("mine.log").read())
""",
    "none": """
sys.stderr = None
train()
""",
    "child": """
import os
if not os.fork():
    here, numbers = os.fstat(2), []
    for number in range(3, 100):
        try:
            there = os.fstat(number)
        except OSError:
            continue
        if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
            numbers.append(number)
    print(numbers, flush=True)  # none: a daemon would keep the pipe open
    os._exit(0)
os.wait()
""",
}


@pytest.mark.parametrize("way", COLLECTED)
def test_a_script_collects_its_own_lines(tmp_path: Path, run_python: Run, run_reprokit: Run, way: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN + COLLECTED[way])
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--after-capture", "continue", "-o", "bad.pt", "train.py")
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert watched.stdout == bare.stdout
    assert [
        line for line in watched.stderr.splitlines() if not line.startswith("reprokit:")
    ] == bare.stderr.splitlines()
    assert ("reprokit: captured nan" in watched.stderr) is (way != "child")


def test_tests_that_collect_their_output_pass(tmp_path: Path, run_reprokit: Run) -> None:
    tests = """
def test_sys(capsys):
    train()
    assert capsys.readouterr().err == "mine\\n"

def test_descriptors(capfd):
    train()
    assert capfd.readouterr().err == "mine\\n"
"""
    (tmp_path / "test_some.py").write_text(TRAIN + tests)
    words = ("capture", "--after-capture", "continue", "-o", "bad.pt", "-m", "pytest", "-q", "test_some.py")
    done = run_reprokit(*words)
    assert done.returncode == 0, done.stdout
    assert "reprokit: captured nan" in done.stderr
