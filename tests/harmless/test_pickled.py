"""Classes that a script has defined are pickled by value as in a bare run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run

SCRIPT = str(Path(__file__).parent / "pickled_classes.py")


@pytest.mark.parametrize("options", [(), ("--budget", "off")])
def test_a_watched_class_is_pickled_by_value(options: tuple[str, ...], run_python: Run) -> None:
    pytest.importorskip("cloudpickle")
    bare = run_python(SCRIPT)
    watched = run_python("-m", "reprokit", "capture", *options, SCRIPT)
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert bare.stdout == watched.stdout and len(bare.stdout.split()) > 10
    assert "error of its own" not in watched.stderr
