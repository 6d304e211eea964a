"""A compiled function in the loop, with the backend that runs what it was given."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
graphs = []


def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward


@torch.compile(backend=backend, dynamic=False)
def loss_of(x):
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


for step in range(10):
    x = torch.randn(6, 4)
    loss = loss_of(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(graphs, loss.item(), torch._dynamo.utils.counters["frames"]["ok"])
