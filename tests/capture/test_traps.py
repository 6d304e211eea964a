"""Failures that are easy to miss: each is caught at its own step, phase and call, and the run is not disturbed."""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture.session import Session
from reprokit.errors import NotReproduced
from reprokit.shrink.reducer import shrink
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    WATCHES,
    Loop,
    batches,
    check_caught,
    classify,
    divided_loss,
    ending,
    fidelity,
    is_exact_or_explained,
    net,
    plain_net,
    rooted_loss,
    scaled_update,
    silent_root,
    training,
    update,
    where,
)


@dataclass(frozen=True)
class Expected:
    """Where a failure has to be found."""

    phase: str
    calls: tuple[str | None, ...]
    step: int = BAD_STEP
    micro_step: int = 0
    must_be_exact: bool = True


LossOf = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
EXPECTED: dict[Loop, Expected] = {}
LOOPS = EXPECTED.keys()
DIVISION = ("torch.Tensor.div",)
ROOT = ("torch.Tensor.sqrt",)


def failing(phase: str, calls: tuple[str | None, ...], **options: Any) -> Callable[[Loop], Loop]:
    """Add a loop to those that must be caught."""

    def add(loop: Loop) -> Loop:
        EXPECTED[loop] = Expected(phase, calls, **options)
        return loop

    return add


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_caught(loop: Loop, watch: str, tmp_path: Path) -> None:
    expected = EXPECTED[loop]
    snapshot = check_caught(loop, tmp_path, watch=watch)
    step, phase, call = where(snapshot)
    assert (step, snapshot.micro_step, phase) == (expected.step, expected.micro_step, expected.phase)
    assert call in expected.calls and snapshot.settings.watch == watch
    assert fidelity(snapshot) == EXACT if expected.must_be_exact else is_exact_or_explained(snapshot)


# -- seen in the gradients only -------------------------------------------------------------------------------------


@failing("backward", ROOT)
def gradient_only() -> list[torch.Tensor]:
    """`where(x > 0, sqrt(x), x)` has a finite value and a gradient that is not."""
    model, optimizer = training()
    for step, x, y in batches():
        update(optimizer, rooted_loss(model(x), y, step == BAD_STEP))
    return ending(model, optimizer)


@failing("backward", ROOT)
def gradient_only_in_the_last_layer() -> list[torch.Tensor]:
    """Neither the loss nor the gradient of any early layer shows it."""
    torch.manual_seed(0)
    body, head, gain = nn.Linear(4, 8), nn.Linear(8, 2), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), gain], lr=0.01)
    for step, x, y in batches():
        loss = F.cross_entropy(head(body(x).tanh()), y) + silent_root(gain, step == BAD_STEP)
        update(optimizer, loss)
    return ending(body, head, gain)


# -- grad scalers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_collapses_is_a_failure(fused: bool, watch: str, tmp_path: Path) -> None:
    """The loss is finite; torch never calls the optimizer's step or, if fused, its kernel does nothing."""

    def loop() -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step, x, y in batches(24):
            scaled_update(scaler, optimizer, rooted_loss(model(x), y, step >= BAD_STEP))
        return ending(model, scaler)

    snapshot = check_caught(loop, tmp_path, watch=watch)
    step, phase, call = where(snapshot)
    assert BAD_STEP <= step < 24 and (phase, call) == ("backward", *ROOT)
    assert fidelity(snapshot) == EXACT


@failing("forward", DIVISION, step=9)
def bad_loss_under_a_scaler() -> list[torch.Tensor]:
    """The scaler would skip this step in silence; the loss is NaN before it is scaled."""
    model, optimizer = training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step, x, y in batches(14):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = divided_loss(model(x), y, step == 9)
        scaled_update(scaler, optimizer, loss)
    return ending(model, scaler)


# -- closures and accumulation --------------------------------------------------------------------------------------


@failing("backward", ROOT)
def closure_with_a_bad_gradient() -> list[torch.Tensor]:
    """The whole step runs inside `optimizer.step`: a hook before it sees the gradients of the step before."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, x, y in batches():

        def closure() -> torch.Tensor:
            loss = rooted_loss(model(x), y, step == BAD_STEP)  # noqa: B023
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
    return ending(model, optimizer)


@failing("backward", ROOT, micro_step=1)
def closure_of_a_second_order_optimizer() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step, x, y in batches():
        num_calls = 0

        def closure() -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            loss = rooted_loss(model(x), y, step == BAD_STEP and num_calls == 2)  # noqa: B023
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
    return ending(model)


def accumulated(loss_of: LossOf) -> list[torch.Tensor]:
    """Four batches a step, the second of step 3 goes wrong."""
    model, optimizer = training()
    for step in range(6):
        for micro, x, y in batches(4, seed=step):
            (loss_of(model(x), y, step == BAD_STEP and micro == 1) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return ending(model, optimizer)


@failing("forward", DIVISION, micro_step=1)
def bad_loss_in_the_second_of_four_batches() -> list[torch.Tensor]:
    return accumulated(divided_loss)


@failing("backward", ROOT, micro_step=1)
def bad_gradient_in_the_second_of_four_batches() -> list[torch.Tensor]:
    return accumulated(rooted_loss)


# -- born in the optimizer ------------------------------------------------------------------------------------------


@failing("optimizer", ("torch.optim.SGD.step",), step=5, micro_step=1)
def last_step_of_all() -> list[torch.Tensor]:
    """Nothing comes after it that could show it."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches():
        optimizer.param_groups[0]["lr"] = math.inf if step == 5 else 0.01
        update(optimizer, classify(model, x, y))
    return ending(model)


# -- what is done with gradients -------------------------------------------------------------------------------------


def gradients_changed_by(change: Callable[[list[nn.Parameter]], Any]) -> list[torch.Tensor]:
    """Finite gradients whose squares overflow, changed before the optimizer's step."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, x, y in batches():
        optimizer.zero_grad()
        (classify(model, x, y) * (1e25 if step == BAD_STEP else 1.0)).backward()
        change(list(model.parameters()))
        optimizer.step()
    return ending(model)


NORM_OF_GRADIENTS = ("torch._foreach_norm", "torch.linalg.vector_norm", "torch.Tensor.pow")


@failing("forward", NORM_OF_GRADIENTS, micro_step=1)
def divided_by_an_infinite_norm() -> list[torch.Tensor]:
    def change(parameters: list[nn.Parameter]) -> None:
        norm = sum(p.grad.data.pow(2).sum() for p in parameters).sqrt()
        for parameter in parameters:
            parameter.grad.data.mul_(norm / norm)

    return gradients_changed_by(change)


# -- infinities that the loss hides ------------------------------------------------------------------------------


@failing("forward", ("torch.Tensor.square",))
def an_overflow_hidden_by_tanh() -> list[torch.Tensor]:
    """A square overflows, and its tanh is finite: only the gradients of the weights show it."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
    for step, x, y in batches():
        x[0, 0] *= 1e30 if step == BAD_STEP else 1.0
        loss = F.cross_entropy(second(first(x.square()).tanh()), y)
        assert torch.isfinite(loss) or step > BAD_STEP
        update(optimizer, loss)
    return ending(first, second)


# -- buffers --------------------------------------------------------------------------------------------------------

NORM = ("torch.nn.functional.batch_norm", "torch.batch_norm", "torch.nn.functional.linear")


@failing("forward", NORM)
def running_variance_overflows() -> list[torch.Tensor]:
    """The loss stays finite: dividing by the infinite variance hides the enormous batch. Evaluation is ruined."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches():
        loss = classify(model, x * (1e25 if step == BAD_STEP else 1.0), y)
        assert torch.isfinite(loss)
        update(optimizer, loss)
    assert not torch.isfinite(model[0].running_var).all()
    return ending(model)


@failing("forward", ("torch.Tensor.mul", *NORM))
def running_mean_poisoned_by_a_skipped_step() -> list[torch.Tensor]:
    """The loop leaves out the step with the bad loss, but the forward has already ruined the running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches():
        loss = classify(model, x * (3e38 if step == BAD_STEP else 1.0), y)
        if torch.isnan(loss):
            continue
        update(optimizer, loss)
    assert torch.isnan(model[1].running_mean).any()
    return ending(model)


@failing("forward", DIVISION, step=BAD_STEP)
def a_teacher_averaged_by_zero() -> list[torch.Tensor]:
    """What the loop writes into a frozen model before the step is part of the step."""
    student, teacher = plain_net(), plain_net().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for step, x, _ in batches():
        weight = torch.full((), 0.0 if step == BAD_STEP else 1.0)
        for mine, yours in zip(student.parameters(), teacher.parameters(), strict=True):
            yours.copy_((0.5 * yours + 0.5 * mine.detach()) * weight / weight)
        update(optimizer, F.mse_loss(student(x), teacher(x)))
    return ending(student, teacher)


@failing("forward", DIVISION, step=1)
def a_teacher_that_is_read_two_steps_after_it_was_ruined() -> list[torch.Tensor]:
    student, teacher = plain_net(), plain_net().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for step, x, y in batches():
        loss = F.cross_entropy(student(x), y)
        update(optimizer, loss + F.mse_loss(student(x), teacher(x)) if step in (0, BAD_STEP) else loss)
        if step == 0:
            weight = torch.zeros(())
            for mine, yours in zip(student.parameters(), teacher.parameters(), strict=True):
                yours.data.copy_(mine.detach() * weight / weight)
    return ending(student, teacher)


# -- other ways to differentiate and to step ------------------------------------------------------------------------


def stepping_inside_backward(loss_of: LossOf) -> list[torch.Tensor]:
    """One optimizer per parameter, each stepping as soon as its gradient is there."""
    model = net()
    own = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step, x, y in batches():
        loss_of(model(x), y, step == BAD_STEP).backward()
    return ending(model)


@failing("forward", DIVISION)
def bad_loss_with_steps_inside_backward() -> list[torch.Tensor]:
    return stepping_inside_backward(divided_loss)


@failing("backward", ROOT, must_be_exact=False)
def bad_gradient_with_steps_inside_backward() -> list[torch.Tensor]:
    return stepping_inside_backward(rooted_loss)


@failing("backward", ROOT, micro_step=1)
def second_of_two_optimizers() -> list[torch.Tensor]:
    """The first of them has stepped in the same iteration when the second fails."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    train_maker, train_judge = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.01)
    for step, x, _ in batches():
        fake = maker(torch.randn(8, 3))
        update(train_judge, F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean())
        update(train_maker, F.softplus(-judge(fake)).mean() + silent_root(fake, step == BAD_STEP))
    return ending(maker, judge, train_maker)


@failing("forward", DIVISION)
def autograd_backward_of_two_losses() -> list[torch.Tensor]:
    model, optimizer = training()
    for step, x, y in batches():
        count = torch.full((), 0.0 if step == BAD_STEP else 1.0)
        logits = model(x)
        losses = [F.cross_entropy(logits, y), logits.pow(2).mean() * (count / count)]
        optimizer.zero_grad()
        torch.autograd.backward(losses)
        optimizer.step()
    return ending(model)


@failing("backward", ROOT)
def a_model_and_an_optimizer_that_are_made_anew() -> list[torch.Tensor]:
    model, optimizer = training()
    for step, x, y in batches():
        if step == 1:
            state = model.state_dict()
            model = net(seed=1)
            model.load_state_dict(state)
            optimizer = torch.optim.Adam(model.parameters())
        update(optimizer, rooted_loss(model(x), y, step == BAD_STEP))
    return ending(model)


# -- compiled, special parameters -------------------------------------------------------------------------


@failing("backward", ROOT)
def sparse_embedding() -> list[torch.Tensor]:
    torch.manual_seed(0)
    table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    for step, x, y in batches():
        vectors = table((x[:, 0].abs() * 10).long() % 10)
        update(optimizer, F.cross_entropy(head(vectors), y) + silent_root(vectors, step == BAD_STEP))
    return ending(table, head)


# -- bad from the outside -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", WATCHES)
def test_a_bad_batch_is_named(watch: str, tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model = plain_net()
        optimizer = torch.optim.Adam(model.parameters())
        for step, x, y in batches():
            if step == BAD_STEP:
                x = torch.from_numpy(x.numpy() * np.float32("nan"))
            update(optimizer, classify(model, x, y))
        return ending(model)

    snapshot = check_caught(loop, tmp_path, watch=watch)
    assert where(snapshot) == (BAD_STEP, "forward", None)
    assert snapshot.failure.input_name == "x"
    assert fidelity(snapshot) == EXACT


def test_a_function_that_was_compiled_before_the_capture_is_named_and_not_reduced(tmp_path: Path) -> None:
    @torch.compile(backend="eager")
    def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0] - torch.log1p(y)).pow(2).mean()

    def loop() -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = plain_net()
        optimizer = torch.optim.Adam(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo looks at `grad` of tensors that are no leaves
            for step, x, y in batches():
                update(optimizer, loss_of(model(x), y - (9.0 if step == BAD_STEP else 0.0)) * 2.0)
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", None)
    assert snapshot.failure.site is not None and "loss_of(model(x)" in snapshot.failure.site.code
    assert re.search(r"calls `.*loss_of` at .*py:\d+.*`TORCH_COMPILE_DISABLE=1`", snapshot.fidelity_note or "")
    with pytest.raises(NotReproduced, match="no recorded call computes") as raised:
        shrink(snapshot)
    assert "TORCH_COMPILE_DISABLE=1" in (raised.value.hint or "")


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", ["4.weight", "1.running_mean"])
def test_state_that_is_bad_from_the_start_is_named(name: str, watch: str, tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model = net().eval()
        with torch.no_grad():
            operator.attrgetter(name)(model).flatten()[3] = math.nan
        optimizer = torch.optim.Adam(model.parameters())
        for _, x, y in batches():
            update(optimizer, classify(model, x, y))
        return ending(model)

    snapshot = check_caught(loop, tmp_path, watch=watch)
    assert where(snapshot) == (0, "forward", None)
    assert snapshot.failure.input_name is not None and snapshot.failure.input_name.endswith(name)


@pytest.mark.parametrize("loop", list(LOOPS)[::8], ids=lambda loop: loop.__name__)
def test_nothing_is_captured_when_values_are_not_to_be_judged(loop: Loop, tmp_path: Path) -> None:
    with Session(directory=tmp_path, after="continue", on=("exception",)) as session:
        loop()
    assert session.snapshots == []
