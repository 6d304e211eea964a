"""Custom autograd functions become ordinary calls: values and gradients of the program are those of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.program.interpreter import run
from reprokit.program.ir import OPAQUE, Program
from reprokit.program.trace import InputName, Tracer, recording

Step = Callable[..., torch.Tensor]


class Saves(torch.autograd.Function):
    """Keeps an input and its own output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: float) -> torch.Tensor:
        out = (x * x + 1.0).pow(power)
        ctx.save_for_backward(x, out)
        ctx.power = power
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, out = ctx.saved_tensors
        return grads[0] * ctx.power * 2 * x * out / (x * x + 1.0), None


class StraightThrough(torch.autograd.Function):
    """A gradient that is not the one of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class Reversal(torch.autograd.Function):
    """Returns what it was given, as a view."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return -grads[0]


class Halves(torch.autograd.Function):
    """Two results, of which one may stay unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return (x * weight)[:2], (x * weight)[2:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = torch.cat(grads)
        return grad * weight, grad * x


class Recomputes(torch.autograd.Function):
    """Differentiates inside its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad(x.tanh(), x, grads[0])
        return found


class Outside(torch.autograd.Function):
    """Computes in NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sinh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0].cosh()


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = Saves.apply(x * w, 1.5)
    (hidden * 2).sum().backward(retain_graph=True)
    (hidden * w).sum().backward()
    return hidden


def unused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, _ = Halves.apply(x, w)
    return first.pow(2).sum() + (x * w).sum()


STEPS: dict[str, Step] = {
    "saved": lambda x, w: Saves.apply(x * w, 1.5).sum(),
    "chained": lambda x, w: (Saves.apply(Saves.apply(x, 0.5) * w, 2.0) * x).sum(),
    "beside": lambda x, w: (StraightThrough.apply(x * w) * (x * w)).sum(),
    "reversed": lambda x, w: (Reversal.apply(x * w) * w).exp().sum(),
    "both": lambda x, w: sum(part.exp().sum() for part in Halves.apply(x, w)),  # type: ignore[misc]
    "unused": unused,
    "recomputed": lambda x, w: Recomputes.apply(x * w).pow(2).sum(),
    "outside": lambda x, w: (Outside.apply(x * w) * w).sum(),
    "twice": twice,
}


def traced(step: Step, **tensors: torch.Tensor) -> tuple[Program, Tracer]:
    names = {id(tensor): InputName(name) for name, tensor in tensors.items()}
    tracer = Tracer(lambda tensor: names.get(id(tensor)))
    with recording(tracer):
        result = step(**tensors)
        if result.dim() == 0:
            result.backward()
    return tracer.program(), tracer


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_of_the_step(name: str) -> None:
    x = torch.tensor([0.5, -1.2, 2.0, 0.3], requires_grad=True)
    w = torch.tensor([1.5, 0.7, -0.4, 2.2], requires_grad=True)
    program, tracer = traced(STEPS[name], x=x, w=w)
    outcome = run(program, tracer.tensors)
    assert outcome.error is None
    for leaf in (x, w):
        value = tracer.value_of(leaf)
        assert value is not None and leaf.grad is not None
        torch.testing.assert_close(outcome.gradients[value], leaf.grad)


def test_what_torch_calls_do_not_tell_is_opaque() -> None:
    x, w = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    inside, _ = traced(STEPS["chained"], x=x, w=w)
    outside, _ = traced(STEPS["outside"], x=x, w=w)
    assert not any(call.target == OPAQUE for call in inside.calls)
    (call,) = (call for call in outside.calls if call.target == OPAQUE)
    assert call.kwargs["name"] == "Outside" and "np.sinh" in call.kwargs["source"]


class BadBackward(torch.autograd.Function):
    """Divides by something that may be zero, in its backward only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x / x


def test_a_bad_gradient_is_followed_into_and_through_a_backward() -> None:
    zero = torch.tensor([1.0, 0.0], requires_grad=True)
    program, tracer = traced(lambda x: BadBackward.apply(x * 1.0).sum(), x=zero)
    inside = locate(program, tracer.tensors)
    assert inside is not None
    assert (inside.phase, inside.call, inside.backward_node) == ("backward", "torch.Tensor.div", None)
    program, tracer = traced(lambda x: StraightThrough.apply((x * x).sqrt() * x).sum(), x=zero)
    before = locate(program, tracer.tensors)
    assert before is not None
    assert (before.call, before.backward_node) == ("torch.Tensor.sqrt", "SqrtBackward0")
    program, tracer = traced(lambda x: (StraightThrough.apply(x * 1.0) * x).sqrt().sum() * 0.0, x=zero)
    after = locate(program, tracer.tensors)
    assert after is not None
    assert (after.call, after.backward_node) == ("torch.Tensor.sqrt", "SqrtBackward0")
