"""Every example, through the public commands: captured, shrunk, and its repro run by itself in a clean folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED: dict[str, dict[str, Any]] = json.loads((EXAMPLES / "expected.json").read_text())
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def reprokit(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reprokit", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", EXPECTED)
def test_an_example_from_script_to_repro(script: str, tmp_path: Path) -> None:
    expected = EXPECTED[script]
    captured = reprokit("capture", "-o", "snapshot.pt", str(EXAMPLES / script), folder=tmp_path)
    assert captured.returncode == 3, captured.stderr

    shown = json.loads(reprokit("show", "--json", "snapshot.pt", folder=tmp_path).stdout)
    failure = shown["failure"]
    assert (failure["step"], failure["phase"]) == (expected["step"], expected["phase"])
    assert any(f".{failure['call']}".endswith(f".{name}") for name in expected["call"])
    assert failure["module"] == expected["module"]
    assert shown["fidelity"] == "exact"
    assert failure["site"]["file"].endswith(script)

    shrunk = reprokit("shrink", "--json", "-o", "out", "snapshot.pt", folder=tmp_path)
    assert shrunk.returncode == 0, shrunk.stderr
    summary = json.loads(shrunk.stdout)
    assert summary["verdict"] == "reduced" and summary["one_minimal"]
    assert summary["calls"] == 1 and summary["elements"] <= 4
    assert summary["repro"]["verified"] == "20/20"
    assert summary["repro"]["files"] == ["repro.py"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "repro.py",
        "issue.md",
        "report.html",
        "test_repro.py",
        "reduction.pt",
    }

    clean = tmp_path / "clean"
    clean.mkdir()
    shutil.copy(tmp_path / "out" / "repro.py", clean)
    done = subprocess.run([sys.executable, "-I", "repro.py"], cwd=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "AssertionError" in done.stderr


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(EXPECTED) and all(f"`{name}`" in text for name in scripts)
