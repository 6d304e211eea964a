"""Locating costs as much as the step has calls: counted in calls of Python, which no other process changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.program.ir import OPAQUE, Call, Input, Program, Ref
from reprokit.program.trace import Tracer, recording
from reprokit.progress import Progress

Step = Callable[[int], None]


def hyperbolic(num_layers: int) -> None:
    """Every layer takes the root of a number of its own that is below zero, and so reads and makes NaN twice."""
    x = torch.ones(2, 3)
    for _ in range(num_layers):
        curvature = torch.full((), -1.0, requires_grad=True)
        norm = x.norm(dim=-1, keepdim=True)
        root = curvature**0.5
        x = root * torch.asinh(norm / root) * x / norm
        root = curvature**0.5
        x = root * torch.sinh(norm / root) * x / norm
    x.mean().backward()  # type: ignore[no-untyped-call]


def clipped_by_hand(num_layers: int) -> None:
    """The norm of all gradients is a sum, each term of which may be the origin."""
    parameters = [torch.ones(3, requires_grad=True) for _ in range(num_layers)]
    x = torch.ones(3)
    for parameter in parameters:
        x = torch.tanh(x * parameter)
    (x - x.detach()).abs().sqrt().sum().backward()
    total = torch.zeros(())
    for parameter in parameters:
        assert parameter.grad is not None
        total = total + parameter.grad.norm() ** 2
    for parameter in parameters:
        parameter.grad = parameter.grad / total.sqrt()  # type: ignore[operator]


def masked(num_layers: int) -> None:
    """Every layer makes infinities on purpose, and the last one of them a NaN."""
    scores = torch.zeros(4, 4, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for number in range(num_layers):
        is_last = number == num_layers - 1
        hidden = scores.masked_fill(mask | is_last, float("-inf"))
        scores = torch.softmax(hidden, -1) @ scores
    scores.mean().backward()  # type: ignore[no-untyped-call]


def recorded(step: Step, num_layers: int) -> tuple[Program, dict[int, torch.Tensor]]:
    tracer = Tracer(lambda _: None)
    with recording(tracer):
        step(num_layers)
    return tracer.program(), tracer.tensors


def num_calls_of_python(work: Callable[[], Any]) -> int:
    count = 0

    def counting(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("step", [hyperbolic, clipped_by_hand, masked])
def test_locating_twice_the_layers_takes_twice_the_work(step: Step) -> None:
    steps = [recorded(step, num_layers) for num_layers in (16, 32, 64)]
    assert all(locate(*one) is not None for one in steps)
    counts = [num_calls_of_python(lambda one=one: locate(*one)) for one in steps]  # type: ignore[misc]
    assert counts[1] < 2.3 * counts[0]
    assert counts[2] < 2.3 * counts[1]


def test_a_model_may_have_more_layers_than_python_has_frames() -> None:
    program, tensors = recorded(hyperbolic, sys.getrecursionlimit() // 4)
    failure = locate(program, tensors)
    assert failure is not None
    assert failure.call == "torch.Tensor.pow"
    assert failure.call_index == min(n for n, call in enumerate(program.calls) if "pow" in call.target)


def test_inputs_that_a_file_claims_to_be_made_of_each_other_end_the_search() -> None:
    calls = (
        Call(OPAQUE, (Ref(1),), {"name": "f", "source": ""}, (Ref(0),)),
        Call(OPAQUE, (Ref(0),), {"name": "g", "source": ""}, (Ref(1),)),
        Call("torch.Tensor.add", (Ref(0), Ref(1)), outputs=Ref(2)),
    )
    made = Program(calls, (Input(0, "x", "opaque"), Input(1, "y", "opaque")), (Ref(2),))
    failure = locate(made, {0: torch.full((2,), float("nan")), 1: torch.full((2,), float("nan"))})
    assert failure is not None
    assert failure.call is None
    assert failure.input_name in ("x", "y")


def test_progress_is_printed_after_five_seconds_and_then_at_twice_the_time() -> None:
    lines = list[str]()
    now = 100.0
    progress = Progress(lines.append, "locating", now=lambda: now)
    for second in range(25):
        now = 100.0 + second
        progress.at(second * 100, 2500)
    assert lines == [
        "locating ... (500 of 2,500 calls)",
        "locating ... (1,000 of 2,500 calls)",
        "locating ... (2,000 of 2,500 calls)",
    ]


def test_locating_reports_each_call() -> None:
    program, tensors = recorded(masked, 3)
    seen = list[tuple[int, int]]()

    class Counting(Progress):
        def at(self, done: int, total: int) -> None:
            seen.append((done, total))

    locate(program, tensors, progress=Counting(lambda _: None, "locating"))
    assert seen == [(n, len(program.calls)) for n in range(len(seen))]
    assert len(seen) > 3
