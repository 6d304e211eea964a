"""The contract of a pass: on toy problems without torch for how it searches, on recorded steps for what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.program.step import Step
from reprokit.shrink import reducer
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.order import is_smaller
from reprokit.shrink.problem import Problem
from reprokit.shrink.reducer import PASSES, shrink
from reprokit.snapshot.format import Snapshot
from tests.shrink import failing
from tests.shrink.views import Lines

Pass = Callable[[Problem], None]


# -- passes, on recorded steps -------------------------------------------------------------------------------------


@contextmanager
def only(name: str, run_pass: Pass) -> Iterator[None]:
    """A reducer that begins with the whole step and has one pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "cuts", lambda candidate, failure: iter(()))
        patch.setattr(reducer, "slice_to", lambda candidate, failure: None)
        patch.setattr(reducer, "PASSES", ((name, run_pass),))
        yield


def run_once(snapshot: Snapshot, name: str, run_pass: Pass) -> tuple[Step, Step, list[str]]:
    """The candidates before and after a pass was run once, and the checks it made."""
    found: list[Step] = []

    def first_time(problem: Problem) -> None:
        if not found:
            found.append(problem.best)
            run_pass(problem)
            found.append(problem.best)
            assert problem.oracle.check(problem.best) is Ruling.SAME

    view = Lines()
    with only(name, first_time):
        shrink(snapshot, view=view)
    return found[0], found[1], view.checks


UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.relu,
    torch.sqrt,
    torch.log,
    torch.exp,
    lambda x: x * 3.25,
    lambda x: x - x.mean(),
    lambda x: x / x.sum(),
    lambda x: torch.clamp(x, -100.0, 1e30),
    lambda x: torch.softmax(x, -1),
    lambda x: x @ x.transpose(-1, -2),
    lambda x: x.std(0, keepdim=True),
]


@st.composite
def failing_steps(draw: st.DrawFn) -> Snapshot:
    """A chain of functions that goes wrong, perhaps in half precision, perhaps backward."""
    chain = draw(st.lists(st.sampled_from(range(len(UNARY))), min_size=2, max_size=6))
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.float64]))
    is_backward = draw(st.booleans())
    x = (failing.seeded(*shape) * draw(st.sampled_from([0.0, 1.0, 300.0]))).to(dtype).requires_grad_(is_backward)

    def step(x: torch.Tensor) -> torch.Tensor:
        for number in chain:
            x = UNARY[number](x)
        total = x.log().sum()
        if is_backward:
            total.backward()
        return total.detach() if is_backward else total

    try:
        return failing.record(step, x=x)
    except AssertionError:  # nothing goes wrong: then it does without the chain
        return failing.record(lambda x: (x * 0.0).log().sum(), x=x.detach())


each_pass = pytest.mark.parametrize(("name", "run_pass"), PASSES, ids=[name for name, _ in PASSES])


@each_pass
@settings(max_examples=5)
@given(snapshot=failing_steps())
def test_a_pass_keeps_the_failure_never_grows_and_is_deterministic(
    name: str, run_pass: Pass, snapshot: Snapshot
) -> None:
    before, after, log = run_once(snapshot, name, run_pass)
    assert not is_smaller(before, after)
    again_before, again, again_log = run_once(snapshot, name, run_pass)
    assert (again_before.digest, again.digest, again_log) == (before.digest, after.digest, log)


def test_leaves_that_do_not_matter_go_with_few_checks() -> None:
    """A bad gradient needs two of sixteen weights: one to arrive at, one that keeps the product on the graph."""
    weights = {f"w{number}": torch.full((), 0.5, requires_grad=True) for number in range(16)}

    def step(x: torch.Tensor, **weights: torch.Tensor) -> None:
        total = x.sqrt().sum()
        for weight in weights.values():
            total = total + weight.tanh()
        total.backward()

    snapshot = failing.record(step, x=torch.zeros(2, requires_grad=True), **weights)
    _, after, log = run_once(snapshot, "setting", dict(PASSES)["setting"])
    assert [item.name for item in after.program.inputs if item.requires_grad] == ["x"]
    assert sum(entry[0].startswith("gradients for") for entry in log) <= 2
