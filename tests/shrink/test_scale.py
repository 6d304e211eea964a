"""The work does not grow with the program, and cutting finds the origin wherever it is."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from reprokit.shrink.reducer import shrink
from tests.shrink import failing


def long_step(length: int) -> failing.Snapshot:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for number in range(length):
            x = torch.tanh(F.linear(x, weight)) + x * 0.5
            if number == length // 2:
                x = x / F.relu(x - x.max()).sum()
        return x.sum()

    return failing.record(step, x=failing.seeded(8, 16), weight=failing.seeded(16, 16))


def test_checks_are_the_same_at_any_length() -> None:
    reductions = [shrink(long_step(length)) for length in (10, 50, 200)]
    assert len({reduction.checks for reduction in reductions}) == 1
    assert reductions[0].checks <= 15
    assert [reduction.before["calls"] for reduction in reductions] == [46, 206, 806]
    assert {reduction.program.num_calls for reduction in reductions} == {1}


def test_what_cannot_be_cut_is_still_reduced() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        hidden = x
        for _ in range(6):
            hidden = torch.tanh(F.linear(hidden, weight))
        scale = torch.exp(weight.sum() * 0) * 60000
        for _ in range(2):
            ((weight * scale).sum() + hidden.sum() * 0).backward(retain_graph=True)

    x, weight = torch.zeros(3, 4).half(), torch.zeros(4, 4).half().requires_grad_()
    snapshot = failing.record(step, x=x, weight=weight)
    assert snapshot.failure.backward_node == "AccumulateGrad"
    reduction = shrink(snapshot)
    assert reduction.one_minimal
    assert reduction.program.num_calls <= 3
    assert reduction.summary()["elements"] <= 4
