"""The models that the benchmarks train: four sizes of step, from 2 ms to a few hundred on one slow core.

Each is an ordinary training loop over synthetic batches that fit in memory. Two trainings of one shape start with the
same weights and see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

NUM_BATCHES = 8
VOCABULARY = 128
CLASSES = 10
Check = Callable[[torch.Tensor], None]


@dataclass
class Training:
    """A model in training. ``clip`` is the norm gradients are clipped to, ``None`` for no clipping."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    clip: float | None = None
    steps: int = 0

    def step(self, check: Check | None = None) -> torch.Tensor:
        """One step of the loop; ``check`` is called with the loss when the gradients are there. Returns the loss."""
        inputs, targets = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if check is not None:
            check(loss)
        self.optimizer.step()
        return loss

    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state: what one copy of the training state takes."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, state)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- mlp --------------------------------------------------------------------------------------------------------------


def make_mlp() -> Training:
    """784-256-128-10, batch 64, Adam."""
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    batches = [(torch.randn(64, 784), torch.randint(CLASSES, (64,))) for _ in range(NUM_BATCHES)]
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches)


# -- transformers -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention over ``(batch, length, width)``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class LanguageModel(nn.Module):
    """Tokens ``(batch, length)`` to logits ``(batch, length, vocabulary)``."""

    def __init__(self, depth: int, width: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def _token_batches(batch: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    texts = [torch.randint(VOCABULARY, (batch, length + 1)) for _ in range(NUM_BATCHES)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def make_gpt() -> Training:
    """6 layers, width 256, sequence 128, batch 8, AdamW, clipped gradients."""
    model = LanguageModel(depth=6, width=256, num_heads=8, length=128)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), _token_batches(8, 128), clip=1.0)


def make_narrow() -> Training:
    """A deep narrow transformer: 16 layers of width 48 (197 modules), sequence 32, batch 4, AdamW."""
    model = LanguageModel(depth=16, width=48, num_heads=4, length=32)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), _token_batches(4, 32))


# -- cnn --------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


def make_cnn() -> Training:
    """ResNet-18 for 32x32 images with a quarter of its channels, batch 16, SGD with momentum."""
    widths = (16, 32, 64, 128)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = widths[0]
    for width in widths:
        layers += [Residual(before, width, 1 if width == before else 2), Residual(width, width, 1)]
        before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    batches = [(torch.randn(16, 3, 32, 32), torch.randint(CLASSES, (16,))) for _ in range(NUM_BATCHES)]
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches)


SHAPES: dict[str, Callable[[], Training]] = {
    "mlp": make_mlp,
    "gpt": make_gpt,
    "cnn": make_cnn,
    "narrow": make_narrow,
}


def make(shape: str) -> Training:
    """A new training of the shape, always from the same seed."""
    torch.manual_seed(0)
    return SHAPES[shape]()
