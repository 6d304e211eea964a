"""softmax returns nan: fails while the failure that repro.py shows is there, and passes once it is gone."""

import runpy
from pathlib import Path


def test_softmax_returns_nan():
    runpy.run_path(str(Path(__file__).with_name("repro.py")), run_name="__main__")
