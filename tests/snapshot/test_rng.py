"""Random states go to a file and back, and draw the same numbers afterwards."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from reprokit.grammar import plain_of, read
from reprokit.snapshot.rng import Generators, get_rng_state, set_rng_state


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()]


def test_states_go_to_a_file_and_back(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number waiting
    numpy.random.randn()
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    state = get_rng_state()
    first = draw()
    assert first[-1] == expected, "reading draws nothing"
    torch.save(plain_of(state), tmp_path / "state.pt")
    set_rng_state(read(Generators, torch.load(tmp_path / "state.pt", weights_only=True)))
    assert draw() == first


def test_a_state_from_a_program_without_numpy() -> None:
    state = replace(get_rng_state(), numpy=None)
    numpy.random.seed(1)
    before = numpy.random.get_state()[1].tolist()
    set_rng_state(state)
    assert numpy.random.get_state()[1].tolist() == before


def test_states_of_devices_that_are_not_here_are_left_out() -> None:
    set_rng_state(replace(get_rng_state(), cuda=(torch.zeros(16, dtype=torch.uint8),) * 64))
