"""Compilers with one faulty decomposition each, as upstream bugs were; the rest of each is `aot_eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

aten: Any = torch.ops.aten
Tensor = torch.Tensor


def _run(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def _faulty(operator: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    return aot_autograd(fw_compiler=_run, decompositions={operator: decomposition})


def _tanh(x: Tensor) -> Tensor:
    """Overflows where the quotient is one."""
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Without the largest element taken away first."""
    return x - x.exp().sum(dim, keepdim=True).log()


def _divided(x: Tensor, y: Any) -> Tensor:
    """Integers are divided as integers."""
    if isinstance(y, Tensor) and not (x.is_floating_point() or y.is_floating_point()):
        return torch.floor_divide(x, y).float()
    return x * torch.reciprocal(y) if isinstance(y, Tensor) else x * (1.0 / y)


def _slice_scatter(x: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """The write into a view is lost."""
    return x.clone()


def _zeros_like(x: Tensor, **options: Any) -> Tensor:
    """Memory that nobody has filled."""
    return torch.full_like(x, float("nan"))


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    """Hands a NaN on, where `fmax` drops it."""
    return torch.maximum(x, y)


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Sums what may be too large."""
    return x.exp().cumsum(dim).log()


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Of what goes to one place only the last is kept."""
    return torch.scatter(x, dim, index, src)


def _sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Divides by a result that may be zero."""
    return grad * y * y * (torch.reciprocal(y) - 1)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Multiplies with the mask, also what is not taken."""
    return condition * x + torch.logical_not(condition) * y


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """A variance as a difference of squares, which may be negative."""
    mean = x.mean(-1, keepdim=True)
    rstd = (x.square().mean(-1, keepdim=True) - mean.square() + eps).rsqrt()
    normed = (x - mean) * rstd
    return normed * weight + bias, mean, rstd


tanh = _faulty(aten.tanh.default, _tanh)
log_softmax = _faulty(aten._log_softmax.default, _log_softmax)
division = _faulty(aten.div.Tensor, _divided)
views = _faulty(aten.slice_scatter.default, _slice_scatter)
empty = _faulty(aten.zeros_like.default, _zeros_like)
fmax = _faulty(aten.fmax.default, _fmax)
logcumsumexp = _faulty(aten.logcumsumexp.default, _logcumsumexp)
scatter_add = _faulty(aten.scatter_add.default, _scatter_add)
sigmoid_backward = _faulty(aten.sigmoid_backward.default, _sigmoid_backward)
where = _faulty(aten.where.self, _where)
layer_norm = _faulty(aten.native_layer_norm.default, _layer_norm)
