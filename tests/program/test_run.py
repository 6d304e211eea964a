"""Running a program leaves what it was given as it was, and copies no parameter that nothing writes into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from reprokit.program.interpreter import run
from reprokit.program.trace import InputName, Tracer, recording


def detached(weight: torch.Tensor) -> None:
    weight.detach().view(-1)[1:].clamp_(0.0, 0.5)


def without_gradients(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def in_a_list(weight: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)


def one_of_several(weight: torch.Tensor) -> None:
    with torch.no_grad():
        torch.unbind(weight)[1].zero_()


def as_result(weight: torch.Tensor) -> None:
    with torch.no_grad():
        torch.add(weight, 1.0, out=weight)


def by_position(weight: torch.Tensor) -> None:
    with torch.no_grad():
        F.relu(weight, True)


def replaced(weight: torch.Tensor) -> None:
    other = torch.zeros(2, 2)
    other.data = weight
    other += 1


WRITING = [detached, without_gradients, in_a_list, one_of_several, as_result, by_position, replaced]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("write", WRITING)
def test_parameters_are_not_written_into(write: Callable[[torch.Tensor], None], is_frozen: bool) -> None:
    weight = torch.tensor([[-1.0, 1.0], [-2.0, 2.0]], requires_grad=not is_frozen)
    kept = weight.detach().clone()
    tracer = Tracer(lambda tensor: InputName("weight", "parameter") if tensor is weight else None)
    with recording(tracer):
        write(weight)
    value = tracer.value_of(weight)
    assert value is not None and not torch.equal(weight, kept)
    assert torch.equal(tracer.tensors[value], kept)
    outcome = run(tracer.program(), tracer.tensors, keep=frozenset([value]))
    assert torch.equal(tracer.tensors[value], kept)
    assert torch.equal(outcome.values[value], weight)
