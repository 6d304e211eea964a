"""The context: which piece of a model it is, that it fails the same way, and that its inputs are ordinary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Input, Mode, ModuleNote, Program, Ref, Scope
from reprokit.program.statement import variables
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.context.changes import module_runs, with_certainty, without_call, without_module, without_unused
from reprokit.shrink.context.finder import find_context
from reprokit.shrink.context.growth import is_ordinary, moderate
from reprokit.shrink.context.layers import LayerRun, layer_of
from reprokit.shrink.context.piece import Context
from reprokit.shrink.context.tree import Tree, tree_of
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import Task
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.plainness import seed_of
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import load
from reprokit.shrink.signature import Signature, same
from reprokit.snapshot.format import Snapshot
from tests.render.programs import site_of
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
    found = find_context(Candidate(snapshot.program, snapshot.tensors), snapshot.failure, oracle, words)
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
    recording = record(Candidate(snapshot.program, snapshot.tensors), frozenset((index,)))
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


def test_calls_whose_results_nothing_uses_go() -> None:
    """In-place calls stay, for they may write through a view."""
    calls = (
        Call("torch.Tensor.exp", (Ref(0),), {}, Ref(1)),
        Call("torch.Tensor.__getitem__", (Ref(1), 0), {}, Ref(2)),
        Call("torch.Tensor.__getitem__", (Ref(0), 0), {}, Ref(3)),
        Call("torch.Tensor.zero_", (Ref(3),), {}, Ref(3)),
        Call("torch.Tensor.log", (Ref(0),), {}, Ref(4)),
    )
    program = Program(calls, (Input(0, "x"),), (Ref(4),))
    found = without_unused(Candidate(program, {0: torch.ones(2)}))
    assert [call.name for call in found.program.calls] == ["__getitem__", "zero_", "log"]


def test_the_gradient_of_a_sum_is_enough_with_plainer_numbers() -> None:
    context = context_of(models.zero_gradient())
    assert context.program.calls[-1].target == "torch.Tensor.backward"
    assert [item.role for item in context.program.inputs] == ["batch"]


def test_functions_of_the_loop_are_functions() -> None:
    assert classes(found_for(models.constant_batch).tree) == ["centred"]


def test_what_is_not_ordinary_anywhere_is_said() -> None:
    context = found_for(models.huge_input)
    assert not context.is_ordinary


def test_a_layer_that_does_not_matter_goes_though_its_module_begins_with_it() -> None:
    assert classes(context_of(models.layer_and_skip()).tree) == ["Ratio", "LayerAndSkip"]


def test_randomness_that_matters_comes_from_a_seed() -> None:
    context = context_of(models.dropped())
    (call,) = (call for call in context.program.calls if call.name == "dropout")
    assert call.mode.rng is not None
    assert seed_of(context.tensors[call.mode.rng.value]) is not None


def test_a_chain_of_layers_stays_one() -> None:
    tree = context_of(models.convolutional()).tree
    assert classes(tree) == ["Convolutional", "Sequential", "Conv2d", "BatchNorm2d", "ReLU"]


def test_integers_that_are_no_sizes_stay_as_the_user_wrote_them() -> None:
    context = context_of(models.recurrent_ratio())
    assert [block.scope.cls for block in context.tree.layers()] == ["LSTM"]
    (power,) = (call for call in context.program.calls if call.name == "pow")
    assert power.args[1:] == (2,)


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


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, -900.0]), True),
        (torch.tensor([2000.0]), False),
        (torch.tensor([300.0], dtype=torch.float16), False),
        (torch.tensor([float("-inf")]), False),
        (torch.tensor([float("nan")]), False),
        (torch.tensor([10**12]), True),
        (torch.tensor([True]), True),
        (torch.zeros(0), True),
    ],
)
def test_ordinary(tensor: torch.Tensor, expected: bool) -> None:
    assert is_ordinary(tensor) is expected
    if tensor.is_floating_point():
        assert is_ordinary(moderate(tensor))


def test_a_layer_that_returned_something_else_is_not_one() -> None:
    weight, x = torch.ones(3, 2), torch.ones(1, 2)
    call = Call("torch.nn.functional.linear", (Ref(0), Ref(1)), outputs=Ref(2))
    inputs = {1: Input(1, "fc.weight", "parameter")}
    given = {0: x, 1: weight}
    right = layer_of(Scope("fc", "Linear"), LayerRun([call], (2,), given, {2: x @ weight.t()}), inputs, None)
    assert right is not None
    assert (right.arguments, dict(right.options), right.state) == ((2, 3), {"bias": False}, {"weight": 1})
    assert layer_of(Scope("fc", "Linear"), LayerRun([call], (2,), given, {2: x @ weight.t() + 1}), inputs, None) is None


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


@pytest.mark.parametrize("cls", ["BatchNorm1d", "Conv2d", "GRU", "MultiheadAttention"])
def test_calls_left_of_a_layer_are_no_layer(cls: str) -> None:
    call = Call("torch.Tensor.add_", (Ref(0), 1), outputs=Ref(0))
    count = torch.tensor(0)
    inputs = {0: Input(0, "norm.num_batches_tracked", "buffer")}
    assert layer_of(Scope("norm", cls), LayerRun([call], (0,), {0: count}, {0: count + 1}), inputs, None) is None


@pytest.mark.parametrize(
    ("small", "noted", "given"),
    [
        (nn.Linear(2, 3), {"in_features": 7, "out_features": 9}, (torch.ones(1, 2),)),
        (
            nn.Bilinear(2, 3, 1),
            {"in1_features": 7, "in2_features": 8, "out_features": 9},
            (torch.ones(1, 2), torch.ones(1, 3)),
        ),
        (nn.EmbeddingBag(2, 3), {"num_embeddings": 7, "embedding_dim": 9}, (torch.tensor([[0, 1]]),)),
        (
            nn.Conv2d(2, 4, 3, groups=2),
            {"in_channels": 8, "out_channels": 16, "kernel_size": 3},
            (torch.ones(1, 2, 3, 3),),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_sizes_of_layers_are_those_of_their_weights(
    small: nn.Module, noted: dict[str, Any], given: tuple[torch.Tensor, ...]
) -> None:
    cls = type(small).__name__
    tensors = {f"x{place}": tensor for place, tensor in enumerate(given)}
    snapshot = models.record_model(small, lambda **tensors: small(*tensors.values()).mul(0).log(), **tensors)
    modules = {f"<{cls}>": ModuleNote(cls, arguments=noted)}
    program = replace(snapshot.program, modules=modules)
    (block,) = tree_of(Candidate(program, snapshot.tensors)).layers()
    assert block.layer is not None
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    assert {name: tensor.shape for name, tensor in block.layer.build().state_dict().items()} == shapes


def test_a_module_is_replaced_by_what_it_was_given() -> None:
    snapshot = models.growing()
    candidate = Candidate(snapshot.program, snapshot.tensors)
    block = next(run for scope, run in module_runs(candidate) if len(scope) > 1)
    shapes = {
        value: (2, 3, 8) for call in candidate.program.calls for value in (*call.input_refs(), *call.output_refs())
    }
    shorter = next(without_module(candidate, block, shapes))
    assert shorter.num_calls == candidate.num_calls - len(block)
    assert locate(shorter.program, shorter.tensors) is not None


@pytest.mark.parametrize(
    ("call", "kwargs"),
    [
        (Call("torch.nn.functional.dropout", (Ref(0), 0.5, True), outputs=Ref(9)), {}),
        (Call("torch.nn.functional.dropout", (Ref(0),), outputs=Ref(9)), {"p": 0.0}),
        (
            Call(
                "torch.nn.functional.scaled_dot_product_attention",
                (Ref(0), Ref(0), Ref(0)),
                {"dropout_p": 0.5, "scale": 0.25},
                Ref(9),
            ),
            {"dropout_p": 0.0, "scale": 0.25},
        ),
    ],
    ids=["dropout", "default", "attention"],
)
def test_only_the_probability_of_a_random_call_is_changed(call: Call, kwargs: dict[str, float]) -> None:
    program = Program((replace(call, mode=Mode(rng=Ref(1))),), (Input(0, "x"), Input(1, "rng", "rng")), (Ref(9),))
    candidate = Candidate(program, {0: torch.ones(2, 2), 1: torch.get_rng_state()})
    certain = with_certainty(candidate, 0)
    assert certain is not None
    (changed,) = certain.program.calls
    assert changed.kwargs == kwargs and changed.mode.rng is None
    assert changed.args[1:] == ((0.0, True) if len(call.args) == 3 and not call.kwargs else call.args[1:])
    assert (without_call(candidate, 0) is None) == call.name.endswith("attention")


def test_a_random_call_without_a_probability_stays_random() -> None:
    call = Call("torch.nn.functional.rrelu", (Ref(0), 0.125, 0.5, True), outputs=Ref(9), mode=Mode(rng=Ref(1)))
    program = Program((call,), (Input(0, "x"), Input(1, "rng", "rng")), (Ref(9),))
    assert with_certainty(Candidate(program, {}), 0) is None


def test_variables_are_read_from_assignments() -> None:
    program = models.masked_attention().program
    named = {call.name: variables(program.calls).get(call.output_refs()[0]) for call in program.calls}
    assert named["masked_fill"] == "scores"
    assert named["tanh"] == "x"
    assert named["softmax"] is None


def test_calls_inside_a_library_have_no_variable() -> None:
    line = "self.smoother(outputs, labels)"
    site = site_of(f"loss = {line}", line, library=("transformers/trainer_pt_utils.py", 479))
    assert variables([Call("torch.Tensor.div", (Ref(0), Ref(1)), outputs=Ref(2), site=site)]) == {}


def test_what_is_handed_on_is_not_what_the_line_assigns() -> None:
    program = models.distances_within().program
    made = {call.name: call.output_refs()[0] for call in program.calls if call.output_refs()}
    named = variables(program.calls)
    assert made["linear"] not in named
    assert named[made["sum"]] == "squares"


@pytest.mark.parametrize(
    ("code", "part", "name", "is_named"),
    [
        ("loss = spread(net(x))", "net(x)", "linear", False),
        ("loss = spread(torch.tanh(net(x)), y)", "torch.tanh(net(x))", "tanh", False),
        ("z = self.norm(self.embed(x))", "self.norm(self.embed(x))", "layer_norm", True),
        ("z = torch.tanh(self.norm(self.embed(x)))", "torch.tanh(self.norm(self.embed(x)))", "tanh", True),
        ("z = net(x)", "net(x)", "linear", True),
        ("z = net(x[:, 1:])", "x[:, 1:]", "getitem", False),
        ("z = net(x / 255)", "x / 255", "div", False),
        ("z = F.relu(net(x))", "F.relu(net(x))", "relu", True),
    ],
)
def test_what_goes_into_a_function_at_once_has_no_variable(code: str, part: str, name: str, is_named: bool) -> None:
    calls = [
        Call(f"torch.{name}", (Ref(0),), outputs=Ref(1), site=site_of(code, part, function="main")),
        Call("torch.sqrt", (Ref(1),), outputs=Ref(2), site=site_of("return x.sqrt()", "x.sqrt()", 9, "spread")),
    ]
    assert (1 in variables(calls)) == is_named
