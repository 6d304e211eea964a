"""Explaining a result: what is free, what matters, and the nearest variant that passes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from reprokit.locate.blame import locate
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.shrink import explain as explaining
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.explain import Nearest
from reprokit.shrink.leaves import leaves, with_leaf
from reprokit.shrink.reduction import Reduction
from tests.shrink import failing
from tests.shrink.failing import minimum_of
from tests.shrink.views import Lines


def passes(program: Program, tensors: dict[int, torch.Tensor]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return locate(program, tensors) is None


def with_nearest(reduction: Reduction) -> tuple[Program, dict[int, torch.Tensor]]:
    """The nearest variant, made from its description alone."""
    nearest = reduction.nearest
    assert nearest is not None
    program, tensors = reduction.program, dict(reduction.tensors)
    if nearest.input is not None:
        item = next(item for item in program.inputs if item.name == nearest.input)
        changed = tensors[item.value].clone()
        assert changed[nearest.element].item() == pytest.approx(nearest.from_, nan_ok=True)
        changed[nearest.element] = nearest.to
        return program, {**tensors, item.value: changed}
    calls = list(program.calls)
    for index, call in enumerate(calls):
        for path, leaf in leaves(call):
            if call.target == nearest.call and leaf == nearest.from_:
                calls[index] = with_leaf(call, path, nearest.to)
                return Program(tuple(calls), program.inputs, program.outputs, program.modules), tensors
    raise AssertionError("the constant is not in the program")


def assert_explained(reduction: Reduction) -> None:
    """Claim that the nearest variant passes, and that free inputs are free: of every result of `test_reducer`."""
    if reduction.nearest is not None:
        assert passes(*with_nearest(reduction))
    for item, entry in zip(reduction.program.inputs, reduction.explain, strict=True):
        tensor = reduction.tensors[item.value]
        if entry.free and tensor.is_floating_point():
            for number in (0.25, 3.0):  # values that were not tried
                assert not passes(reduction.program, {**reduction.tensors, item.value: torch.full_like(tensor, number)})
    assert reduction.explain_checks <= explaining.MAX_RUNS


def nearest_of(reduction: Reduction) -> Nearest:
    assert reduction.nearest is not None
    return reduction.nearest


def test_the_border_of_an_overflow_is_found() -> None:
    nearest = nearest_of(minimum_of(failing.where_gradient()))
    assert nearest.from_ == 100.0
    assert 87.0 <= nearest.to <= 88.73  # the largest number whose exponential float32 holds is 88.72


def test_a_constant_that_matters_is_named_with_its_border() -> None:
    reduction = minimum_of(failing.label_smoothing())
    (constant,) = reduction.constants
    assert (constant.argument, constant.value, constant.free) == ("label_smoothing", 0.2, False)


def test_a_constant_that_does_not_matter_is_free() -> None:
    reduction = minimum_of(failing.in_place_gradient())
    assert [(item.value, item.free) for item in reduction.constants] == [(1.0, True)]


def test_a_whole_number_that_is_zero_is_varied_too() -> None:
    reduction = minimum_of(failing.record(lambda x, y: x / y, x=torch.zeros(2), y=torch.zeros(2, dtype=torch.int64)))
    assert [(item.free, item.tried) for item in reduction.explain] == [(False, False), (False, None)]  # 1 / 0 is inf
    nearest = nearest_of(reduction)
    assert (nearest.from_, nearest.to) == (0, 1)


def test_a_whole_number_that_decides_is_varied_and_its_neighbour_passes() -> None:
    def step(scores: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores, torch.ones(1, 4, dtype=torch.int64), (4,), (4,))  # equal labels need 7 frames

    reduction = minimum_of(failing.record(step, scores=torch.zeros(4, 1, 2).log_softmax(-1)))
    assert {item.argument: item.free for item in reduction.constants}["target_lengths"] is False
    nearest = nearest_of(reduction)
    assert isinstance(nearest.to, int) and nearest.to < nearest.from_


@pytest.mark.parametrize("number", [-1.0, 1e-30])
def test_the_nearest_variant_has_an_ordinary_number(number: float) -> None:
    reduction = minimum_of(failing.record(lambda x: (x - number).reciprocal().sum(), x=torch.tensor([number])))
    nearest = reduction.nearest
    assert nearest is None or nearest.to == 0 or abs(nearest.to) >= 1e-3, nearest


def test_without_a_budget_nothing_is_claimed() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.softmax(x.masked_fill(mask, -failing.INF), dim=-1).sum()

    program = failing.record(step, x=failing.seeded(3), mask=torch.ones(3, dtype=torch.bool))
    reduction = minimum_of(program, max_checks=0)
    items = {item.input: item for item in reduction.explain}
    assert set(items) == {"x", "mask"} and not reduction.one_minimal
    assert all(item.tried is False for item in items.values())  # that it matters is not known
    assert reduction.nearest is None


def test_a_run_that_raises_is_no_pass(tmp_path: Path) -> None:
    """Nor where the user's function does not see the failure in it."""
    (tmp_path / "large.py").write_text("def large(o):\n    return o.loss is not None and bool(o.loss > 0.5)\n")

    def step(logits: torch.Tensor, target: torch.Tensor) -> None:
        F.cross_entropy(logits, target).backward()

    snapshot = failing.traced(step, logits=torch.zeros(1, 2, requires_grad=True), target=torch.tensor([0]))
    whole = Step.of(snapshot)
    check = choose_check(f"{tmp_path / 'large.py'}:large", snapshot)
    found = check(whole)
    assert found is not None
    check = check.adopted(found, whole)
    target = next(item.value for item in whole.program.inputs if item.name == "target")
    out_of_bounds = whole.with_tensors({target: torch.tensor([2])})
    assert check.judge(check(out_of_bounds)) is Ruling.INVALID


def test_sizes_and_places_are_no_constants() -> None:
    reduction = minimum_of(failing.record(lambda x: x.log().sum(dim=0), x=torch.zeros(4)))
    assert reduction.constants == []


def test_explaining_is_bounded_and_booked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "MAX_RUNS", 3)
    view = Lines()
    reduction = minimum_of(failing.half_linear_overflow(), view=view)
    assert reduction.explain_checks == sum(line.startswith("variant ") for line in view.shown) == 3
    assert reduction.checks == sum(reduction.verdicts.values())
    assert reduction.one_minimal
