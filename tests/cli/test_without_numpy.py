"""torch runs without NumPy, and so does reprokit: a fresh environment has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from reprokit.snapshot.format import save
from tests.shrink import failing

SHRINK = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
from reprokit.cli import main
sys.exit(main(["shrink", "-q", "snap.pt"]))
"""


def test_a_snapshot_shrinks_without_numpy(tmp_path: Path) -> None:
    save(failing.masked_softmax(), tmp_path / "snap.pt")
    done = subprocess.run([sys.executable, "-c", SHRINK], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "snap" / "repro.py").is_file()
