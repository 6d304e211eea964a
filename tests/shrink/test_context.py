"""The context: which piece of a model it is, that it fails the same way, and that its inputs are ordinary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.program.sites import variables
from reprokit.program.step import Step
from reprokit.shrink.apart import Isolation, Task
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.context.finder import Context, find_context
from reprokit.shrink.context.growth import is_ordinary
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.plainness import seed_of
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import load
from reprokit.snapshot.format import Snapshot
from tests.shrink import models

CASES = (
    models.growing,
    models.masked_attention,
    models.torch_attention,
    models.log_gradient,
    models.wrong_width,
    models.constant_batch,
)


def context_of(snapshot: Snapshot, max_checks: float = math.inf) -> Context:
    check = choose_check(None, snapshot)
    oracle = Oracle(check, Isolation(Task.of(check, snapshot.settings)), max_checks=max_checks)
    words = variables(snapshot.program.calls)
    found = find_context(Step.of(snapshot), snapshot.failure, oracle, words)
    assert found is not None
    return found


@functools.cache
def found_for(step: Callable[[], Snapshot]) -> Context:
    """The context of a case, searched for once."""
    return context_of(step())


@pytest.mark.parametrize("step", CASES)
def test_a_context_fails_the_same_way_with_ordinary_inputs(step: Callable[[], Snapshot]) -> None:
    snapshot = step()
    context = found_for(step)
    failure = locate(context.program, context.tensors)
    assert failure is not None
    assert failure.key() == snapshot.failure.key()
    assert context.is_ordinary
    assert all(is_ordinary(tensor) for tensor in context.tensors.values())
    assert context.program.num_calls <= snapshot.program.num_calls


def test_growth_is_followed_upstream_and_layers_are_dropped() -> None:
    context = found_for(models.growing)
    names = [call.name for call in context.program.calls]
    assert names[-1] == "exp"
    assert "mul" in names, "the factor that makes the numbers grow is shown"
    assert context.program.num_calls < 15


def test_a_gradient_keeps_what_leads_on_from_the_origin() -> None:
    context = found_for(models.log_gradient)
    names = [call.name for call in context.program.calls]
    assert names.index("log") < names.index("where")
    assert context.program.calls[-1].is_differentiation


@pytest.mark.parametrize("is_masked", [False, True])
def test_what_is_computed_beside_the_origin_goes(is_masked: bool) -> None:
    context = context_of(models.aggregates(is_masked=is_masked))
    names = [call.name for call in context.program.calls]
    assert ("where" in names) == is_masked
    assert not {"cat", "exp", "amax", "sigmoid"} & set(names)
    assert [item.name for item in context.program.inputs if item.role != "gradient"] == ["x"]


def test_what_is_not_ordinary_anywhere_is_said() -> None:
    context = found_for(models.huge_input)
    assert not context.is_ordinary


def test_randomness_that_matters_comes_from_a_seed() -> None:
    context = context_of(models.dropped())
    (call,) = (call for call in context.program.calls if call.name == "dropout")
    assert call.mode.rng is not None
    assert seed_of(context.tensors[call.mode.rng.value]) is not None


@pytest.mark.parametrize("step", [models.sparse_overflow, models.float8_weight])
def test_formats_that_do_not_compute_are_left_alone(step: Callable[[], Snapshot]) -> None:
    snapshot, context = step(), context_of(step())
    given = {item.name: snapshot.tensors[item.value] for item in snapshot.program.inputs}
    kept = {item.name: context.tensors[item.value] for item in context.program.inputs}
    odd = [name for name, t in given.items() if t.layout is not torch.strided or t.dtype.itemsize == 1]
    assert [(kept[name].layout, kept[name].dtype) for name in odd] == [(given[n].layout, given[n].dtype) for n in odd]


def test_a_spent_budget_gives_what_was_found() -> None:
    whole = found_for(models.masked_attention)
    early = context_of(models.masked_attention(), max_checks=2)
    assert early.checks == 2
    assert locate(early.program, early.tensors) is not None
    assert early.candidate.num_elements > whole.candidate.num_elements


def test_a_context_survives_the_file(tmp_path: Path) -> None:
    reduction = shrink(models.masked_attention())
    reduction.save(tmp_path / "reduction.pt")
    read = load(tmp_path / "reduction.pt").context
    assert read is not None and reduction.context is not None
    assert read.candidate.digest == reduction.context.candidate.digest
    assert (read.checks, read.is_ordinary) == (reduction.context.checks, True)


def test_the_context_costs_the_minimum_no_checks() -> None:
    reduction = shrink(models.masked_attention())
    assert reduction.context is not None
    assert reduction.checks == sum(reduction.verdicts.values())
    assert reduction.program.num_calls < reduction.context.program.num_calls


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_masks_of_a_model_do_not_become_the_cause(is_hidden: bool) -> None:
    context = context_of(models.causal(is_hidden=is_hidden))
    values = {item.name: context.tensors[item.value] for item in context.program.inputs}
    assert not (values["mask"] == float(is_hidden)).all(-1).any(), "no row is hidden by the causal mask alone"
    assert values["pad"].any() and values["x"].numel() < 20
