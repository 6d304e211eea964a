"""Which calls others depend on: writes through views, running statistics and gradients are not overlooked, and a part
of a step that runs alone gives the same bits as in the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reprokit.program.dataflow import needed_calls, prepared, raw_bytes
from reprokit.program.observe import Trace
from tests.locate.mechanisms import CASES
from tests.shrink import failing


def names_needed(step: Callable[..., Any], **tensors: torch.Tensor) -> list[str] | None:
    """The names of the calls that the last call of a step depends on."""
    program = failing.traced(step, **tensors).program
    found = needed_calls(program.calls, {len(program.calls) - 1})
    return [program.calls[index].name for index in found] if found is not None else None


def test_what_leads_elsewhere_is_left_out() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (x.exp() * w).sum().backward()
        return x.cos() * w

    assert names_needed(step, x=failing.seeded(3), w=failing.seeded(3, grad=True)) == ["cos", "mul"]


def test_a_write_is_kept_where_its_memory_is_read() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base, other = x * 1.0, y * 2.0
        base.view(-1).relu_()
        F.relu(base[0], inplace=True)
        other.add_(1.0)
        return base.cos()

    names = names_needed(step, x=failing.seeded(2, 3), y=failing.seeded(3))
    assert names == ["mul", "view", "relu_", "__getitem__", "relu", "cos"]


def test_what_was_prepared_has_no_gradient_and_nothing_writes_it() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept, inner = x.cos() + 1.0, (x * 2.0).sin()
        leaf = torch.ones(3, requires_grad=True)
        written = y.exp()
        written[0].mul_(2.0)
        return (kept * w + inner * leaf + written).sum()

    program = failing.traced(step, x=failing.seeded(3), y=failing.seeded(3), w=failing.seeded(3, grad=True)).program
    made = {value: call.name for call in program.calls for value in call.output_refs()}
    of_loop = {value for value, name in made.items() if name != "sin"}
    assert [program.calls[index].name for index in prepared(program, of_loop)] == ["cos", "add", "mul"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["where-trap", "mean-of-nothing", "all-targets-ignored", "repeated-eigenvalues"])
def test_a_part_gives_what_the_whole_gives(name: str) -> None:
    snapshot = CASES[name]()
    calls = snapshot.program.calls
    whole = Trace(snapshot.program, raw)
    whole.run(snapshot.tensors)
    for end in range(len(calls)):
        part = Trace(snapshot.program, raw)
        part.run(snapshot.tensors, only=needed_calls(calls, {end}))
        assert part.writes == {index: whole.writes[index] for index in part.writes}


def raw(tensor: torch.Tensor) -> bytes:
    return raw_bytes(tensor.detach().contiguous())
