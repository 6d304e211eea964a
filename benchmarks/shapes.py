"""The trainings that the benchmarks watch: models of four sizes, and loops that make many calls of torch themselves.

Each is an ordinary training loop over synthetic batches that fit in memory. Two trainings of one shape start with the
same weights and see the same batches.
"""

from __future__ import annotations

import math
import random
from collections import deque
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
        loss = self.loss(inputs, targets)
        self.update(loss, check)
        return loss

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def update(self, loss: torch.Tensor, check: Check | None) -> None:
        """Backward pass and optimizer step."""
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if check is not None:
            check(loss)
        self.optimizer.step()

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


# -- loops that call torch themselves ---------------------------------------------------------------------------------


class LoopCalls(Training):
    """The loop prepares the batch, sums a loss of one class after the other and keeps statistics: about 100 calls."""

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of one batch: 13 calls prepare it, 53 make the loss, 33 keep statistics."""
        with torch.no_grad():
            order = torch.randperm(len(inputs))
            shift = 0.1 * torch.randn(len(inputs), 1)
            inputs = (inputs - inputs.mean(1, keepdim=True)) / (inputs.std(1, keepdim=True) + 1e-6) + shift
            inputs = inputs * 0.9 + inputs[order] * 0.1
        logits = self.model(inputs)
        loss = logits.pow(2).mean() * 1e-4
        for label in range(CLASSES):
            is_label = (targets == label).float()
            score = logits[:, label]
            loss = loss + F.binary_cross_entropy_with_logits(score, is_label)
        with torch.no_grad():
            predicted = logits.argmax(1)
            self.hits = [(predicted[targets == label] == label).sum() for label in range(CLASSES - 2)]
        return loss


def make_loop_calls() -> Training:
    """The MLP with about 100 small calls of torch in each step of the loop."""
    plain = make_mlp()
    return LoopCalls(plain.model, plain.optimizer, plain.batches)


class DataFirst(Training):
    """The loop makes its data with torch, sample by sample; a step makes twenty samples and trains nothing."""

    def step(self, check: Check | None = None) -> torch.Tensor:
        """Twenty samples of the adding problem: sequences with two marked numbers, whose sum is the target."""
        count, length = 20, 20
        values, marks, sums = torch.rand(count, 1, length), torch.zeros(count, 1, length), torch.zeros(count, 1)
        for sample in range(count):
            first, second = random.sample(range(length), 2)
            marks[sample, 0, first] = 1
            marks[sample, 0, second] = 1
            sums[sample, 0] = values[sample, 0, first] + values[sample, 0, second]
        return sums.sum()


def make_data_first() -> Training:
    """Data that a script makes before it trains: 124 calls of torch and no module."""
    model = nn.Linear(2, 1)
    return DataFirst(model, torch.optim.SGD(model.parameters(), lr=0.1), [])


class CartPole:
    """The environment of reinforcement learning, as Gym has it: two forces, a reward of 1 until the pole falls."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.reset()

    def reset(self) -> list[float]:
        """Begin an episode."""
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        self.age = 0
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        """The next state, the reward, and True if the episode is over."""
        x, speed, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turn * turn * sine) / 1.1
        angular = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1))
        linear = push - 0.05 * angular * cosine / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turn, turn + 0.02 * angular]
        self.age += 1
        is_over = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095 or self.age >= 500
        return self.state, 1.0, is_over


class DeepQ(Training):
    """Deep Q-learning as in PyTorch's tutorial: act, remember, learn from a sample of the memory, move the target."""

    def __init__(self, model: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer, [])
        self.target = target
        self.memory: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]] = deque(maxlen=2000)
        self.random = random.Random(0)
        self.environment = CartPole()
        self.state = torch.tensor(self.environment.state).unsqueeze(0)
        for _ in range(256):
            self.act()

    def act(self) -> None:
        """One step in the environment, half of them at random."""
        if self.random.random() > 0.5:
            with torch.no_grad():
                action = self.model(self.state).max(1).indices.view(1, 1)
        else:
            action = torch.tensor([[self.random.randrange(2)]])
        observed, reward, is_over = self.environment.step(int(action.item()))
        after = None if is_over else torch.tensor(observed).unsqueeze(0)
        self.memory.append((self.state, action, after, torch.tensor([reward])))
        self.state = torch.tensor(self.environment.reset()).unsqueeze(0) if after is None else after

    def step(self, check: Check | None = None) -> torch.Tensor:
        """Act once and learn once."""
        self.act()
        states, actions, afters, rewards = zip(*self.random.sample(self.memory, 128), strict=True)
        goes_on = torch.tensor([after is not None for after in afters])
        later = torch.cat([after for after in afters if after is not None])
        values = self.model(torch.cat(states)).gather(1, torch.cat(actions))
        next_values = torch.zeros(128)
        with torch.no_grad():
            next_values[goes_on] = self.target(later).max(1).values
        expected = next_values * 0.99 + torch.cat(rewards)
        loss = F.smooth_l1_loss(values, expected.unsqueeze(1))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 100)
        if check is not None:
            check(loss)
        self.optimizer.step()
        with torch.no_grad():
            for target, source in zip(self.target.parameters(), self.model.parameters(), strict=True):
                target.mul_(0.995).add_(source, alpha=0.005)
        return loss


def make_rl() -> Training:
    """Deep Q-learning on CartPole: 4-128-128-2, samples of 128, AdamW, a target network."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    model, target = network(), network()
    target.load_state_dict(model.state_dict())
    return DeepQ(model, target, torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True))


# -- sizes of state ---------------------------------------------------------------------------------------------------


def make_many_parameters() -> Training:
    """2,000 parameters of 8 and 64 elements, Adam."""
    layers = [layer for _ in range(500) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    model = nn.Sequential(*layers, nn.Flatten())
    batches = [(torch.randn(16, 8), torch.randint(8, (16,))) for _ in range(NUM_BATCHES)]
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches)


def make_large() -> Training:
    """100 million parameters in 25 layers of width 2,000, batch 16, Adam: a state of 1.1 GiB."""
    layers = [layer for _ in range(25) for layer in (nn.Linear(2000, 2000, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(2000, CLASSES))
    batches = [(torch.randn(16, 2000), torch.randint(CLASSES, (16,))) for _ in range(NUM_BATCHES)]
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4), batches)


SHAPES: dict[str, Callable[[], Training]] = {
    "mlp": make_mlp,
    "gpt": make_gpt,
    "cnn": make_cnn,
    "narrow": make_narrow,
    "loop-calls": make_loop_calls,
    "data-first": make_data_first,
    "rl": make_rl,
    "many-parameters": make_many_parameters,
    "large": make_large,
}


def make(shape: str) -> Training:
    """A new training of the shape, always from the same seed."""
    torch.manual_seed(0)
    return SHAPES[shape]()
