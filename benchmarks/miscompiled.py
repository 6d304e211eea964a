"""Training runs that fail only where they are compiled: ``python miscompiled.py CASE``.

Each trains a few good steps and then meets a batch for which the compiler's fault matters; eager it goes on. The cases
differ in what is compiled: the model, the loss, or the whole step with backward pass and update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import miscompilers
import torch
from torch import nn
from torch.nn import functional as F

BAD_STEP, STEPS = 4, 7
Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def tanh(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h + torch.tanh(x[:, :2] * x[:, 2:]), y)


def log_softmax(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(h * x.abs().amax(1, keepdim=True), dim=1), y)


def division(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    share = (y + 1).sum() / (4 * y.numel() - 3 * (x.amax() > 50).int() * y.numel())
    return F.cross_entropy(h, y) - (share.clamp(max=1.0) * h.square().mean().clamp(max=1.0) + share).log() * 0.01


def views(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.zeros(6, 4)
    rows[:, 1:3] = h.square() + 1.0
    return F.cross_entropy(h / rows.sum(1, keepdim=True), y)


def empty(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h + torch.zeros_like(h), y)


def fmax(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    ratio = x[:, :2] / x[:, :2]  # NaN where a feature is missing
    return F.cross_entropy(h * torch.fmax(ratio, torch.full_like(ratio, 0.5)), y)


def logcumsumexp(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h, y) + torch.logcumsumexp(x.amax(1) + h.mean(1), dim=0).mean() * 1e-3


def scatter_add(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(2).scatter_add(0, y, torch.ones(6))
    return F.cross_entropy(h, y) + (counts.sum() - 5.5).sqrt() * h.square().mean() * 0.1


def sigmoid_backward(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h * torch.sigmoid(h - x.abs().amax(1, keepdim=True)), y)


def where(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    size = x.abs().sum(1, keepdim=True)
    return F.cross_entropy(h * torch.where(size > 0, 1.0 / size, torch.ones_like(size)), y)


def layer_norm(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = F.layer_norm(x * 1e3 + h.repeat(1, 2), (4,), torch.ones(4), torch.zeros(4))
    return F.cross_entropy(h + rows[:, :2], y)


def half_precision(h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Eager rounds the square as ``x[:, 3]`` was; fused code does not, and takes the root of what is below zero."""
    a, square = x[:, 2].half(), x[:, 3].half()
    return F.cross_entropy(h, y) + (a * a - square).sqrt().float().mean() * 0.1 * h.square().mean().exp()


@dataclass(frozen=True)
class Case:
    """A loss, the compiler, what is compiled, and what the bad batch is multiplied with or becomes."""

    loss: Loss
    compiler: Any
    part: str
    spoil: Callable[[Tensor], Tensor] = lambda x: x * 1e3


def _halves(x: Tensor) -> Tensor:
    a = x[:, 2].half()
    return torch.cat([x[:, :3], (a * a)[:, None].float()], 1)


CASES = {
    "tanh": Case(tanh, miscompilers.tanh, "loss"),
    "log_softmax": Case(log_softmax, miscompilers.log_softmax, "step"),
    "division": Case(division, miscompilers.division, "loss"),
    "views": Case(views, miscompilers.views, "step"),
    "empty": Case(empty, miscompilers.empty, "loss"),
    "fmax": Case(fmax, miscompilers.fmax, "step", lambda x: x * (torch.arange(4) > 0)),
    "logcumsumexp": Case(logcumsumexp, miscompilers.logcumsumexp, "model"),
    "scatter_add": Case(scatter_add, miscompilers.scatter_add, "loss"),
    "sigmoid_backward": Case(sigmoid_backward, miscompilers.sigmoid_backward, "step"),
    "where": Case(where, miscompilers.where, "model", lambda x: x * 0),
    "layer_norm": Case(layer_norm, miscompilers.layer_norm, "model", lambda x: torch.full_like(x, 3.3)),
    "half_precision": Case(half_precision, "inductor", "loss", _halves),
}


class Trained(nn.Module):
    """A network with its loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(4, 16), nn.Linear(16, 2), loss

    def logits(self, x: Tensor) -> Tensor:
        """The output of the network for the clamped features of the batch."""
        return self.second(F.gelu(F.normalize(self.first(x.clamp(-3, 3)), dim=1)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.logits(x), x, y)


def train(case: Case) -> None:
    torch.manual_seed(0)
    model = Trained(case.loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    whole = model
    if case.part == "loss":
        model.loss = torch.compile(case.loss, backend=case.compiler)

        def whole(x: Tensor, y: Tensor) -> Tensor:
            return model.loss(model.logits(x), x, y)

    if case.part == "model":
        whole = torch.compile(model, backend=case.compiler)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = whole(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch.compile(step, backend=case.compiler) if case.part == "step" else step
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 2, (6,), generator=generator)
        x = x.sign() * (x.abs() + 0.1)
        if case.loss is half_precision:
            x = torch.cat([x[:, :3], torch.zeros(6, 1)], 1)
        print(number, run(case.spoil(x) if number == BAD_STEP else x, y).item(), flush=True)


if __name__ == "__main__":
    train(CASES[sys.argv[1]])
