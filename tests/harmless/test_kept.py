"""Work of our own calls no function that a script may have replaced; replaced ones run as often as without us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run

HERE = Path(__file__).parent
CONTINUE = ("--after-capture", "continue")


@pytest.mark.parametrize(
    ("phase", "options", "has_file"),
    [
        ("healthy", ("--watch", "every-step", "--record", "auto", "--numbers", "numbers.jsonl"), False),
        ("healthy", ("--on", "early", "--on", "silent"), False),
        ("forward", CONTINUE, True),
        ("backward", CONTINUE, True),
        ("optimizer", CONTINUE, True),
        ("exception", (), True),
        ("event", ("--on", "early", *CONTINUE), True),
    ],
)
def test_no_patched_function_is_called_by_us(
    phase: str, options: tuple[str, ...], has_file: bool, run_reprokit: Run, tmp_path: Path
) -> None:
    script = HERE / "patched_everything.py"
    done = run_reprokit("capture", "-o", "s.pt", *options, str(script), phase, "report.json")
    assert done.returncode == (3 if phase == "exception" else 0), done.stderr
    assert "error of its own" not in done.stderr and (tmp_path / "s.pt").exists() == has_file, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["of_ours"] == {}
    called = ["torch.Tensor.detach", "torch.Tensor.abs", "torch.nn.functional.softplus", "random.random"]
    assert all(report["calls"][name] >= 50 for name in called), report["calls"]
    assert report["seen"], "a call from a file of reprokit would have been noted"


@pytest.mark.parametrize(
    "options", [(), ("--on", "early"), ("--watch", "every-step", "--record", "auto"), ("--budget", "off")]
)
def test_functions_that_draw_are_called_as_often(options: tuple[str, ...], run_python: Run) -> None:
    script = str(HERE / "patched_draws.py")
    bare = run_python(script)
    watched = run_python("-m", "reprokit", "capture", *options, script)
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert bare.stdout == watched.stdout and len(bare.stdout.split()) == 4
