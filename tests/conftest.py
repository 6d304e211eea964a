"""What all tests share: the command line in a process of its own, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]

settings.register_profile("reprokit", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("reprokit")
os.environ["REPROKIT_SHRINK_NO_WHATIF"] = "1"  # ten seconds for every reduction; the tests of the table ask for it


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run ``python *words`` in the test's own folder, with reprokit importable."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def run_reprokit(run_python: Run) -> Run:
    """Run ``reprokit *words`` in the test's own folder."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_python("-m", "reprokit", *words, **variables)

    return run
