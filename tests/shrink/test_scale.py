"""The work does not grow with the program: the origin is known, so the rest is cut off at once."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.shrink import failing
from tests.shrink.failing import minimum_of


def long_step(length: int) -> failing.Snapshot:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for number in range(length):
            x = torch.tanh(F.linear(x, weight)) + x * 0.5
            if number == length // 2:
                x = x / F.relu(x - x.max()).sum()
        return x.sum()

    return failing.record(step, x=failing.seeded(8, 16), weight=failing.seeded(16, 16))


def test_checks_are_the_same_at_any_length() -> None:
    reductions = [minimum_of(long_step(length)) for length in (10, 100)]
    assert len({reduction.checks for reduction in reductions}) == 1
    assert reductions[0].checks <= 15
    assert [reduction.before.calls for reduction in reductions] == [46, 406]
    assert {reduction.program.num_calls for reduction in reductions} == {1}
