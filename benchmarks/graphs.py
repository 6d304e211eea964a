"""Training loops that fail, for the benchmark of the reducer: what is wrong, where, and a model to wrap around it.

A `Case` trains a few good steps and then meets a batch that a careful person could have been given as well. The stacks
of any number of torch calls have their fault planted in the middle; the small cases each fail in a way of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

INF = float("inf")
WIDTH = 32
BATCH, LENGTH = 4, 16
GOOD_STEPS = 2
Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Fault:
    """What is wrong: the last part of a call's name, a node of the backward pass, or a kind of failure; and where."""

    call: str
    phase: str = "forward"


@dataclass
class Case:
    """A model that returns its loss, and batches of which one makes it fail.

    ``check`` is what counts as failing when the reducer is to be told; ``accumulate`` the number of batches in a step.
    """

    model: nn.Module
    batches: Sequence[Batch]
    fault: Fault
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-4})
    check: str | None = None
    accumulate: int = 1

    def train(self) -> None:
        """An ordinary loop over the batches."""
        optimizer = self.make_optimizer(self.model.parameters(), **self.options)
        for number, batch in enumerate(self.batches, 1):
            self.model(*batch).backward()
            if number % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


# -- stacks of any size -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual feed-forward block: six torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * 0.5


class Attention(nn.Module):
    """Attention over what ``mask`` does not exclude. A row that excludes everything is a softmax of nothing."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2) / math.sqrt(WIDTH)
        return x + F.softmax(scores.masked_fill(mask, -INF), dim=-1) @ x


class Entropy(nn.Module):
    """Adds the entropy of the features. At a low temperature some probability is 0, and 0 * log 0 is not a number."""

    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        p = F.softmax(x / temperature, dim=-1)
        return x + (p * p.log()).sum(dim=-1, keepdim=True)


class MaskedMean(nn.Module):
    """Takes away the mean over the positions to keep. Where there are none it is 0 / 0."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x - (x * keep).sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True)


class Stack(nn.Module):
    """Blocks around a part that can fail, and a loss."""

    def __init__(self, part: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.before = nn.Sequential(*(Block() for _ in range(num_blocks // 2)))
        self.part = part
        self.after = nn.Sequential(*(Block() for _ in range(num_blocks - num_blocks // 2)))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.after(self.part(self.before(x), given)).square().mean()


def _masks() -> tuple[torch.Tensor, torch.Tensor]:
    good = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    bad = good.clone()
    bad[2, 5] = True  # nothing left to look at
    return good, bad


def _temperatures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(1.0), torch.tensor(1e-3)


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    good = torch.ones(BATCH, LENGTH, 1)
    bad = good.clone()
    bad[1] = 0.0  # an empty sample
    return good, bad


# name -> the part, its torch calls, what it is given (good and bad), the call at fault
PARTS: dict[str, tuple[type[nn.Module], int, Callable[[], tuple[torch.Tensor, torch.Tensor]], str]] = {
    "masked_softmax": (Attention, 7, _masks, "softmax"),
    "zero_times_log_zero": (Entropy, 6, _temperatures, "log"),
    "zero_by_zero": (MaskedMean, 5, _positions, "div"),
}
_BLOCK_CALLS, _LOSS_CALLS = 6, 2


def make_stack(name: str, num_calls: int) -> Case:
    """A stack of at most ``num_calls`` torch calls in its forward pass with this part in the middle."""
    torch.manual_seed(0)
    part, part_calls, given, call = PARTS[name]
    model = Stack(part(), max(2, (num_calls - part_calls - _LOSS_CALLS) // _BLOCK_CALLS))
    good, bad = given()
    batches = [(torch.randn(BATCH, LENGTH, WIDTH), good) for _ in range(GOOD_STEPS)]
    return Case(model, [*batches, (torch.randn(BATCH, LENGTH, WIDTH), bad)], Fault(call))


# -- small cases, each failing in a way of its own --------------------------------------------------------------------


class Distance(nn.Module):
    """Distances between neighbours, with the root of zero avoided in the forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.blocks(x)
        squares = (z[1:] - z[:-1]).square().sum(dim=-1)
        return torch.where(squares > 0, squares.sqrt(), squares).mean()


def make_backward_only() -> Case:
    """The loss is finite, the gradient of ``sqrt`` at zero is not."""
    torch.manual_seed(0)
    twice = torch.randn(6, WIDTH)
    twice[3] = twice[2]
    return Case(Distance(), [*_rows(6), (twice,)], Fault("sqrt", "backward"))


class Kept(nn.Module):
    """Features in proportion to what dropout has kept of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.few = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = F.dropout(self.few(self.block(x)).exp(), 0.5, training=self.training)
        return (kept / kept.sum(dim=-1, keepdim=True)).square().mean()


def make_dropout_dependent() -> Case:
    """0 / 0 where dropout happens to drop all four features of a row: once in 16 rows."""
    torch.manual_seed(0)
    return Case(Kept(), _rows(2, steps=60), Fault("div"))


class InPlaceRoot(nn.Module):
    """A norm whose root is taken in place, which a leaf does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        squares = (self.blocks(x) * keep).square().sum(dim=-1)
        return squares.sqrt_().mean()


def make_in_place() -> Case:
    """The gradient of an in-place root at zero: needs a call before it."""
    torch.manual_seed(0)
    keep = torch.ones(6, 1)
    empty = keep.clone()
    empty[4] = 0.0
    good, last = _rows(6), torch.randn(6, WIDTH)
    return Case(InPlaceRoot(), [*((x, keep) for (x,) in good), (last, empty)], Fault("sqrt_", "backward"))


class Lookup(nn.Module):
    """An embedding of which the batches use a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.block = Block()

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.block(self.table(index)).square().mean()


def make_optimizer_only() -> Case:
    """Adam without eps: a row that no batch uses has a gradient of zero, and its update is 0 / 0."""
    torch.manual_seed(0)
    batches = [(torch.randint(10, (3, 5)),) for _ in range(GOOD_STEPS)]
    options = {"lr": 1e-3, "eps": 0.0}
    return Case(Lookup(), batches, Fault("step", "optimizer"), torch.optim.Adam, options)


class TwoHeads(nn.Module):
    """Two heads of one trunk in half precision, each scaled up as a grad scaler would."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float16))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        first, second = torch.tanh(self.trunk), torch.sin(self.trunk)
        return (first * scale).sum() + (second * scale).sum()


def make_two_calls() -> Case:
    """Two gradients that are finite by themselves overflow where they are added up."""
    scales = [torch.full((WIDTH,), number, dtype=torch.float16) for number in (1.0, 64.0, 4e4)]
    return Case(TwoHeads(), [(scale,) for scale in scales], Fault("AccumulateGrad", "backward"))


class Squeezed(nn.Module):
    """Loses the batch dimension of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(x)).squeeze(), target)


def make_exception() -> Case:
    """The last batch has one sample. The forward pass lets that through; an error is raised in the backward pass."""
    torch.manual_seed(0)
    batches = [(torch.randn(size, WIDTH), torch.arange(size) % 5) for size in (8, 8, 1)]
    return Case(Squeezed(), batches, Fault("backward", "backward"))


class HalfPower(nn.Module):
    """A mean square in half precision, scaled down too late; compiled code keeps single precision in between."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * self.scale) + x
        return (y * y * 1e-3).mean()


def make_compile_mismatch() -> Case:
    """Eager code overflows where compiled code does not."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, WIDTH).half(),) for _ in range(GOOD_STEPS)]
    return Case(
        HalfPower(), [*batches, (torch.full((6, WIDTH), 300.0).half(),)], Fault("mismatch"), check="mismatch:compile"
    )


def _rows(size: int, steps: int = GOOD_STEPS) -> list[Batch]:
    return [(torch.randn(size, WIDTH),) for _ in range(steps)]


KINDS: dict[str, Callable[[], Case]] = {
    "backward_only": make_backward_only,
    "dropout_dependent": make_dropout_dependent,
    "in_place": make_in_place,
    "optimizer_only": make_optimizer_only,
    "two_calls": make_two_calls,
    "exception": make_exception,
    "compile_mismatch": make_compile_mismatch,
}


# -- a large model ----------------------------------------------------------------------------------------------------


class Gpt2(nn.Module):
    """GPT-2 of transformers with random weights and eager attention; takes a mask to add to the scores.

    The loss keeps the embeddings of the texts in a batch apart.
    """

    def __init__(self, num_layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        heads = max(1, width // 64)
        config = GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=num_layers, n_head=heads, use_cache=False)
        config._attn_implementation = "eager"
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss = self.gpt(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        first, second = self.gpt.transformer.wte(tokens).sum(dim=1)
        return loss - 1e-3 * (first - second).square().sum().sqrt()


GPT2_FAULTS = {"mask": Fault("softmax"), "weight": Fault("matmul"), "gradient": Fault("sqrt", "backward")}


def make_gpt2(cause: str, num_layers: int = 12, width: int = 768, vocabulary: int = 50257, length: int = 64) -> Case:
    """A step over several batches.

    ``mask``: in the last batch a position of padding may look at nothing. ``weight``: the middle layer's projection to
    queries and keys has run away, so that their products overflow in the first batch. ``gradient``: both texts of the
    last batch are the same, and the distance between them has no gradient.
    """
    torch.manual_seed(0)
    model = Gpt2(num_layers, width, vocabulary)
    causal = torch.zeros(2, 1, length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -INF)
    padded = causal.clone()
    if cause == "mask":
        padded[1, :, :, :3] = -INF  # three positions of padding on the left
    if cause == "weight":
        with torch.no_grad():
            model.gpt.transformer.h[num_layers // 2].attn.c_attn.weight.mul_(1e21)
    batches = [(torch.randint(vocabulary, (2, length)), mask) for mask in (causal, causal, causal, padded)]
    if cause == "gradient":
        batches[-1][0][1] = batches[-1][0][0]
    return Case(model, batches, GPT2_FAULTS[cause], make_optimizer=torch.optim.AdamW, accumulate=len(batches))
