"""The context: which piece of a model it is, that it fails the same way, and that its inputs are ordinary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from reprokit.locate.blame import locate
from reprokit.program.sites import variables
from reprokit.program.step import Step
from reprokit.shrink.apart import Task
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.context.finder import find_context
from reprokit.shrink.context.growth import is_ordinary
from reprokit.shrink.context.tree import Context, Tree
from reprokit.shrink.isolation import Isolation
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.plainness import seed_of
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import load
from reprokit.shrink.signature import Signature, same
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


def classes(tree: Tree) -> list[str]:
    return [block.scope.cls for block in tree.root.blocks() if block is not tree.root]


@pytest.mark.parametrize("step", CASES)
def test_a_context_fails_the_same_way_with_ordinary_inputs(step: Callable[[], Snapshot]) -> None:
    snapshot = step()
    context = found_for(step)
    failure = locate(context.program, context.tensors)
    assert failure is not None
    assert same(Signature.of(failure, context.program), Signature.of(snapshot.failure, snapshot.program))
    assert context.is_ordinary
    assert all(is_ordinary(tensor) for tensor in context.tensors.values())
    assert context.program.num_calls <= snapshot.program.num_calls


def test_growth_is_followed_upstream_and_layers_are_dropped() -> None:
    snapshot = models.growing()
    assert not is_ordinary(locate_input(snapshot))
    context = found_for(models.growing)
    names = [call.name for call in context.program.calls]
    assert names[-1] == "exp"
    assert "mul" in names, "the factor that makes the numbers grow is shown"
    assert context.program.num_calls < 15


def locate_input(snapshot: Snapshot) -> torch.Tensor:
    """What the origin was given."""
    from reprokit.shrink.recording import record

    index = snapshot.failure.call_index
    assert index is not None
    recording = record(Step.of(snapshot), frozenset((index,)))
    return next(tensor for (at, _), tensor in recording.inputs.items() if at == index)


def test_the_module_of_the_origin_is_kept_and_the_others_go() -> None:
    tree = found_for(models.masked_attention).tree
    assert classes(tree) == ["MaskedAttention", "Linear", "Linear"]
    assert tree.num_modules == 1


def test_layers_of_torch_stay_layers() -> None:
    context = found_for(models.torch_attention)
    (block,) = context.tree.layers()
    layer = block.layer
    assert layer is not None
    assert (layer.cls, set(layer.keywords)) == ("MultiheadAttention", {"key_padding_mask"})
    assert layer.options == {"batch_first": True}
    weights = dict(layer.build().named_parameters())
    assert {name: weights[name].shape for name in weights} == {
        n: context.tensors[v].shape for n, v in layer.state.items()
    }


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


def test_functions_of_the_loop_are_functions() -> None:
    assert classes(found_for(models.constant_batch).tree) == ["centred"]


def test_what_is_not_ordinary_anywhere_is_said() -> None:
    context = found_for(models.huge_input)
    assert not context.is_ordinary


def test_randomness_that_matters_comes_from_a_seed() -> None:
    context = context_of(models.dropped())
    (call,) = (call for call in context.program.calls if call.name == "dropout")
    assert call.mode.rng is not None
    assert seed_of(context.tensors[call.mode.rng.value]) is not None


def test_a_chain_of_layers_stays_one() -> None:
    tree = context_of(models.convolutional()).tree
    assert classes(tree) == ["Convolutional", "Sequential", "Conv2d", "BatchNorm2d", "ReLU"]


def test_an_exponent_is_no_index_and_a_layer_that_the_loop_calls_stays() -> None:
    context = context_of(models.looked_up_pair())
    assert [block.scope.cls for block in context.tree.layers()] == ["Embedding"]
    constants = {call.name: call.args[1:] for call in context.program.calls if call.name in ("pow", "__setitem__")}
    assert constants == {"pow": (2,), "__setitem__": (0, 49)}


def test_kernels_keep_their_size() -> None:
    context = context_of(models.odd_image())
    (layer,) = (block.layer for block in context.tree.layers() if block.layer is not None)
    assert layer.cls == "ConvTranspose2d" and layer.arguments[2] == 2
    (pool,) = (call for call in context.program.calls if call.name == "max_pool2d")
    assert pool.args[1:] == (2,)


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


def test_the_same_snapshot_gives_the_same_context() -> None:
    first, second = (found_for(models.growing) for _ in range(2))
    assert first.candidate.digest == second.candidate.digest
    assert first.checks == second.checks


def test_a_context_survives_the_file(tmp_path: Path) -> None:
    reduction = shrink(models.masked_attention())
    reduction.save(tmp_path / "reduction.pt")
    read = load(tmp_path / "reduction.pt").context
    assert read is not None and reduction.context is not None
    assert read.candidate.digest == reduction.context.candidate.digest
    assert (read.checks, read.is_ordinary, read.drawn) == (reduction.context.checks, True, ())


def test_the_context_costs_the_minimum_no_checks() -> None:
    reduction = shrink(models.masked_attention())
    assert reduction.context is not None
    assert reduction.checks == sum(reduction.verdicts.values())
    assert reduction.program.num_calls < reduction.context.program.num_calls


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_masks_of_a_model_do_not_become_the_cause(is_hidden: bool) -> None:
    context = context_of(models.causal(is_hidden=is_hidden))
    values = {item.name: context.tensors[item.value] for item in context.program.inputs}
    assert not (values["mask"] == float(is_hidden)).all(-1).any(), "no row is hidden by the causal mask alone"
    assert values["pad"].any() and values["x"].numel() < 20


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (nn.Embedding(4, 3), torch.tensor([1, 7])),
        (nn.BatchNorm1d(3), torch.ones(1, 3)),
        (nn.Conv1d(2, 4, 3), torch.ones(1, 5, 9)),
        (nn.Linear(4, 3), torch.ones(2, 5)),
    ],
)
def test_a_layer_that_raises_is_shown_as_that_layer(layer: nn.Module, batch: torch.Tensor) -> None:
    model = nn.Sequential(nn.Identity(), layer)
    tree = context_of(models.record_model(model, lambda x: model(x), x=batch)).tree
    assert [block.scope.cls for block in tree.layers()] == [type(layer).__name__]
    assert all(call.scope for call in tree.program.calls)
