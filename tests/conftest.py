"""What all tests share: the command line in a process of its own, from any folder, and the benchmarks as modules."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]

settings.register_profile("reprokit", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("reprokit")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a run in the background, whose children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["REPROKIT_SHRINK_NO_WHATIF"] = "1"  # five seconds for every reduction; the tests of the table ask for it


def run_python_in(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` in a folder, with reprokit importable; a hang ends the test."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def import_benchmark(name: str) -> ModuleType:
    """A script of the benchmarks as a module; these import each other as from the folder that they are in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run ``python *words`` in the test's own folder."""
    return functools.partial(run_python_in, tmp_path)


@pytest.fixture
def run_reprokit(run_python: Run) -> Run:
    """Run ``reprokit *words`` in the test's own folder."""
    return functools.partial(run_python, "-m", "reprokit")
