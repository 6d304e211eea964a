"""Steps that are frozen and thawed: the same calls, with empty tensors where a step had made something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import Freezer, PastStep
from reprokit.capture.record.entry import Entry, versions_of
from reprokit.capture.session import Session
from reprokit.program.ir import Mode
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    WATCHES,
    batches,
    check_caught,
    divided_loss,
    ending,
    fidelity,
    plain_net,
    update,
    where,
)


def noted(name: str, target: Any, *args: Any, **kwargs: Any) -> Entry:
    """The entry of a call that is made here."""
    entry = Entry(kinds.FUNCTION, target, args, kwargs, Mode(), None, name, versions=versions_of(args, kwargs))
    entry.output = target(*args, **kwargs)
    return entry


def step(*entries: Entry, saved: dict[int, torch.Tensor] | None = None) -> PastStep:
    return PastStep(list(entries), saved or {}, 3, 1, 0.5, None)


def test_a_thawed_step_makes_the_same_calls() -> None:
    weight, batch = torch.nn.Parameter(torch.ones(3)), torch.arange(3.0)
    product = noted("mul", torch.mul, weight, batch)
    stacked = noted("stack", torch.stack, [product.output, batch], dim=0)
    total = noted("sum", torch.sum, input=stacked.output, dim=[0, 1])
    product.rng = (torch.get_rng_state(), None)
    total.writes_view = True
    frozen = step(product, stacked, total, saved={id(batch): torch.zeros(3), id(product.output): torch.ones(3)})
    freezer = Freezer()
    freezer.freeze(frozen)
    assert not frozen.entries and not any(isinstance(item, Entry) for item in frozen.flat or ())
    thawed = freezer.thaw(frozen)
    first, second, third = thawed.entries
    assert first.args == (weight, batch) and first.args[0] is weight and first.args[1] is batch
    assert first.versions == [(batch, 0)]
    assert first.rng is not None and torch.equal(first.rng[0], torch.get_rng_state())
    made = first.output[0]
    assert made.numel() == 0 and second.args[0][0] is made and second.args[0][1] is batch
    assert second.kwargs == {"dim": 0} and third.kwargs["dim"] == [0, 1] and third.kwargs["input"] is second.output[0]
    assert (third.writes_state, third.writes_view, third.has_stepped) == (False, True, False)
    assert set(thawed.saved) == {id(batch), id(made)}
    assert (thawed.completed, thawed.micro_step, thawed.loss) == (3, 1, 0.5)


def test_what_a_later_step_uses_with_its_graph_keeps_its_place() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    made = noted("mul", torch.mul, weight, 2.0)
    freezer, earlier = Freezer(), step(made)
    freezer.freeze(earlier)
    later = step(noted("sum", torch.sum, made.output))
    freezer.freeze(later)
    assert not later.is_cut
    assert freezer.thaw(later).entries[0].args[0] is freezer.thaw(earlier).entries[0].output[0]


def test_a_graph_from_before_anything_remembered_cuts_the_past() -> None:
    unknown = torch.nn.Parameter(torch.ones(3)) * 2
    frozen = step(noted("sum", torch.sum, unknown))
    Freezer().freeze(frozen)
    assert frozen.is_cut


def test_lightening_leaves_the_step_as_it_is() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    running, pending = step(noted("mul", torch.mul, weight, 2.0)), noted("sum", torch.sum, weight)
    light = Freezer().lightened(running, pending)
    assert len(light.entries) == 2 and light.entries[0] is not running.entries[0]
    assert len(running.entries) == 1 and running.entries[0].output.numel() == 3


@pytest.mark.parametrize("watch", WATCHES)
def test_lists_that_the_loop_changes_after_a_call(watch: str, tmp_path: Path) -> None:
    """Also joins of very many samples, and of samples that are written in place afterwards."""

    def loop() -> list[torch.Tensor]:
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows: list[torch.Tensor] = []
        for step, x, y in batches():
            rows += [row * 1.5 for row in x] * 5
            joined = torch.stack(rows)[:8]
            joined[0, 0] = float(step)
            rows.clear()
            update(optimizer, divided_loss(model(joined), y, step == BAD_STEP))
        return ending(model)

    snapshot = check_caught(loop, tmp_path, watch=watch)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.Tensor.div")
    assert fidelity(snapshot) == EXACT


@pytest.mark.parametrize("watch", WATCHES)
def test_averages_that_the_loop_writes_in_place(watch: str, tmp_path: Path) -> None:
    """Of parameters that no root module holds, read through a view."""

    def loop() -> list[torch.Tensor]:
        model = plain_net()
        shadow = [nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x, y in batches():
            pull = (model[0].weight[0] - shadow[0][0]).pow(2).sum()
            update(optimizer, divided_loss(model(x), y, step == BAD_STEP) + pull)
            with torch.no_grad():
                for average, p in zip(shadow, model.parameters(), strict=True):
                    average.mul_(0.9).add_(p, alpha=0.1)
        return ending(model, shadow)

    snapshot = check_caught(loop, tmp_path, watch=watch)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.Tensor.div")
    assert fidelity(snapshot) == EXACT


def test_a_past_step_keeps_what_its_gradients_depend_on_only(tmp_path: Path) -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(directory=tmp_path) as session:
        for _, x, y in batches(20):
            accuracy = (model(x * 2.0).argmax(1) == y).float().mean()
            samples = torch.stack([row.clone() for row in x.detach().clone()] * 5)
            update(optimizer, divided_loss(model(x * 2.0), y, False) + samples.mean() * 0.0)
        session._run_state.freeze_past()
        steps = session._run_state.past()
    names = {entry.name for entry in steps[-1].entries}
    assert "torch.Tensor.mean" in names and accuracy.numel() == 1
    assert names.isdisjoint({"torch.Tensor.__eq__", "torch.Tensor.argmax", "torch.Tensor.float"})


def test_a_call_in_several_lines_has_the_line_of_its_own(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x, y in batches():
            scale = torch.full((), 0.0 if step == BAD_STEP else 1.0)
            loss = (
                model(x).square().mean()
                + (scale
                   / scale)
                - y.float().mean()
            )  # fmt: skip
            update(optimizer, loss)
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    site = snapshot.failure.site
    assert site is not None and site.code.strip() in ("+ (scale", "/ scale)")
