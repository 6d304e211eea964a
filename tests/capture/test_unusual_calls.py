"""Ordinary training in less usual ways: keywords, iterators, given gradients, captures that are paused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprokit.capture.recorder import Recorder
from reprokit.capture.session import Session
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    WATCHES,
    Loop,
    batches,
    check_caught,
    check_exact,
    check_silent,
    classify,
    divided_loss,
    ending,
    fidelity,
    net,
    plain_net,
    plain_training,
    rooted_loss,
    update,
    where,
)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def backward_of_masked(masked: torch.Tensor, gradient: torch.Tensor, model: nn.Module) -> None:
    masked.backward(gradient)


def grad_of_masked(masked: torch.Tensor, gradient: torch.Tensor, model: nn.Module) -> None:
    found = torch.autograd.grad(masked, parameters_of(model), grad_outputs=gradient)
    for parameter, grad in zip(model.parameters(), found, strict=True):
        parameter.grad = grad


@pytest.mark.parametrize("differentiate", [backward_of_masked, grad_of_masked])
@pytest.mark.parametrize("watch", WATCHES)
def test_a_wanted_infinity_with_a_given_gradient_is_no_failure(
    differentiate: Callable[..., None], watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for _, x, _ in batches():
            mask = x.sum(1, keepdim=True) > 0
            masked = model(x).masked_fill(mask, float("-inf"))
            optimizer.zero_grad()
            differentiate(masked, torch.where(mask, 0.0, 1.0).expand(-1, 2), model)
            optimizer.step()
        return ending(model)

    check_silent(loop, tmp_path, capsys, watch=watch, history=2)


BACKWARDS: dict[str, Callable[[torch.Tensor, nn.Module], Any]] = {
    "iterator of inputs": lambda loss, model: loss.backward(inputs=iter(parameters_of(model))),
    "keyword tensors": lambda loss, model: torch.autograd.backward(tensors=loss),
    "gradient before tensors": lambda loss, model: torch.autograd.backward(grad_tensors=torch.ones(()), tensors=loss),
    "list of tensors": lambda loss, model: torch.autograd.backward([loss]),
}


@pytest.mark.parametrize("how", BACKWARDS)
def test_every_way_to_call_backward(how: str, tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for step, x, y in batches():
            optimizer.zero_grad()
            BACKWARDS[how](divided_loss(model(x), y, step == BAD_STEP), model)
            optimizer.step()
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.Tensor.div")
    assert fidelity(snapshot) == EXACT
    assert snapshot.micro_step == 0
    assert [item.loss is not None for item in snapshot.timeline[:BAD_STEP]] == [True] * BAD_STEP


def test_keywords_of_grad(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for step, x, y in batches():
            loss = divided_loss(model(x), y, step == BAD_STEP)
            found = torch.autograd.grad(inputs=iter(parameters_of(model)), outputs=loss)
            for parameter, grad in zip(model.parameters(), found, strict=True):
                parameter.grad = grad
            optimizer.step()
        return ending(model)

    check_exact((BAD_STEP, "forward", "torch.Tensor.div"), loop, tmp_path)


def test_parameters_to_clip_come_from_an_iterator_by_keyword(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
        for step, x, y in batches():
            optimizer.zero_grad()
            rooted_loss(model(x), y, step == BAD_STEP).backward()
            nn.utils.clip_grad_norm_(parameters=(p for p in model.parameters()), max_norm=1e-3)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
        return ending(model)

    snapshot = check_caught(loop, tmp_path, history=100)
    assert snapshot.step == BAD_STEP
    assert fidelity(snapshot) == EXACT
    assert all(item.grad_norm is not None for item in snapshot.timeline[:BAD_STEP])


def test_results_that_were_let_go_do_not_count_against_those_of_the_step(tmp_path: Path) -> None:
    """Hundreds of MiB of evaluation, then a step whose origin is a call without gradient."""

    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for step, x, y in batches():
            for _ in range(80):
                torch.ones(2**20).mul(2.0)
            scaled = torch.log(x.sum(1, keepdim=True) * 0 - (1.0 if step == BAD_STEP else -1.0)) + x
            update(optimizer, classify(model, scaled, y))
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.log")


# -- a session that is paused, over, or cannot begin ----------------------------------------------------------------


def bad_steps(model: nn.Module, session: Session | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, y in batches():
        update(optimizer, divided_loss(model(x), y, step == BAD_STEP))
        if session is not None:
            session.pause()
            session.resume()


def test_a_session_that_is_over_does_not_come_back(tmp_path: Path) -> None:
    with Session(directory=tmp_path, after="continue") as session:
        for _ in range(2):
            bad_steps(net(), session)
    assert len(session.snapshots) == 1


def test_a_capture_that_cannot_begin_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(recorder: Recorder) -> None:
        raise OSError("injected")

    before = nn.Module.__call__, torch.Tensor.backward, torch.optim.Optimizer.zero_grad
    monkeypatch.setattr(Recorder, "install", fail)
    with Session(directory=tmp_path) as session:
        bad_steps(plain_net(), None)
    assert session.snapshots == [] and Session.active is None
    assert before == (nn.Module.__call__, torch.Tensor.backward, torch.optim.Optimizer.zero_grad)
    assert capsys.readouterr().err == "reprokit: cannot watch this run (OSError: injected); it goes on unwatched\n"


def test_quiet_says_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(import_module("reprokit.capture.fidelity"), "save", fail)
    with Session(directory=tmp_path, quiet=True, after="continue") as session:
        bad_steps(plain_net(), None)
    assert session.snapshots == []
    assert "could not save the failing step (OSError: no space)" in capsys.readouterr().err


class Causal(nn.Module):
    """Attention with a mask that nested `torch.vmap` makes, and a network behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x))
        mask = torch.vmap(torch.vmap(lambda q, k: k <= q, in_dims=(None, 0)), in_dims=(0, None))(places, places)
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        noise = torch.vmap(lambda row: row + torch.rand(()), randomness="different")(x.detach())
        return self.body(mixed + 0.01 * noise)


def masks_made_by_vmap() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, y in batches():
        update(optimizer, rooted_loss(model(x), y, step == BAD_STEP))
    return ending(model)


def other_parameters_by_functional_call() -> list[torch.Tensor]:
    """As in meta-learning: the inner step's parameters carry a graph, and batch normalisation has its statistics."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, y in batches():
        known = dict(model.named_parameters())
        inner = torch.nn.functional.cross_entropy(torch.func.functional_call(model, known, (x,)), y)
        grads = torch.autograd.grad(inner, list(known.values()), create_graph=True)
        moved = {name: p - 0.1 * grad for (name, p), grad in zip(known.items(), grads, strict=True)}
        update(optimizer, rooted_loss(torch.func.functional_call(model, moved, (x,)), y, step == BAD_STEP))
    return ending(model)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loop", [masks_made_by_vmap, other_parameters_by_functional_call])
def test_transforms_of_functions(loop: Loop, watch: str, tmp_path: Path) -> None:
    check_exact((BAD_STEP, "backward", "torch.Tensor.sqrt"), loop, tmp_path, watch=watch)


class Redirected(nn.Module):
    """Called as Lightning does it under DDP: ``forward`` stands for ``training_step`` in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], bad: bool) -> torch.Tensor:
        x, y = batch
        return divided_loss(self(x), y, bad)

    def run(self, *args: Any) -> torch.Tensor:
        original = self.forward

        def once(*given: Any) -> torch.Tensor:
            self.forward = original
            return self.training_step(*given)

        self.forward = once
        return self(*args)


@pytest.mark.parametrize("watch", WATCHES)
def test_a_forward_that_is_redirected_for_one_call(watch: str, tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model = Redirected()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x, y in batches():
            update(optimizer, model.run((x, y), step == BAD_STEP))
        assert model.forward == model.__class__.forward.__get__(model)
        return ending(model)

    check_exact((BAD_STEP, "forward", "torch.Tensor.div"), loop, tmp_path, watch=watch)


class Normalize(nn.Module):
    """As in torchvision, with numbers that the transform is given."""

    def forward(self, x: torch.Tensor, spread: float) -> torch.Tensor:
        return (x - x.mean()).div_(torch.as_tensor(spread))


@pytest.mark.parametrize("is_data_bad", [False, True])
def test_data_prepared_by_hundreds_of_calls(is_data_bad: bool, tmp_path: Path) -> None:
    """All of them are calls of the step."""
    how = Normalize()

    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [torch.arange(4.0) + row for row in range(250)]
        data = torch.stack([how(x, 0.0 if is_data_bad and row == 200 else 2.0) for row, x in enumerate(rows)])
        for _ in range(2):
            update(optimizer, model(data).pow(2).mul(1e25).square().mean())
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (0, "forward", "torch.Tensor.div_" if is_data_bad else "torch.Tensor.square")
    assert fidelity(snapshot) == EXACT
