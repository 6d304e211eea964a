"""The states of Python's and NumPy's random generators, which a model's forward may draw from beside torch's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any


def python_generators() -> dict[str, Any]:
    """The states of Python's and, where the program uses it, NumPy's generator."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state()
    return states


@contextlib.contextmanager
def python_generators_restored(states: dict[str, Any] | None) -> Iterator[None]:
    """Python's and NumPy's generators as they were in ``states``; afterwards as they are now."""
    before = python_generators()
    try:
        _set(states or before)
        yield
    finally:
        _set(before)


def _set(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
