"""Small training loops of many shapes. Each takes ``bad``: whether its fourth step goes wrong; returns the final
parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.capture.traps_checks import BAD_STEP, batches, ending, net, update

Loop = Callable[[bool], list[torch.Tensor]]


def zero_if(bad: bool, step: int) -> float:
    return 0.0 if bad and step == BAD_STEP else 1.0


def functional_loss(bad: bool) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, x, y in batches():
        scale = torch.full((), zero_if(bad, step))
        loss = F.cross_entropy(model(x), y) * (scale / scale)
        update(optimizer, loss)
    return ending(model)


def criterion_module(bad: bool) -> list[torch.Tensor]:
    class Ratio(nn.Module):
        def forward(self, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            return loss.sum() / count.sum() * count.sum()

    model, criterion = net(), Ratio()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step, x, y in batches():
        count = torch.ones(8) * zero_if(bad, step)
        loss = criterion(F.cross_entropy(model(x), y, reduction="none") * count, count)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return ending(model)


def two_optimizers(bad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimize_generator = torch.optim.Adam(generator.parameters())
    optimize_critic = torch.optim.RMSprop(critic.parameters())
    for step, x, _ in batches():
        fake = generator(torch.randn(8, 3))
        real = x * zero_if(bad, step)
        slope_at = real.clone().requires_grad_(True)
        slope = torch.autograd.grad(critic(slope_at * slope_at.abs()).sum(), slope_at, create_graph=True)[0]
        penalty = (slope.pow(2).sum(1).sqrt() - 1).pow(2).mean()
        loss = critic(fake.detach()).mean() - critic(real).mean() + penalty
        update(optimize_critic, loss)
        update(optimize_generator, -critic(fake).mean())
    return ending(generator, critic)


def truncated_bptt(bad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.GRU(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = torch.zeros(1, 1, 6)
    for step, x, _ in batches():
        hidden = hidden.detach()
        output, hidden = model(x.unsqueeze(1), hidden)
        norm = (output * zero_if(bad, step)).norm(dim=-1, keepdim=True)
        loss = (output / norm).sum() if bad and step == BAD_STEP else (output / norm).pow(2).mean()
        update(optimizer, loss)
    return ending(model)


def checkpointed(bad: bool) -> list[torch.Tensor]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
            self.drop = nn.Dropout(0.3)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(torch.tanh(self.first(x)))

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            h = checkpoint(self.block, x, use_reentrant=False)
            h = checkpoint(self.block, x, use_reentrant=True) + h
            return self.second(h) * (scale / scale)

    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, y in batches():
        loss = F.cross_entropy(model(x, torch.full((), zero_if(bad, step))), y)
        update(optimizer, loss)
    return ending(model)


class SignSGD(torch.optim.Optimizer):
    """A custom optimizer that divides by the mean gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad / p.grad.abs().mean(), alpha=group["lr"])


def custom_optimizer(bad: bool) -> list[torch.Tensor]:
    model = net()
    optimizer = SignSGD(model.parameters(), lr=1e-3)
    for step, x, y in batches():
        loss = F.cross_entropy(model(x), y) * zero_if(bad, step)
        update(optimizer, loss)
    return ending(model)


def learning_rate(bad: bool) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, x, y in batches():
        optimizer.param_groups[0]["lr"] = 1e-2 if not bad or step != BAD_STEP else float("inf")
        loss = F.cross_entropy(model(x), y)
        update(optimizer, loss)
    return ending(model)


def manual_update(bad: bool) -> list[torch.Tensor]:
    model = net()
    for step, x, y in batches():
        scale = torch.full((), zero_if(bad, step))
        loss = F.cross_entropy(model(x), y) * (scale / scale)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return ending(model)


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: dict[str, torch.Tensor]


def dataclass_output(bad: bool) -> list[torch.Tensor]:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, batch: dict[str, torch.Tensor], *, scale: float) -> Output:
            logits = self.body(batch["x"])
            return Output(F.cross_entropy(logits, batch["y"]), {"logits": logits * scale})

    model = Whole()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, y in batches():
        output = model({"x": x, "y": y}, scale=zero_if(bad, step))
        spread = output.logits["logits"].std()
        loss = output.loss + 1e-3 * (spread / spread)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return ending(model)


# loop -> (step, phase, acceptable origins, whether bit-exact replay is expected)
LOOPS: dict[Loop, tuple[int, str, set[str]]] = {
    functional_loss: (3, "forward", {"torch.Tensor.div"}),
    criterion_module: (3, "forward", {"torch.Tensor.div"}),
    two_optimizers: (3, "backward", {"torch.Tensor.sqrt"}),
    truncated_bptt: (3, "forward", {"torch.Tensor.div"}),
    checkpointed: (3, "forward", {"torch.Tensor.div"}),
    custom_optimizer: (3, "optimizer", {"torch.Tensor.div"}),
    learning_rate: (3, "optimizer", {"torch.optim.SGD.step"}),
    manual_update: (3, "forward", {"torch.Tensor.div"}),
    dataclass_output: (3, "forward", {"torch.Tensor.div"}),
}
