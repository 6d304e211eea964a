"""The reducer over recorded steps: how small results get, and what happens when a reduction cannot go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from reprokit.errors import Flaky, GivenInput, NotReproduced
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import Key
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.shrink.order import size_key, value_key
from reprokit.shrink.problem import Problem
from reprokit.shrink.reducer import PASSES, REDUCTION_FILE, SearchStopped
from reprokit.shrink.reduction import LogRow, Reduction, load
from reprokit.snapshot.format import Snapshot
from tests.shrink import failing
from tests.shrink.failing import minimum_of
from tests.shrink.test_explain import assert_explained
from tests.shrink.test_minimal import assert_minimal
from tests.shrink.views import Lines

# calls, elements, checks at most
SIZES = {
    failing.masked_softmax: (1, 1, 8),
    failing.asked_for_infinity: (1, 2, 12),
    failing.zero_times_log_zero: (1, 1, 8),
    failing.zero_by_zero: (1, 2, 8),
    failing.half_linear_overflow: (1, 2, 22),
    failing.half_sum_overflow: (1, 2, 20),
    failing.sqrt_gradient: (1, 1, 8),
    failing.logsumexp_gradient: (1, 2, 10),
    failing.eigh_gradient: (1, 8, 20),
    failing.where_gradient: (1, 1, 10),
    failing.label_smoothing: (1, 3, 18),
    failing.adam_half: (1, 2, 15),
    failing.layer_norm_half: (1, 1, 12),
    failing.in_place_gradient: (2, 1, 15),
    failing.gradients_added_up: (2, 1, 50),
    failing.accumulated_gradients: (2, 1, 55),
    failing.loss_scaled_twice: (2, 2, 80),
    failing.gradient_penalty: (1, 1, 10),
    failing.singular_matrix: (1, 1, 10),
    failing.wrong_shapes: (1, 3, 35),
    failing.gated_recurrence: (1, 2, 10),
    failing.chosen_column: (1, 1, 8),
}


def key_of(found: Snapshot | Reduction) -> Key:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failure = locate(found.program, found.tensors)
    assert failure is not None
    return failure.key()


def is_alike(first: Reduction, second: Reduction) -> bool:
    return Step.of(first).digest == Step.of(second).digest


def size_of(reduction: Reduction) -> tuple[int, int]:
    """Calls and elements."""
    return reduction.program.num_calls, Step.of(reduction).num_elements


@pytest.mark.parametrize("step", SIZES, ids=lambda step: step.__name__)
def test_results_are_small_and_fail_the_same_way(step: failing.Step) -> None:
    snapshot = step()
    reduction = minimum_of(snapshot)
    summary = reduction.summary()
    assert key_of(reduction) == key_of(snapshot)
    calls, elements, checks = SIZES[step]
    assert (summary["calls"], summary["elements"]) == (calls, elements)
    assert summary["checks"] <= checks
    assert summary["checks"] == sum(summary["verdicts"].values())
    assert (summary["verdict"], summary["one_minimal"]) == ("reduced", True)
    assert summary["reproduces"] in ("5/5", "3/3")  # the latter where a run is slow, as in a child on a busy machine
    assert summary["before"] == {"calls": snapshot.program.num_calls, "elements": snapshot.num_elements}
    assert [entry["input"] for entry in summary["explain"]] == [item.name for item in reduction.program.inputs]
    assert len({item.name for item in reduction.program.inputs}) == len(reduction.program.inputs)
    assert_minimal(reduction)
    assert_explained(reduction)


@pytest.mark.parametrize("step", list(SIZES)[::9], ids=lambda step: step.__name__)
def test_a_reduction_is_deterministic_and_idempotent(step: failing.Step) -> None:
    reduction, other = minimum_of(step()), minimum_of(step())
    assert is_alike(other, reduction)
    assert (other.explain, other.constants, other.nearest) == (
        reduction.explain,
        reduction.constants,
        reduction.nearest,
    )
    again = minimum_of(failing.snapshot_of(reduction.program, reduction.tensors))
    first, second = (Step.of(found) for found in (reduction, again))
    assert (size_key(second), value_key(second)) == (size_key(first), value_key(first))


@pytest.mark.parametrize("function", [torch.square, lambda difference: difference**2, F.softplus])
def test_a_nan_that_marks_a_missing_label_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    reduction = minimum_of(failing.missing_label(function))
    assert reduction.failure.phase == "backward" and reduction.one_minimal
    assert [call.target.rpartition(".")[2] for call in reduction.program.calls][-2:] == ["where", "backward"]
    assert size_of(reduction) <= (3, 4)


@pytest.mark.parametrize(
    ("branch", "calls"),
    [
        (lambda x: torch.where(x > 0, 2 * torch.sqrt(x), x), {"sqrt", "where"}),
        (lambda x: torch.where(x > 0, torch.log(x).exp() - 1, x), {"log", "exp", "where"}),
        (lambda x: torch.sqrt(x).add(1).masked_fill(x < 0, 0.0), {"sqrt", "masked_fill"}),
        (lambda x: torch.sqrt(x)[x > 0], {"sqrt", "__getitem__"}),
    ],
)
def test_a_branch_that_is_not_taken_keeps_the_call_that_drops_it(
    branch: Callable[[torch.Tensor], torch.Tensor], calls: set[str]
) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        h = torch.tanh(branch(F.linear(x, weight))).sum()
        F.softplus(h).backward()  # type: ignore[no-untyped-call]

    reduction = minimum_of(failing.record(step, x=torch.eye(4, 3) - 0.5, weight=failing.seeded(5, 3, grad=True)))
    assert (reduction.failure.phase, reduction.one_minimal) == ("backward", True)
    assert {call.name for call in reduction.program.calls if not call.is_differentiation} == calls
    assert size_of(reduction) <= (3, 3)


def test_of_a_recurrent_layer_one_feature_of_the_first_layer_is_left() -> None:
    layer = nn.LSTM(5, 7, num_layers=2, bidirectional=True, dtype=torch.float64)
    x = failing.seeded(4, 3, 5).double().abs()
    x[2, 1] = 1e308
    with torch.no_grad():  # inf of the input and -inf of the hidden state: a sum by itself depends on the kernel
        for name, weight in layer.named_parameters():
            weight.fill_(-1e308 if name.startswith("weight_hh") else 1e3)
    reduction = minimum_of(failing.record(lambda x: layer(x)[0].sum(), x=x))
    assert size_of(reduction) == (1, 21)


def test_a_backward_pass_from_a_nan_that_nothing_computes_is_no_reproduction() -> None:
    snapshot = failing.record(lambda loss: loss.backward(), loss=torch.tensor(float("nan"), requires_grad=True))
    assert not snapshot.summary()["failure"]["shows_cause"]
    with pytest.raises(NotReproduced, match="no recorded call computes `loss`"):
        minimum_of(snapshot)


@pytest.mark.parametrize(
    ("step", "name", "rows"),
    [(failing.bad_batch, "batch", [3]), (lambda: failing.ruined_teacher(2), "weight0", [0, 1, 2, 3])],
)
def test_what_an_input_holds_is_not_reduced(step: failing.Step, name: str, rows: list[int]) -> None:
    with pytest.raises(GivenInput) as caught:
        minimum_of(step())
    assert (caught.value.input["name"], caught.value.input["rows"]) == (name, rows)


def test_what_matters_is_told() -> None:
    free = {entry.input: entry.free for entry in minimum_of(failing.adam_half()).explain}
    assert free == {"fc.weight": True, "fc.weight.grad": False}


def test_the_wanted_argument_survives() -> None:
    (call,) = minimum_of(failing.label_smoothing()).program.calls
    assert dict(call.kwargs) == {"label_smoothing": 0.2}


def test_autocast_becomes_half_precision() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return torch.nn.functional.linear(x, weight).sum()

    reduction = minimum_of(failing.record(step, x=torch.full((4, 8), 300.0), weight=torch.full((3, 8), 300.0)))
    assert reduction.program.calls[0].mode.autocast == ()
    assert {tensor.dtype for tensor in reduction.tensors.values()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_with_which_torch_hardly_computes(dtype: torch.dtype) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float32) * scale).to(dtype).float().log().sum()

    snapshot = failing.record(step, x=torch.full((4, 4), 1.5).to(dtype), scale=torch.zeros(4))
    with pytest.MonkeyPatch.context() as patch:  # the tensors themselves meet every pass
        patch.setattr(import_module("reprokit.shrink.reducer"), "cuts", lambda candidate, failure: iter(()))
        reduction = minimum_of(snapshot)
    assert key_of(reduction) == key_of(snapshot)
    assert reduction.one_minimal


def test_the_surroundings_are_left_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    snapshot = failing.half_linear_overflow()
    tensors = {value: tensor.clone() for value, tensor in snapshot.tensors.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        minimum_of(snapshot)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensors[value], tensor) for value, tensor in snapshot.tensors.items())


def test_the_view_and_the_log_hold_what_happens() -> None:
    view = Lines()
    reduction = minimum_of(failing.masked_softmax(), view=view)
    before = f"{reduction.before.calls} calls, {reduction.before.elements} elements"
    assert view.said[:2] == [f"start: {before}, at most 120 s", "replay: 5/5 runs fail as recorded"]
    assert view.shown[-1].startswith("nothing more can go: 1 call, 1 element after ")
    assert [int(line.partition(":")[0]) for line in view.checks] == list(range(1, reduction.checks + 1))
    assert reduction.log[0] == LogRow(1, reduction.log[0].change, 1, reduction.log[0].elements)
    assert str(reduction.log[0]).startswith("1: only 1 of ")


def test_the_best_is_on_disk(tmp_path: Path) -> None:
    reduction = minimum_of(failing.sqrt_gradient(), out_dir=tmp_path)
    kept = load(tmp_path / REDUCTION_FILE)
    assert is_alike(kept, reduction)
    assert kept.summary() == reduction.summary()


def test_an_interrupted_reduction_leaves_the_best_and_goes_on(tmp_path: Path) -> None:
    class Interrupting(Lines):
        def show(self, line: str) -> None:
            if "check 5:" in line:
                raise KeyboardInterrupt

    snapshot = failing.half_linear_overflow()
    with pytest.raises(SearchStopped) as stopped:
        minimum_of(snapshot, out_dir=tmp_path, view=Interrupting())
    best = stopped.value.best
    assert is_alike(best, load(tmp_path / REDUCTION_FILE))
    assert best.stopped == "interrupted" and not best.one_minimal and best.program.num_calls == 1
    assert is_alike(minimum_of(snapshot, earlier=best), minimum_of(snapshot))
    other = failing.zero_by_zero()
    healthy = {value: torch.ones_like(tensor) for value, tensor in other.tensors.items()}
    with pytest.raises(NotReproduced, match="the earlier reduction does not fail any more"):
        minimum_of(other, earlier=replace(best, program=other.program, tensors=healthy))


def test_a_spent_budget_is_not_a_proof(tmp_path: Path) -> None:
    reduction = minimum_of(failing.masked_softmax(), max_time=1e-9, out_dir=tmp_path)
    assert not reduction.one_minimal
    assert key_of(reduction) == key_of(failing.masked_softmax())
    assert load(tmp_path / REDUCTION_FILE).program.num_calls == reduction.program.num_calls


def test_a_failure_that_does_not_come_back() -> None:
    snapshot = failing.zero_by_zero()
    snapshot = replace(snapshot, tensors={value: torch.ones_like(tensor) for value, tensor in snapshot.tensors.items()})
    with pytest.raises(NotReproduced) as caught:
        minimum_of(snapshot)
    assert caught.value.note == "nothing goes wrong in a replay" and "another torch" in str(caught.value.hint)
    known = replace(snapshot, fidelity="unfaithful", fidelity_note="the recorded calls do not raise")
    with pytest.raises(NotReproduced, match="does not fail again") as caught:
        minimum_of(known)
    assert caught.value.hint is None and str(caught.value.note).endswith("said so: the recorded calls do not raise")


def test_another_failure_is_not_this_one() -> None:
    snapshot = failing.zero_by_zero()
    snapshot = replace(snapshot, tensors={value: tensor.exp() * 3e38 for value, tensor in snapshot.tensors.items()})
    with pytest.raises(NotReproduced) as caught:
        minimum_of(snapshot)
    assert caught.value.note is not None and caught.value.note.startswith("a replay gives inf from")


def test_a_flaky_failure_is_told_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Failure | None] = []

    def sometimes(program: Program, tensors: dict[int, torch.Tensor], **options: bool) -> Failure | None:
        runs.append(locate(program, tensors, **options) if len(runs) % 2 else None)
        return runs[-1]

    monkeypatch.setattr(import_module("reprokit.shrink.checks.recorded"), "locate", sometimes)
    with pytest.raises(Flaky, match="15 of 30 runs"):
        minimum_of(failing.zero_by_zero())


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_sparse_inputs(layout: torch.layout) -> None:
    graph = torch.tensor([[3e38, 0.0], [0.0, 1.0]]).to_sparse(layout=layout)
    reduction = minimum_of(failing.record(lambda graph, x: (graph @ x).sum(), graph=graph, x=torch.full((2, 3), 10.0)))
    assert reduction.one_minimal and not reduction.notes
    assert [call.target for call in reduction.program.calls] == ["torch.Tensor.matmul"]
    assert [tensor.shape for tensor in reduction.tensors.values()] == [(1,), (1,)]
    assert {tensor.layout for tensor in reduction.tensors.values()} == {torch.strided}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_an_input_that_has_to_be_sparse_stays_so() -> None:
    graph = torch.tensor([[3e38, 0.0], [0.0, 3e38]]).to_sparse_csr()
    reduction = minimum_of(failing.record(lambda graph, x: torch.sparse.sum(graph) * x, graph=graph, x=torch.ones(2)))
    assert reduction.one_minimal and not reduction.notes
    assert torch.sparse_csr in {tensor.layout for tensor in reduction.tensors.values()}


def test_a_pass_that_breaks_off_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: object) -> None:
        raise RuntimeError("not today\nand more")

    monkeypatch.setattr(import_module("reprokit.shrink.problem"), "find_classes", breaks)
    monkeypatch.setattr(import_module("reprokit.shrink.reducer"), "explain", breaks)
    monkeypatch.setattr(import_module("reprokit.shrink.reducer"), "find_context", breaks)
    reduction = minimum_of(failing.zero_by_zero(), with_piece=True)
    assert reduction.program.num_calls == 1 and not reduction.one_minimal
    told = "stopped after an internal error (RuntimeError: not today); the other parts ran"
    assert reduction.notes == [f"`{part}` {told}" for part in ("sizes", "explain", "context")]


def never_ends(problem: Problem) -> None:
    """Proposes for ever what is no smaller, so that nothing is ever checked."""
    while not problem.consider(problem.best, "the same again"):
        pass


def test_a_pass_that_never_ends_spends_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(name, never_ends if name == "sizes" else run_pass) for name, run_pass in PASSES]
    monkeypatch.setattr(import_module("reprokit.shrink.reducer"), "PASSES", tuple(rows))
    reduction = minimum_of(failing.masked_softmax(), max_time=1.0)
    assert (reduction.one_minimal, reduction.stopped) == (False, "max-time")
    assert reduction.program.num_calls == 1 and reduction.explain


UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.relu,
    torch.abs,
    torch.neg,
    torch.sqrt,
    torch.log,
    torch.exp,
    lambda x: x * 3,
    lambda x: x - x.mean(),
    lambda x: x / x.sum(),
    lambda x: x.transpose(0, -1),
    lambda x: torch.softmax(x, -1),
    lambda x: x @ x.transpose(-1, -2),
    lambda x: x.std(0, keepdim=True),
]


@settings(max_examples=12)
@given(
    chain=st.lists(st.sampled_from(range(len(UNARY))), min_size=1, max_size=8),
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    scale=st.sampled_from([0.0, 1.0, 1e20]),
)
def test_any_chain_that_fails_shrinks_to_something_smaller_that_fails_alike(
    chain: list[int], shape: list[int], scale: float
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for number in chain:
            x = UNARY[number](x)
        return x

    try:
        snapshot = failing.record(step, x=failing.seeded(*shape) * scale)
    except AssertionError:
        return  # nothing goes wrong
    reduction = minimum_of(snapshot)
    assert key_of(reduction) == key_of(snapshot)
    assert reduction.one_minimal
    before = Step.of(snapshot)
    assert size_key(Step.of(reduction))[:2] <= size_key(before)[:2]
    assert reduction.program.num_calls == 1


def test_the_summary_is_what_the_contract_says() -> None:
    summary: dict[str, Any] = minimum_of(failing.where_gradient()).summary()
    assert summary["signature"] == {"phase": "forward", "kind": "inf", "call": "torch.exp"}
    assert summary["max_abs_input"] == 100.0
    assert set(summary) == {
        "schema", "verdict", "calls", "elements", "max_abs_input", "checks", "verdicts", "seconds", "reproduces",
        "explain", "constants", "nearest", "explain_checks", "before", "signature", "one_minimal", "stopped",
        "notes", "whatif", "diagnosis", "no_repro",
    }  # fmt: skip
