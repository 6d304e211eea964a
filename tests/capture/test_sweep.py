"""What nobody can use any more leaves the tape; what somebody can still use stays."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture import tape
from reprokit.capture.session import Session
from reprokit.snapshot.format import load
from tests.capture.traps_checks import (
    BAD_STEP,
    batches,
    check_exact,
    check_silent,
    classify,
    ending,
    numbers,
    silent_root,
    training,
    update,
)


@pytest.mark.parametrize("grad", [False, True])
def test_an_evaluation_between_two_steps_does_not_pile_up(grad: bool, tmp_path: Path) -> None:
    model, optimizer = training()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    with Session(directory=tmp_path) as session:
        for _, x, y in batches(3):
            update(optimizer, classify(model, x, y))
        model.eval()
        for _ in range(200):
            with torch.set_grad_enabled(grad):
                x = torch.ones(8, 4)
                result = model(x).softmax(-1).amax(-1)
            alive += [weakref.ref(x), weakref.ref(result)]
            result.mean().item()
            del x, result
            most = max(most, sum(reference() is not None for reference in alive))
        model.train()
        for _, x, y in batches(3):
            update(optimizer, classify(model, x, y))
    assert session.snapshots == []
    assert most < 16


@pytest.mark.parametrize("num_batches", [1, 8])
@pytest.mark.parametrize("is_small", [True, False], ids=["kept", "swept"])
def test_statistics_that_an_unused_call_wrote_are_those_of_an_evaluation(
    num_batches: int, is_small: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Batch normalisation adapts to some batches, then the loss of an evaluation is NaN in the same step."""
    monkeypatch.setattr(tape, "SWEEP_OPS", 2**30 if is_small else 1)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(directory=tmp_path, after="continue", history=3, quiet=True) as session:
        for step, x, _ in batches(6):
            if step == 4:
                with torch.no_grad():
                    for number in range(num_batches):
                        model(x * (5 + number))
                model.eval()
            value = model(x * 2).mean()
            if step == 4:
                seen = value.item()
            update(optimizer, value * torch.log(torch.tensor(-1.0 if step == 4 else 1.0)))
    snapshot = load(session.snapshots[0])
    assert (snapshot.step, snapshot.fidelity) == (4, "exact")
    assert seen in numbers(snapshot)


class Step(nn.Module):
    """One step of something recurrent."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(x, h)


def test_a_long_unrolled_loop_is_kept_as_a_whole(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, evaluated = Step(), nn.Linear(4, 2)
        optimizer = torch.optim.Adam([*model.parameters(), *evaluated.parameters()])
        for step, x, y in batches():
            h = torch.zeros(8, 4)
            for _ in range(40):
                h = model(x, h)
                with torch.no_grad():
                    evaluated(h).argmax(-1)
            update(optimizer, F.cross_entropy(evaluated(h), y) + silent_root(h, step == BAD_STEP))
        return ending(model, evaluated)

    check_exact((BAD_STEP, "backward", "torch.Tensor.sqrt"), loop, tmp_path)


def prepare(count: int = 200) -> torch.Tensor:
    """Data made row by row."""
    data = torch.zeros(8, 4)
    for number in range(count):
        data[number % 8, number % 4] += torch.full((), float(number))
        abs(number)
    return data / data.max()


@pytest.mark.parametrize("how", ["model first", "data first", "inside a device", "no module", "no optimizer"])
@pytest.mark.parametrize("bad_step", [0, 3])
@pytest.mark.parametrize("most", [50, 10_000])
def test_data_that_a_script_makes_first(
    how: str, bad_step: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the training does is missed, the first step included, whether these calls leave the tape or not."""
    monkeypatch.setattr(tape, "SWEEP_OPS", 16)
    monkeypatch.setattr(tape, "MOST_OPS", most)

    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2) if how == "model first" else None
        data = prepare()
        if how == "inside a device":
            with torch.device("cpu"):
                model = nn.Linear(4, 2)
                prepare()
        weight = torch.full((2, 4), 0.1, requires_grad=True)
        model = model or nn.Linear(4, 2)
        parameters = [weight, *([] if how.startswith("no") else model.parameters())]
        optimizer = torch.optim.SGD(parameters, lr=0.1) if how != "no optimizer" else None
        for step in range(5):
            gone = torch.full((), 0.0 if step == bad_step else 1.0)
            rows = data @ weight.t()
            loss = ((rows if how.startswith("no") else rows + model(data)).square() * (gone / gone)).mean()
            if optimizer is not None:
                update(optimizer, loss)
            else:
                weight.grad = None
                loss.backward()
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
        return ending(model, weight)

    check_exact((bad_step, "forward", "torch.Tensor.div"), loop, tmp_path)


def test_a_script_that_makes_data_by_very_many_calls_keeps_few_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the training and in the middle of it; the step that fails then is exact all the same."""
    monkeypatch.setattr(tape, "SWEEP_OPS", 64)
    monkeypatch.setattr(tape, "MOST_OPS", 256)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process imports Dynamo
    check_silent(lambda: ending(prepare(1000)), tmp_path, capsys)
    sizes = []

    def loop() -> list[torch.Tensor]:
        data = prepare(1000)
        sizes.append(num_objects())
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            if step == 4:
                before = num_objects()
                data = prepare(1000)
                sizes.append(num_objects() - before)
            scale = torch.full((), 0.0 if step == 6 else 1.0)
            update(optimizer, (model(data).square() * (scale / scale)).mean())
        return ending(model)

    check_exact((6, "forward", "torch.Tensor.div"), loop, tmp_path)
    first, second = sizes[0], sizes[2]
    assert second - first < 4000


def num_objects() -> int:
    """The objects that are there."""
    gc.collect()
    return len(gc.get_objects())
