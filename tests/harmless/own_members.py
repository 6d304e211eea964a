"""Models whose `named_parameters`, `parameters`, `modules`, `__getattribute__` and `__hash__` count their calls."""

import collections

import torch
from torch import nn

calls = collections.Counter()


class Counting(nn.Module):
    def __getattribute__(self, name):
        if name in ("__dict__", "training", "forward", "_parameters", "_buffers", "_modules"):
            calls[name] += 1
        return super().__getattribute__(name)

    def __hash__(self):
        calls["hash"] += 1
        return id(self)


def counted(name):
    def method(self, *args, **kwargs):
        calls[name] += 1
        return getattr(nn.Module, name)(self, *args, **kwargs)

    return method


for name in ("named_parameters", "parameters", "named_buffers", "buffers", "named_modules", "modules", "children"):
    setattr(Counting, name, counted(name))


class Net(Counting):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.same = self.first

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def hash_counted(tensor):
    calls["hash of a tensor"] += 1
    return id(tensor)


torch.Tensor.__hash__ = hash_counted
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW([model.first.weight, model.second.weight, model.norm.bias], lr=0.01)
for _ in range(30):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sorted(calls.items()))
