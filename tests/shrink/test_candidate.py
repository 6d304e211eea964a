"""The order of candidates, how plain values are, and verdicts that are remembered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Mode, Program, Ref
from reprokit.shrink.candidate import Candidate, _digest_of
from reprokit.shrink.checks.recorded import NonfiniteCheck
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import Task
from reprokit.shrink.oracle import Oracle, OutOfBudget
from reprokit.shrink.plainness import ANY, CONSTANT, ONES, SHORT, ZEROS, num_digits, plainness, shortened
from reprokit.shrink.signature import Signature, Verdict

HALF = torch.float16


def candidate(*numbers: float, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Candidate:
    tensor = torch.tensor(numbers, dtype=dtype)
    program = Program((Call("torch.log", (Ref(0),), outputs=Ref(1)),), (Input(0, "x"),), (Ref(1),))
    return Candidate(program, {0: tensor if shape is None else tensor.reshape(shape)})


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (candidate(7.31), candidate(0.0, 0.0)),
        (candidate(7.31, shape=()), candidate(0.0)),
        (candidate(7.31), candidate(0.0, dtype=HALF)),
        (candidate(0.0), candidate(1.0)),
        (candidate(1.0), candidate(3.0)),
        (candidate(3.0), candidate(3.1)),
        (candidate(300.0), candidate(6e4)),
        (candidate(1.0), candidate(-1.0)),
        (candidate(0.0), candidate(-0.0)),
        (candidate(7.31, 7.31), candidate(1.0, 2.0)),
        (candidate(1.0, 2.0), candidate(1.2345, 2.0)),
    ],
)
def test_what_is_smaller(smaller: Candidate, larger: Candidate) -> None:
    assert smaller.is_smaller_than(larger)


def test_calls_and_settings_outweigh_values() -> None:
    one = candidate(7.31)
    (call,) = one.program.calls
    longer = Program((call, Call("torch.exp", (Ref(1),), outputs=Ref(2))), one.program.inputs, (Ref(2),))
    assert one.is_smaller_than(Candidate(longer, {0: torch.zeros(1)}))
    cast = Program((Call("torch.log", (Ref(0),), outputs=Ref(1), mode=Mode(autocast=(("cpu", "torch.float16"),))),),
                   one.program.inputs, (Ref(1),))  # fmt: skip
    assert candidate(7.31, dtype=HALF).is_smaller_than(Candidate(cast, {0: torch.zeros(1)}))


@pytest.mark.parametrize(
    ("tensor", "level"),
    [
        (torch.zeros(3), ZEROS),
        (torch.ones(3, dtype=torch.int64), ONES),
        (torch.full((2,), -float("inf")), CONSTANT),
        (torch.tensor([1.5, 2.0]), SHORT),
        (torch.tensor([1.5, 2.123456]), ANY),
        (torch.empty(0), ZEROS),
        (torch.full((2,), float("nan")), CONSTANT),
    ],
)
def test_levels_of_plainness(tensor: torch.Tensor, level: float) -> None:
    assert level <= plainness(tensor) < level + 1


@given(st.floats(width=16, allow_nan=False, allow_infinity=False), st.integers(1, 16))
def test_rounding_never_needs_more_digits(number: float, digits: int) -> None:
    short = shortened(number, digits, torch.float16)
    assert num_digits(short, HALF) <= max(digits, num_digits(number, HALF)) or abs(short) > 60000


def test_the_digest_sees_all_that_matters() -> None:
    base = candidate(1.0, 2.0)
    same_again = candidate(1.0, 2.0)
    others = [candidate(1.0, 2.5), candidate(1.0, 2.0, shape=(2, 1)), candidate(1.0, 2.0, dtype=HALF)]
    assert base.digest == same_again.digest
    assert len({other.digest for other in (base, *others)}) == 4


def oracle(**options: object) -> tuple[Oracle, list[Candidate]]:
    runs: list[Candidate] = []

    def runner(tried: Candidate) -> Failure | None:
        runs.append(tried)
        number = float(tried.tensors[0][0])
        if number == 3:
            raise RuntimeError("a crash")
        kinds = {0: ("nan", "torch.log"), 1: None, 2: ("inf", "torch.log"), 4: ("exception", "torch.log")}
        found = kinds[int(number)]
        return Failure("forward", found[0], call=found[1]) if found else None

    check = NonfiniteCheck(Signature("forward", "nan", "torch.log"))
    made = Oracle(check, Isolation(Task(runner)), **options)  # type: ignore[arg-type]
    return made, runs


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(0, Verdict.SAME), (1, Verdict.PASSES), (2, Verdict.OTHER), (3, Verdict.INVALID), (4, Verdict.INVALID)],
)
def test_four_verdicts(number: float, verdict: Verdict) -> None:
    made, _ = oracle()
    assert made.check(candidate(number)) is verdict
    assert made.checks == 1


def test_nothing_is_run_twice() -> None:
    made, runs = oracle()
    assert made.check(candidate(0)) is made.check(candidate(0))
    assert (made.checks, len(runs)) == (1, 1)


def test_a_candidate_that_is_bad_from_the_start_is_never_run() -> None:
    made, runs = oracle()
    assert made.check(candidate(float("nan"))) is Verdict.OTHER
    assert (made.checks, runs) == (0, [])


def test_budgets() -> None:
    made, _ = oracle(max_checks=1)
    made.check(candidate(0))
    with pytest.raises(OutOfBudget):
        made.check(candidate(1))
    made, _ = oracle(max_time=0.0)
    with pytest.raises(OutOfBudget):
        made.check(candidate(0))


def test_a_tensor_that_was_written_has_another_digest() -> None:
    with torch.inference_mode():
        unversioned = torch.zeros(3)
    for tensor in (torch.zeros(3), unversioned):
        before = _digest_of(tensor)
        assert _digest_of(tensor) == before
        with torch.inference_mode():
            tensor.add_(1)
        assert _digest_of(tensor) != before
