"""Random states go to a file and back, and draw the same numbers afterwards."""

from __future__ import annotations

import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy
import torch

from reprokit.grammar import plain_of, read
from reprokit.snapshot.rng import Generators, get_rng_state


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()]


def test_states_go_to_a_file_and_back(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number waiting
    numpy.random.randn()
    torch.save(plain_of(get_rng_state()), tmp_path / "state.pt")
    first = draw()
    state = read(Generators, torch.load(tmp_path / "state.pt", weights_only=True))
    assert state.python is not None and state.numpy is not None and state.torch is not None
    random.setstate(astuple(state.python))
    numpy.random.set_state(astuple(state.numpy))
    torch.set_rng_state(state.torch)
    assert draw() == first
