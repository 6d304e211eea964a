"""The benchmark of early warning: its runs are what they say, and its score is right."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import import_benchmark

BENCHMARK = import_benchmark("watching")
HEALTHY, PLANTED = BENCHMARK.healthy_runs.RUNS, BENCHMARK.planted_runs.RUNS


def losses_of(function: Callable[[int], None], seed: int) -> list[float]:
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(seed)
    return BENCHMARK.losses_in(out.getvalue())


def test_there_are_thirty_of_each_and_every_one_is_a_script() -> None:
    functions = [*HEALTHY, *(run.function for run in PLANTED)]
    assert len(HEALTHY) == len(PLANTED) == 30
    assert len({function.__name__ for function in functions}) == 60
    for function in functions:
        compile(BENCHMARK.script_of(function, 0), function.__name__, "exec")


@pytest.mark.parametrize("run", PLANTED[::8], ids=lambda run: run.function.__name__)
def test_a_planted_cause_ends_as_its_truth_says(run: Any) -> None:
    losses = losses_of(run.function, 7)
    assert BENCHMARK.untruth(run, BENCHMARK.first_bad(losses)) == ""


@pytest.mark.parametrize("run", [BENCHMARK.healthy_runs.triplets, BENCHMARK.healthy_runs.tiny_batches])
def test_a_healthy_run_stays_finite(run: Any) -> None:
    losses = losses_of(run, 7)
    assert len(losses) >= 300 and BENCHMARK.first_bad(losses) is None
