"""Slices: what a failure depends on is kept, the rest of the step goes, and where the data flow hides nothing goes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from reprokit.program.step import Step
from reprokit.render.sources import context_script
from reprokit.shrink.apart import RunLimits
from reprokit.shrink.certainty import Certainty
from reprokit.shrink.passes.cut import slice_to
from reprokit.shrink.reducer import shrink
from tests.shrink import failing, models


def sliced(snapshot: failing.Snapshot) -> tuple[list[str], Any]:
    found = slice_to(Step.of(snapshot), snapshot.failure)
    assert found is not None
    candidate, failure = found
    assert candidate.program.calls[failure.call_index or 0] is snapshot.program.calls[snapshot.failure.call_index or 0]
    read = {value for call in candidate.program.calls for value in call.input_refs()}
    assert {item.value for item in candidate.program.inputs} == set(candidate.tensors) <= read
    return [call.name for call in candidate.program.calls], failure


def two_batches(x: torch.Tensor, weight: torch.Tensor) -> None:
    for batch in (x + 2.0, x * 0.0):
        hidden = (batch * weight).square()
        hidden.cos().mean()
        hidden.sum(dim=1).sqrt().sum().backward()


def test_a_backward_failure_keeps_its_own_backward_pass_alone() -> None:
    snapshot = failing.record(two_batches, x=failing.seeded(3, 4), weight=failing.seeded(4, grad=True))
    names, failure = sliced(snapshot)
    assert names == ["mul", "mul", "square", "sum", "sqrt", "sum", "backward"]
    assert (failure.phase, names[failure.call_index]) == ("backward", "sqrt")
    assert shrink(snapshot).program.num_calls == 1


def test_a_slice_that_does_not_fail_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def healthy(candidate: Step, failure: Any) -> Any:
        tensors = {value: torch.ones_like(tensor) for value, tensor in candidate.tensors.items()}
        return candidate.with_tensors(tensors), failure

    limits: list[RunLimits | None] = []
    establish = Certainty.establish

    def watch(certainty: Certainty, whole: Step, tell: Any, first: Any) -> None:
        limits.append(certainty.isolation.limits)
        establish(certainty, whole, tell, first)

    monkeypatch.setattr(import_module("reprokit.shrink.reducer"), "slice_to", healthy)
    monkeypatch.setattr(Certainty, "establish", watch)
    reduction = shrink(failing.zero_by_zero())
    assert (reduction.reproduces, reduction.program.num_calls) == ("5/5", 1)
    assert limits == [None]  # what the slice needs is too little for the whole step


def test_a_layer_of_torch_is_kept_whole() -> None:
    """What comes after the origin tells what layer it is; the context then has that, and no statements of it."""
    snapshot = models.torch_attention()
    names, failure = sliced(snapshot)
    assert failure.call_index is not None and names[failure.call_index] == "softmax"
    assert "bmm" in names[failure.call_index :]
    reduction = shrink(snapshot)
    assert reduction.context is not None
    script = context_script(reduction)
    assert script is not None and "nn.MultiheadAttention(" in script.text and "softmax(" not in script.text
