"""What counts as the same failure, and what a reducer must not slip to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reprokit.locate.domains import spectrum_of
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink.checks.check import given_by
from reprokit.shrink.checks.recorded import NonfiniteCheck
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot
from tests.render.programs import record, snapshot_of
from tests.shrink import failing

F = torch.nn.functional
INF, NAN = float("inf"), float("nan")


def test_addresses_and_numbers_in_messages_do_not_count() -> None:
    failure = failing.singular_matrix().failure
    first, second = (
        replace(failure, exception=("TypeError", f"<object at {address}> of size {size}"))
        for address, size in (("0x7f00a1", "(2, 3)"), ("0x5e00b2", "(4, 5)"))
    )
    assert first.key() == second.key() != failure.key()


@pytest.mark.parametrize(
    ("values", "role", "allowed"),
    [([1.0], "batch", True), ([-INF], "batch", True), ([NAN], "batch", False), ([INF], "gradient", False)],
)
def test_inputs_must_not_be_bad_already(values: list[float], role: str, allowed: bool) -> None:
    program = Program((Call("torch.exp", (Ref(0),), outputs=Ref(9)),), (Input(0, "x", role),), (Ref(9),))
    check = NonfiniteCheck(forbidden=frozenset({"nan"}))
    assert check.allows(Step(program, {0: torch.tensor(values)})) == allowed


def test_what_was_bad_in_the_snapshot_may_stay_bad() -> None:
    """A missing label, a ruined parameter, an infinity that the origin is told to fill in."""
    program = Program(
        (Call("torch.where", (Ref(1), Ref(0), NAN), outputs=Ref(9)),), (Input(0, "batch"), Input(1, "mask")), (Ref(9),)
    )
    step = Step(program, {0: torch.tensor([NAN, 1.0]), 1: torch.tensor([True, False])})
    given = given_by(step)
    assert given == {(0, "nan"), ("torch.where", "nan")}
    assert NonfiniteCheck(given=given).allows(step)
    other = replace(program, inputs=(Input(7, "batch"), Input(1, "mask")))
    assert not NonfiniteCheck(given=given).allows(Step(other, {7: step.tensors[0], 1: step.tensors[1]}))


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
    ("matrix", "name", "spectrum"),
    [(torch.eye(3).expand(2, 3, 3), "svd", "repeated"), (torch.zeros(4, 2), "svd", "zero")],
)
def test_a_smaller_matrix_fails_by_the_rule_of_the_larger_one(matrix: torch.Tensor, name: str, spectrum: str) -> None:
    def step(x: torch.Tensor) -> None:
        sum(part.sum() for part in getattr(torch.linalg, name)(x)).backward()

    smaller = reduced(failing.record(step, x=matrix.clone().requires_grad_()))[0]
    assert smaller.numel() < matrix.numel() and spectrum_of(name, smaller) == spectrum
