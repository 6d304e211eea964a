"""Which calls others depend on: writes through views, running statistics and gradients are not overlooked, and a part
of a step that runs alone gives the same bits as in the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reprokit.program.dataflow import needed_calls, prepared
from reprokit.program.interpreter import determinism, run
from reprokit.program.ir import Call, Program
from reprokit.render.facts import Facts
from reprokit.render.issue import make_issue
from reprokit.render.report import write_report
from reprokit.render.sources import snapshot_script
from reprokit.rules.match import diagnose
from tests.locate.mechanisms import CASES
from tests.render.programs import VERIFIED
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


class _Results:
    """Keeps the bytes of every result."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], bytes] = {}

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing yet."""

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        for value in call.output_refs():
            if values[value].layout is torch.strided:
                self.found[index, value] = (
                    values[value].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )


def results(program: Program, tensors: Mapping[int, torch.Tensor], only: list[int] | None) -> dict[Any, bytes]:
    seen = _Results()
    run(program, tensors, observer=seen, keep=frozenset(), only=only)
    return seen.found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_part_gives_what_the_whole_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and the same texts and diagnosis as from runs of all calls."""
    snapshot = CASES[name]()
    with determinism(snapshot.settings):
        whole = results(snapshot.program, snapshot.tensors, None)
        for end in range(len(snapshot.program.calls)):
            only = needed_calls(snapshot.program.calls, {end})
            part = results(snapshot.program, snapshot.tensors, only)
            assert part == {key: whole[key] for key in part}
    texts = texts_of(snapshot)
    for module in ("locate.blame", "render.survey"):
        monkeypatch.setattr(import_module(f"reprokit.{module}"), "needed_calls", lambda calls, ends: None)
    assert texts == texts_of(snapshot)


def texts_of(snapshot: failing.Snapshot) -> list[object]:
    script = snapshot_script(snapshot)
    texts = (make_issue(Facts(snapshot, script, VERIFIED)).text, write_report(Facts(snapshot, script, VERIFIED)))
    return [diagnose(snapshot), *texts]
