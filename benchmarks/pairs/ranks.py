"""Two ranks that should do the same, as of a model split over them; the word says what the second does otherwise."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WAY = sys.argv[1]
dist.init_process_group("gloo")
other = dist.get_rank() == 1
torch.manual_seed(1 if other and WAY == "rank_init" else 0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 if other and WAY == "rank_seed" else 0)
batches = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(6, 8, generator=batches), torch.randint(4, (6,), generator=batches)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y, reduction="sum" if other and WAY == "rank_sum" else "mean")
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
