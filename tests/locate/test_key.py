"""When two failures are the same: `Failure.key` with the local rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.locate.kinds import Key
from reprokit.program import observe
from reprokit.program.observe import Copies
from reprokit.program.step import Step
from reprokit.rules.match import rule_fits, with_rule
from tests.locate.mechanisms import CASES
from tests.shrink.failing import INF, record


def key_of(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, first: str | None = None) -> Key:
    snapshot = record(call, x=x)
    return with_rule(snapshot.failure, Step.of(snapshot), first).key()


@pytest.mark.parametrize(
    ("call", "first", "second"),
    [
        (lambda x: x.std(), torch.ones(1), torch.ones(0)),
        (lambda x: x.exp(), torch.tensor([100.0]), torch.tensor([INF])),
        (lambda x: x / x, torch.zeros(2), torch.full((2,), INF)),
        (lambda x: x.log(), torch.tensor([-1.0]), torch.tensor([0.0])),
    ],
)
def test_the_same_call_may_fail_in_two_ways(
    call: Callable[[torch.Tensor], torch.Tensor], first: torch.Tensor, second: torch.Tensor
) -> None:
    assert key_of(call, first) == key_of(call, torch.cat([first, first])[: max(1, len(first))])
    assert key_of(call, first) != key_of(call, second)


def test_a_rule_that_still_fits_is_kept() -> None:
    assert key_of(lambda x: x.exp(), torch.tensor([100.0])).rule == "exp-overflow"
    assert key_of(lambda x: x.exp(), torch.tensor([100.0]), "overflow").rule == "overflow"


@pytest.mark.parametrize("name", ["repeated-eigenvalues", "exp-overflow", "std-of-one"])
def test_a_local_rule_is_part_of_the_key(name: str) -> None:
    snapshot = CASES[name]()
    assert with_rule(snapshot.failure, Step.of(snapshot)).key().rule == name


@pytest.mark.parametrize("most", [1 << 20, 3, 0])
def test_a_rule_is_asked_of_the_run_that_located_the_failure(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of another run where the copies of its calls would take too much memory."""
    monkeypatch.setattr(observe, "MOST_COPIED", most)
    snapshot = record(lambda x: x.exp().log().exp(), x=torch.tensor([100.0, 1.0]))
    step = Step.of(snapshot)
    trace = Copies(step.program, range(len(step.program.calls)))
    failure = locate(step.program, step.tensors, observer=trace)
    assert failure is not None and failure.call_index is not None
    assert trace.is_complete is (most > 3)
    assert rule_fits("exp-overflow", failure, step, trace)
    assert not rule_fits("log-of-negative", failure, step, trace)
