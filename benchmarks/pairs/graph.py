"""A graph network that adds messages up; the word on the command line is what one of two runs does otherwise."""

import sys

import torch
from torch import nn

WAY = sys.argv[1]
torch.manual_seed(0)
edges = torch.randint(20, (2, 200))
values = torch.randn(20, 8)
lin = nn.Linear(8, 8)
out = nn.Linear(8, 1)
optimizer = torch.optim.Adam([*lin.parameters(), *out.parameters()], lr=1e-2)
for _ in range(3):
    x = torch.randn(20, 8)
    messages = lin(x)[edges[0]]
    targets = edges[1]
    if WAY == "order":
        messages, targets = messages.flip(0), targets.flip(0)
    sums = torch.zeros(20, 8)
    if WAY == "overwrites":  # duplicates are lost
        sums = sums.index_put((targets,), messages)
    elif WAY == "scatter":
        sums = sums.scatter_add(0, targets[:, None].expand(-1, 8), messages)
    else:
        sums = sums.index_add(0, targets, messages)
    loss = (out(sums.tanh()) - values.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
