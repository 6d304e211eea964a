"""What counts as the same failure, and what a reducer must not slip to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.shrink.signature import Signature, given_by, is_clean, same

INF, NAN = float("inf"), float("nan")


def one_call(target: str, *args: Any, **kwargs: Any) -> Program:
    count = sum(isinstance(argument, Ref) for argument in args)
    call = Call(target, args, kwargs, Ref(9))
    return Program((call,), tuple(Input(n, f"x{n}") for n in range(count)), (Ref(9),))


def signature(program: Program, *tensors: torch.Tensor) -> Signature:
    failure = locate(program, dict(enumerate(tensors)))
    assert failure is not None
    return Signature.of(failure, program)


def test_kind_and_origin_count() -> None:
    division = one_call("torch.div", Ref(0), Ref(1))
    zero, one = torch.zeros(1), torch.ones(1)
    assert same(signature(division, zero, zero), signature(division, zero[0], zero[0]))
    assert not same(signature(division, zero, zero), signature(division, one, zero))
    assert not same(signature(division, one, zero), signature(one_call("torch.log", Ref(0)), zero))


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [((2, 3), (4, 5), True), ((2, 3), (4, 3), True), ((2, 3), (2, 3, 4), False)],
)
def test_exceptions_are_compared_without_their_numbers(
    first: tuple[int, ...], second: tuple[int, ...], is_same: bool
) -> None:
    program = one_call("torch.linalg.inv", Ref(0))
    matrix = signature(program, torch.zeros(first))
    other = signature(program, torch.zeros(second) if is_same else torch.zeros(2, 2))
    assert same(matrix, other) == is_same


@pytest.mark.parametrize(
    ("values", "phase", "role", "clean"),
    [
        ([1.0], "forward", "batch", True),
        ([-INF], "forward", "batch", True),
        ([NAN], "forward", "batch", False),
        ([INF], "forward", "batch", True),
        ([INF], "backward", "gradient", False),
        ([NAN], "backward", "batch", False),
        ([-INF], "backward", "batch", True),
    ],
)
def test_inputs_must_not_be_bad_already(values: list[float], phase: str, role: str, clean: bool) -> None:
    program = Program((Call("torch.exp", (Ref(0),), outputs=Ref(9)),), (Input(0, "x", role),), (Ref(9),))
    wanted = Signature(phase, "nan", "torch.exp")
    assert is_clean(program, {0: torch.tensor(values)}, wanted, frozenset({"nan"}), frozenset()) == clean


def test_what_was_bad_in_the_snapshot_may_stay_bad() -> None:
    """A missing label, a ruined parameter, an infinity that the origin is told to fill in."""
    program = Program(
        (Call("torch.where", (Ref(1), Ref(0), NAN), outputs=Ref(9)),), (Input(0, "batch"), Input(1, "mask")), (Ref(9),)
    )
    mask = torch.tensor([True, False])
    given = given_by(program, {0: torch.tensor([NAN, 1.0]), 1: mask})
    assert given == {(0, "nan"), ("torch.where", "nan")}
    wanted = Signature("backward", "nan", "torch.pow")
    for value, clean in ((NAN, True), (INF, True), (1.0, True)):
        tensors = {0: torch.tensor([value, value]), 1: mask}
        assert is_clean(program, tensors, wanted, frozenset({"nan"}), given) == clean
    other = replace(program, inputs=(Input(7, "batch"), Input(1, "mask")))
    assert not is_clean(other, {7: torch.tensor([NAN, 1.0]), 1: mask}, wanted, frozenset({"nan"}), given)
