"""The bad value behind an exception: what makes a call raise, and what does not."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from reprokit.capture.failure_text import cause_line
from reprokit.grammar import plain_of, read
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program
from reprokit.program.trace import InputName, Tracer
from reprokit.render.expectation import expect
from reprokit.render.facts import of_failure
from reprokit.shrink.reducer import shrink
from tests.render.programs import snapshot_of

F = torch.nn.functional
ZEROS, ONES = torch.zeros(3, 3), torch.ones(3, 3)
MASK = torch.zeros(3, 3, dtype=torch.bool)


def recorded(step: Any) -> tuple[Program, Tensors]:
    """The program of a step that may raise."""
    tracer = Tracer(lambda tensor: None)
    with tracer, contextlib.suppress(RuntimeError, IndexError):
        step()
    return tracer.program(), tracer.tensors


def nan() -> torch.Tensor:
    return ZEROS.clone() / ZEROS.clone()


@pytest.mark.parametrize(
    ("step", "kind", "call"),
    [
        (lambda: F.binary_cross_entropy(nan().sigmoid(), ONES), "nan", "torch.Tensor.div"),
        (lambda: torch.multinomial(torch.softmax(ONES.clone() / 0.0, -1), 1), "inf", "torch.Tensor.div"),
        (lambda: torch.linalg.eigh(nan() + 1), "nan", "torch.Tensor.div"),
        (lambda: torch.linalg.cholesky(torch.log(ZEROS.clone())), "inf", "torch.log"),
        (lambda: torch.bernoulli(torch.sqrt(-ONES.clone())), "nan", "torch.sqrt"),
    ],
)
def test_the_value_without_which_a_call_does_not_raise_is_named(step: Any, kind: str, call: str) -> None:
    found = locate(*recorded(step))
    assert found is not None and found.kind == "exception" and found.cause is not None
    assert (found.cause.kind, found.cause.call) == (kind, call)
    assert read(Failure, plain_of(found)) == found


@pytest.mark.parametrize(
    "step",
    [
        lambda: F.binary_cross_entropy(ONES * 2, ONES),
        lambda: nan() @ torch.ones(4, 4),
        lambda: torch.zeros(3).masked_fill(MASK[0], -torch.inf) + torch.ones(4),
        lambda: F.cross_entropy(nan(), torch.tensor([0, 1, 7])),
        lambda: torch.linalg.cholesky(-torch.eye(3)),
    ],
)
def test_a_bad_value_that_changes_nothing_is_not_blamed(step: Any) -> None:
    found = locate(*recorded(step))
    assert found is not None and found.kind == "exception" and found.cause is None


def test_the_cause_is_shown_and_stays_in_the_reduction() -> None:
    program, tensors = recorded(lambda: F.binary_cross_entropy((nan() * 3).sigmoid(), ONES))
    snapshot = snapshot_of((program, dict(tensors)))
    found = expect(snapshot)
    assert found.words == "because of nan from division" and found.owner == "own"
    assert "come from `torch.Tensor.div`" in found.remark and "as it does with finite numbers" in found.expected
    assert dict(of_failure(snapshot))["because of"].startswith("nan from `torch.Tensor.div`")
    assert str(cause_line(snapshot.summary())).startswith("because of nan from `torch.Tensor.div`")
    reduced = [call.name for call in shrink(snapshot).program.calls]
    assert len(reduced) == 2 and reduced[1] == "binary_cross_entropy"


@pytest.mark.parametrize(
    ("role", "step", "words"),
    [
        ("parameter", 0, "because of inf in the parameter `weight`, bad before the first step"),
        ("parameter", 2, "because of inf in `weight`"),
        ("batch", 0, "because of inf in `weight`"),
    ],
)
def test_a_parameter_behind_an_exception_that_training_began_with_is_named_as_that(
    role: str, step: int, words: str
) -> None:
    weight = torch.tensor([torch.inf, 0.0])
    tracer = Tracer(lambda tensor: InputName("weight", role) if tensor is weight else None)
    with tracer, contextlib.suppress(RuntimeError):
        F.binary_cross_entropy(weight * ONES[0, :2], ONES[0, :2])
    snapshot = replace(snapshot_of((tracer.program(), dict(tracer.tensors))), step=step)
    assert str(cause_line(snapshot.summary())).startswith(words)
    assert str(cause_line(snapshot.summary())).count("first step") == words.count("first step")
