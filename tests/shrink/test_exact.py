"""What an origin makes in float64, and that a reduction keeps an overflow an overflow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.locate.domains import spectrum_of
from reprokit.shrink.exact import origin_of
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot
from tests.render.programs import record, snapshot_of
from tests.shrink import failing

F = torch.nn.functional


def reduced(snapshot: Snapshot) -> list[torch.Tensor]:
    """The inputs of the smallest program."""
    found = shrink(snapshot)
    return [found.tensors[item.value] for item in found.program.inputs]


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_a_variance_that_overflows_stays_a_variance(norm: str) -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)) * 1e20
    option: dict[str, Any] = {"training": True} if norm == "batch_norm" else {"use_input_stats": True}
    program, tensors = record(lambda: getattr(F, norm)(x.clone(), mean, variance, **option))
    first, *statistics = program.inputs
    buffers = (replace(item, role="buffer") for item in statistics)
    snapshot = snapshot_of((replace(program, inputs=(first, *buffers)), tensors))
    assert snapshot.failure.input_name is not None
    spread = [tensor for tensor in reduced(snapshot) if tensor.numel() > 1]
    assert len(spread) == 1 and bool((spread[0] != spread[0].flatten()[0]).any())


def test_a_sum_that_overflows_on_the_way_may_be_one_constant() -> None:
    x = torch.tensor([3e38, 3e38, -3e38, -1.0])
    (tensor,) = reduced(snapshot_of(record(lambda: x.clone().mean())))
    assert bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize(
    ("program", "is_overflow"),
    [
        (lambda: torch.full((2,), 100.0).exp(), True),
        (lambda: torch.full((2,), 1e20).square_(), True),
        (lambda: torch.full((2,), 3e38).mean(), False),
        (lambda: torch.full((2,), 1000.0, dtype=torch.float64).exp(), False),
        (lambda: torch.zeros(2).log(), False),
    ],
)
def test_overflow_is_a_matter_of_the_exact_result(program: Any, is_overflow: bool) -> None:
    calls, tensors = record(program)
    failure = locate(calls, tensors)
    assert failure is not None
    origin = origin_of(calls, tensors, failure)
    assert origin is not None and origin.is_overflow(failure) is is_overflow


@pytest.mark.parametrize(
    ("matrix", "name", "spectrum"),
    [
        (torch.eye(3).expand(2, 3, 3), "svd", "repeated"),
        (torch.zeros(4, 2), "svd", "zero"),
        (torch.eye(4), "eigh", "repeated"),
    ],
)
def test_a_smaller_matrix_fails_for_the_reason_of_the_larger_one(
    matrix: torch.Tensor, name: str, spectrum: str
) -> None:
    def step(x: torch.Tensor) -> None:
        sum(part.sum() for part in getattr(torch.linalg, name)(x)).backward()

    smaller = reduced(failing.record(step, x=matrix.clone().requires_grad_()))[0]
    assert smaller.numel() < matrix.numel() and spectrum_of(name, smaller) == spectrum
