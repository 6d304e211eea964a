"""What a tracer makes of arguments and writes that a program cannot hold as they are."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reprokit.program.interpreter import run
from reprokit.program.ir import Program
from reprokit.program.trace import Tracer, recording


class Reduction(str, enum.Enum):  # noqa: UP042 - what is seen in the wild
    """How a configuration names a reduction."""

    SUM = "sum"


class Axis(enum.IntEnum):
    """A number with a name."""

    LAST = -1


def drawn_by_a_generator(x: torch.Tensor) -> torch.Tensor:
    noise = torch.zeros(4)
    noise.normal_(generator=torch.Generator().manual_seed(1))
    return x * noise


def drawn_by_keyword(x: torch.Tensor) -> torch.Tensor:
    noise = torch.zeros(4)
    torch.nn.init.normal_(tensor=noise)
    return x * noise


STEPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: F.mse_loss(x, torch.zeros(4), reduction=Reduction.SUM),
    lambda x: F.mse_loss(x, torch.zeros(4), reduction=np.str_("sum")),
    lambda x: x.exp().softmax(Axis.LAST),
    lambda x: x.exp()[np.array([1, 3, 1])],
    lambda x: x.exp()[np.array([1, 3, 1], dtype=np.int8)],
    lambda x: x.reshape(2, 2)[np.arange(2), np.array([1, 0])],
    lambda x: x.exp()[np.array([True, False, True, False])],
    drawn_by_a_generator,
    drawn_by_keyword,
]


def traced(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Program, Tracer]:
    tracer = Tracer(lambda tensor: None)
    with recording(tracer):
        step(x).sum().backward()
    return tracer.program(), tracer


@pytest.mark.parametrize("step", STEPS)
def test_gradients_are_those_of_the_step(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([0.5, -1.25, 2.0, 0.75], requires_grad=True)
    program, tracer = traced(step, x)
    outcome = run(program, tracer.tensors)
    value = tracer.value_of(x)
    assert outcome.error is None and value is not None and x.grad is not None
    assert torch.equal(outcome.gradients[value], x.grad)
    assert not any(item.role == "opaque" for item in program.inputs)


def test_memory_that_nobody_wrote_is_taken_by_value() -> None:
    tracer = Tracer(lambda tensor: None)
    with recording(tracer):
        made = [torch.empty_strided((2, 2), (1, 2)), torch.ones(2).new_empty_strided((2,), (1,))]
    assert not any("empty" in call.name for call in tracer.calls)
    assert {tracer.value_of(tensor) for tensor in made} <= {item.value for item in tracer.inputs}
