"""The small training scripts of the frameworks, in the test's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> Path:
    """The folder that the scripts are copied to and run in."""
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path
