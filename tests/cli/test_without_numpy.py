"""torch runs without NumPy, and so does reprokit: a fresh environment has none."""

from __future__ import annotations

from pathlib import Path

from reprokit.snapshot.format import save
from tests.conftest import ForkingSystem, Run
from tests.shrink import failing

SHRINK = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
from reprokit.cli import main
sys.executable = sys.argv[1]  # of the repro's runs
sys.exit(main(["shrink", "-q", "snap.pt"]))
"""


def test_a_snapshot_shrinks_without_numpy(start_python: Run, tmp_path: Path) -> None:
    save(failing.masked_softmax(), tmp_path / "snap.pt")
    done = start_python("-c", SHRINK, ForkingSystem().executable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "snap" / "repro.py").is_file()
