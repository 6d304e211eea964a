"""Small models whose training step fails, recorded with their parameters: what the tests of the context start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from reprokit.program.trace import InputName, Tracer, recording
from reprokit.snapshot.format import Snapshot
from tests.shrink.failing import seeded, snapshot_of


def record_model(model: nn.Module, step: Callable[..., Any], **tensors: torch.Tensor) -> Snapshot:
    """A snapshot of a function of named tensors that uses a model; a tensor it returns is looked at in the end."""
    names = {id(tensor): InputName(name) for name, tensor in tensors.items()}
    names.update({id(parameter): InputName(name, "parameter") for name, parameter in model.named_parameters()})
    names.update({id(buffer): InputName(name, "buffer") for name, buffer in model.named_buffers()})
    tracer = Tracer(lambda tensor: names.get(id(tensor)))
    result = None
    with recording(tracer):
        try:
            result = step(**tensors)
        except (RuntimeError, IndexError, ValueError):
            result = None
    value = tracer.value_of(result) if isinstance(result, torch.Tensor) else None
    return snapshot_of(tracer.program(() if value is None else (value,)), dict(tracer.tensors))


class FeedForward(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Growing(nn.Module):
    """Activations grow from layer to layer until an exponential overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 100
        return self.head(x).exp()


class MaskedAttention(nn.Module):
    """Attention by hand over keys that may all be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(padding[:, None], float("-inf"))
        return F.softmax(scores, dim=-1) @ x


class Encoder(nn.Module):
    """Attention between other layers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.attention = attention
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(x))
        attended = self.attention(x, padding)
        return self.head(attended).sum()


class TorchAttention(nn.Module):
    """Attention of torch over keys that may all be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        out, _ = self.attn(x, x, x, key_padding_mask=padding)
        return torch.as_tensor(out)


class LogFilter(nn.Module):
    """A logarithm behind a `where`, which protects the value but not the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = F.linear(x.square(), self.weight)
        return torch.where(energy > 1e-9, energy.log(), torch.zeros_like(energy))


def growing() -> Snapshot:
    """An overflow that comes about over layers."""
    torch.manual_seed(1)
    model = Growing()
    return record_model(model, lambda x: model(x), x=seeded(2, 3, 8))


def masked_attention() -> Snapshot:
    """A fully masked row in attention by hand."""
    torch.manual_seed(1)
    model = Encoder(MaskedAttention())
    return record_model(model, lambda x, padding: model(x, padding), x=seeded(2, 3, 5), padding=_padding())


def torch_attention() -> Snapshot:
    """A fully masked row in attention of torch."""
    torch.manual_seed(1)
    model = Encoder(TorchAttention())
    return record_model(model, lambda x, padding: model(x, padding), x=seeded(2, 3, 5), padding=_padding())


def log_gradient() -> Snapshot:
    """A gradient that is NaN while the loss is finite."""
    model = nn.Sequential(LogFilter(), nn.Linear(4, 1))
    return record_model(model, lambda x: model(x).mean().backward(), x=seeded(3, 6))


def wrong_width() -> Snapshot:
    """An exception inside a module."""
    model = nn.Sequential(nn.Linear(6, 4), FeedForward(5))
    return record_model(model, lambda x: model(x), x=seeded(3, 6))


def centred(x: torch.Tensor) -> torch.Tensor:
    """A function of the loop's that divides by the mean size of what is left."""
    x = x - x.mean()
    return x / x.abs().mean()


def constant_batch() -> Snapshot:
    """A function of the loop's that fails on a constant."""
    model = nn.Linear(4, 2)
    return record_model(model, lambda x: model(centred(x)).sum(), x=torch.full((3, 4), 2.0))


class Scaling:
    """A loop whose variable is called like its function."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        return y - y.mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.scaled(x)
        other = self.scaled(scaled.tanh())
        return (scaled / (other * 0)).sum()


def function_called_twice() -> Snapshot:
    """A division by zero after two calls of one function."""
    return record_model(nn.Module(), Scaling().step, x=seeded(3, 4))


def huge_input() -> Snapshot:
    """A square that overflows because of what the step was given."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    return record_model(model, lambda x: (model(x) + x.square()).sum(), x=torch.full((2, 2), 1e30))


class Convolutional(nn.Module):
    """A chain of torch's layers in front of a division."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.body(x).mean((2, 3)) * 0
        return pooled / pooled.sum()


class Aggregates(nn.Module):
    """Three statistics side by side, of which the deviation has no gradient at zero."""

    def __init__(self, is_masked: bool) -> None:
        super().__init__()
        self.is_masked = is_masked

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        mean, largest = x.mean(-1), x.amax(-1)
        variance = (x * x).mean(-1) - mean * mean
        deviation = torch.sqrt(variance.clamp(min=0))
        if self.is_masked:
            deviation = torch.where(variance > 0, deviation, torch.zeros(()))
        return torch.cat([mean, largest.exp(), deviation, extra.sigmoid()])


def aggregates(*, is_masked: bool = False) -> Snapshot:
    """A gradient that needs nothing of what is computed beside it."""
    model = Aggregates(is_masked)

    def step(x: torch.Tensor, extra: torch.Tensor) -> None:
        model(x, extra).square().sum().backward()

    x = seeded(3, 4)
    x[1] = 2.0
    return record_model(model, step, x=x.requires_grad_(), extra=seeded(2, grad=True))


class Dropped(nn.Module):
    """A division by what dropout makes zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.fc(x))
        return hidden / hidden


def dropped() -> Snapshot:
    """A division by zero that needs a random outcome."""
    torch.manual_seed(1)
    model = Dropped()
    return record_model(model, lambda x: model(x).sum(), x=seeded(3, 4))


def convolutional() -> Snapshot:
    """A division by zero behind a chain of layers."""
    torch.manual_seed(1)
    model = Convolutional()
    return record_model(model, lambda x: model(x).sum(), x=seeded(2, 3, 6, 6))


def sparse_overflow() -> Snapshot:
    """A product that overflows because of a sparse matrix."""
    matrix = (torch.eye(3) * 1e25).to_sparse()
    return record_model(nn.Module(), lambda matrix, x: matrix @ x, matrix=matrix, x=seeded(3, 2) * 1e25)


def float8_weight() -> Snapshot:
    """A logarithm of zero, with a weight in a format that only stores."""
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(x) @ weight.float()).mul(0).log()

    return record_model(model, step, x=seeded(2, 4), weight=weight)


def _padding() -> torch.Tensor:
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True
    return padding


def distances(z: torch.Tensor) -> torch.Tensor:
    """Distances between all rows, of which that of a row from itself is zero."""
    squares = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(-1)
    return squares.sqrt()


def distances_within() -> Snapshot:
    """The derivative of a root at zero; the line that assigns the loss hands on what layers return."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2))

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = distances(net(batch))
        total = loss.mean()
        total.backward()
        return total

    return record_model(net, step, batch=seeded(4, 3))


def looked_up_pair() -> Snapshot:
    """A distance of zero between two rows of a table, which the loop itself looks up."""
    torch.manual_seed(0)
    table = nn.Embedding(50, 4)

    def step(pairs: torch.Tensor) -> None:
        first, second = pairs.unbind(0)
        first[3] = 49
        second[3] = 49
        apart = (table(first) - table(second)).pow(2).sum(-1)
        (torch.where(first == second, torch.zeros(()), apart.sqrt()) - 1).abs().mean().backward()

    return record_model(table, step, pairs=torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1)))


class Causal(nn.Module):
    """Scores by hand under a causal mask that the model keeps, and the padding of a batch."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        allowed = torch.ones(6, 6).tril()
        self.is_hidden = is_hidden
        self.register_buffer("mask", allowed == 0 if is_hidden else allowed)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        scores = scores.masked_fill(self.mask if self.is_hidden else self.mask == 0, float("-inf"))
        return scores.masked_fill(pad[:, None], float("-inf")).softmax(-1)


def causal(*, is_hidden: bool) -> Snapshot:
    """A sample padded on its left, where a causal mask shows nothing else; the mask holds 0 and 1, or flags."""
    model = Causal(is_hidden)
    pad = torch.zeros(3, 6, dtype=torch.bool)
    pad[1, :2] = True
    return record_model(model, lambda x, pad: model(x, pad), x=seeded(3, 6, 4), pad=pad)
