"""The states of Python's and NumPy's random generators, which a model's forward may draw from beside torch's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any


class GeneratorWatch:
    """Notes the generators' states before a step's first forward, while there is reason to.

    Reading them in every step would cost several per cent of a short step, so they are read in the first steps and once
    after every copy of the state. If the states differ before and after a step's forward then, they are read always.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] | None = None
        self._looks_left = 3
        self._is_drawn = False

    @property
    def is_looking(self) -> bool:
        """True if the next forward matters."""
        return self._is_drawn or self._looks_left > 0

    def before_module(self) -> dict[str, Any] | None:
        """A root module is about to run: the states of now if it is not the first one of a step that is looked at."""
        if not self.is_looking:
            return None
        states = python_generators()
        if self.states is None:
            self.states = states
            return None
        return states

    def restart(self) -> None:
        """The step is over."""
        if self.states is None:
            return
        if not self._is_drawn:
            self._looks_left -= 1
            self._is_drawn = not _are_equal(self.states, python_generators())
        self.states = None

    def look_closely(self) -> None:
        """Look again in the next step."""
        self._looks_left = max(self._looks_left, 1)


def python_generators() -> dict[str, Any]:
    """The states of Python's and, where the program uses it, NumPy's generator."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state()
    return states


def _are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first["python"] != second["python"] or first.keys() != second.keys():
        return False
    return all(
        a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
        for a, b in zip(first.get("numpy", ()), second.get("numpy", ()), strict=True)
    )


@contextlib.contextmanager
def python_generators_restored(states: dict[str, Any] | None) -> Iterator[None]:
    """Python's and NumPy's generators as they were in ``states``; afterwards as they are now."""
    before = python_generators()
    try:
        set_python_generators(states or before)
        yield
    finally:
        set_python_generators(before)


def set_python_generators(states: dict[str, Any]) -> None:
    """Put Python's and NumPy's generators into ``states``."""
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
