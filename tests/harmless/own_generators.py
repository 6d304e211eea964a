"""Modules that draw from generators of their own, and a step that fails, is replayed, and goes on."""

import random

import numpy
import torch
from torch import nn

OF_PYTHON = random.Random(1)
OF_NUMPY = numpy.random.default_rng(2)


class Jitter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.generator = torch.Generator().manual_seed(3)
        self.legacy = numpy.random.RandomState(4)
        self.count = 0

    def forward(self, x):
        self.count += 1
        noise = torch.rand(x.shape, generator=self.generator)
        scale = OF_PYTHON.gauss(1, 0.1) * OF_NUMPY.normal(1, 0.1) * self.legacy.rand() * random.random()
        return self.layer(x + noise * scale) * (numpy.random.rand() + 0.5)


random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
model = Jitter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    out = model(torch.randn(8, 5))
    if step in (18, 30):
        out = (out - out).sqrt() + out
    loss = out.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
states = [random.random(), OF_PYTHON.random(), OF_NUMPY.random(), model.legacy.rand(), numpy.random.rand()]
print(model.count, loss.item(), *states, torch.rand(1, generator=model.generator).item(), torch.rand(()).item())
