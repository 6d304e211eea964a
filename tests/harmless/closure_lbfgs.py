"""LBFGS with a line search calls its closure several times a step; the closure counts and draws."""

import random

import torch

random.seed(4)
torch.manual_seed(0)
x = torch.randn(40, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(40)
weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=7, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (x @ weight - y).pow(2).mean() + 1e-4 * random.random()
    loss.backward()
    return loss


losses = [optimizer.step(closure).item() for _ in range(6)]
print(losses, calls, weight.tolist(), weight._version)
