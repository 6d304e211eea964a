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


def answer(summary: dict[str, Any] | None = None, events: list[dict[str, Any]] | None = None) -> Any:
    return BENCHMARK.Answer(summary, events or [], [], 0, "")


def test_the_answer_is_the_event_of_the_snapshot_then_its_story_then_the_gravest_event() -> None:
    failure = {"kind": "spike", "step": 21, "module": "2.lin", "event": {"began_at": 20}}
    assert BENCHMARK.begin_of(answer({"failure": failure})) == ("spike", "error", 20, "2.lin")
    spike = {"failure": {**failure, "module": None}, "story": [{"step": 20, "module": "4"}]}
    assert BENCHMARK.begin_of(answer(spike)) == ("spike", "error", 20, "4")
    story = [{"step": 19, "module": None}, {"step": 20, "module": "4"}]
    bad = {"failure": {"kind": "nan", "step": 23, "module": None}, "story": story}
    assert BENCHMARK.begin_of(answer(bad)) == ("story", "error", 19, "4")
    assert BENCHMARK.begin_of(answer({**bad, "story": []})) == ("nan", "error", 23, None)
    events = [
        {"kind": "spike", "severity": "warning", "began_at": 3},
        {"kind": "dead", "severity": "error", "began_at": 9, "place": "0"},
    ]
    assert BENCHMARK.begin_of(answer(events=events)) == ("dead", "error", 9, "0")
    assert BENCHMARK.begin_of(answer()) == (None, None, None, None)


def test_a_layer_counts_only_in_a_step_in_which_the_cause_acts() -> None:
    def row(step: int | None, layer: str | None) -> Any:
        return BENCHMARK.PlantedRow("case", 20, 24, ("2", "4"), step=step, layer=layer)

    right, late, early, nothing = row(24, "2.weight"), row(25, "4"), row(19, "2"), row(None, None)
    assert [(one.step_ok, one.layer_ok) for one in (right, late, early, nothing)] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
    ]


def test_aims_that_are_missed_are_named() -> None:
    calm, noisy = BENCHMARK.HealthyRow("calm"), BENCHMARK.HealthyRow("noisy", warnings=["spike"] * 2)
    right = BENCHMARK.PlantedRow("case", 20, 20, ("2",), plain_step=23, step=20, layer="2")
    wrong = BENCHMARK.PlantedRow("case", 20, 20, ("2",), plain_step=23, step=23, layer=None)
    assert BENCHMARK.summarise([calm] * 30, [right] * 27 + [wrong] * 3)["missed"] == []
    assert BENCHMARK.summarise([calm, noisy], [right] * 24 + [wrong] * 6)["missed"] == ["warnings", "steps", "layers"]
    loud = BENCHMARK.HealthyRow("loud", errors=["spike"])
    known = BENCHMARK.PlantedRow("case", 20, 20, ("2",), plain_step=20, step=20, layer="2", problem="no NaN")
    assert BENCHMARK.summarise([loud], [known])["missed"] == ["errors", "plain_steps", "problems"]
