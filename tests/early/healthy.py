"""Healthy runs of different kinds: noisy, with restarts, with several optimizers, with losses below zero or near it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 300


def mlp(*sizes: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for given, made in itertools.pairwise(sizes):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def warm_restarts() -> None:
    """A learning rate with warm-up and restarts, so that a small loss rises again."""
    model = mlp(16, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(256, 16)
    y = x[:, :1] * x[:, 1:2]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, step / 20) * (1 + math.cos(math.pi * (step % 100) / 100)) / 2
        rows = torch.randint(0, 256, (32,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def gan() -> None:
    """Two optimizers in turns, whose losses go up and down."""
    generator, critic = mlp(8, 32, 2), mlp(2, 32, 1)
    ones = [torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.99)) for model in (generator, critic)]
    bce = nn.BCEWithLogitsLoss()
    for _ in range(STEPS):
        real = torch.randn(32, 2) * 0.1 + torch.tensor([1.0, -1.0])
        fake = generator(torch.randn(32, 8))
        ones[1].zero_grad()
        loss = bce(critic(real), torch.ones(32, 1)) + bce(critic(fake.detach()), torch.zeros(32, 1))
        loss.backward()
        ones[1].step()
        ones[0].zero_grad()
        bce(critic(fake), torch.ones(32, 1)).backward()
        ones[0].step()


def policy_gradient() -> None:
    """A loss of rewards: both signs, heavy tails, and returns that grow as the policy learns."""
    policy = mlp(4, 32, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        state = torch.randn(16, 4)
        chosen = torch.distributions.Categorical(logits=policy(state))
        action = chosen.sample()
        reward = torch.where(action == (state[:, 0] > 0).long(), 1.0, -1.0) * torch.empty(16).exponential_()
        loss = -(chosen.log_prob(action) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sparse_reward() -> None:
    """A value function of which most targets are zero and a few are not."""
    value = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)
    for _ in range(STEPS):
        target = 10.0 * (torch.rand(8, 1) < 0.02)
        loss = F.mse_loss(value(torch.randn(8, 4)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tiny_batches() -> None:
    """One row a step, with outliers in the data."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(1, 4) * torch.empty(1, 1).exponential_()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True) + torch.empty(1, 1).cauchy_().clamp(-20, 20))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dropout_heavy() -> None:
    """Dropout of 80% before the last layer."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.8), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        x = torch.randn(16, 16)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fine_tuning() -> None:
    """A trained model with a new optimizer: a loss near zero, small batches, and wrong labels here and there."""
    model = mlp(8, 16, 2)
    x = torch.randn(512, 8)
    y = (x[:, 0] > 0).long()
    for num_steps, num_rows in ((100, 512), (STEPS // 2, 4)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(num_steps):
            rows = torch.randint(0, 512, (num_rows,))
            labels = torch.where(torch.rand(num_rows) < 0.02, 1 - y[rows], y[rows])
            loss = F.cross_entropy(model(x[rows]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def below_zero() -> None:
    """A likelihood whose loss falls through zero."""
    scale = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([scale], lr=2e-2)
    for _ in range(STEPS):
        x = torch.randn(32, 4) * 0.05
        loss = (scale + 0.5 * (x / scale.exp()) ** 2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def near_zero() -> None:
    """A problem that is solved exactly: the loss ends in rounding errors."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 4)
        loss = F.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()


def wasserstein() -> None:
    """A critic whose loss drifts away from zero, with a penalty of gradients."""
    critic = mlp(2, 32, 1)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    for _ in range(STEPS):
        real, fake = torch.randn(32, 2) + 3, torch.randn(32, 2)
        middle = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recurrent() -> None:
    """A recurrent net with clipped gradients, whose norms have heavy tails."""
    model, head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(STEPS // 2):
        x = torch.randn(8, 12, 4)
        loss = F.mse_loss(head(model(x)[0][:, -1]), x[:, 0, :1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()


def normalised() -> None:
    """Convolutions with batch normalisation on random images."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS // 2):
        x = torch.randn(8, 1, 8, 8)
        loss = F.cross_entropy(model(x), (x.mean((1, 2, 3)) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def scaled() -> None:
    """A grad scaler that first has to find its scale."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=50)
    for _ in range(STEPS // 2):
        with torch.autocast("cpu", torch.float16):
            x = torch.randn(16, 16)
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


RUNS: tuple[Callable[[], None], ...] = (
    warm_restarts, gan, policy_gradient, sparse_reward, tiny_batches, dropout_heavy, fine_tuning, below_zero, near_zero,
    wasserstein, recurrent, normalised, scaled,
)  # fmt: skip
