"""A model that is compiled; the word on the command line is the compiler of one of two runs."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import miscompilers

WAY = sys.argv[1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))
with torch.no_grad():
    model[0].bias += 20  # far from zero beside its spread
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = torch.compile(model, backend="aot_eager" if WAY == "plain" else getattr(miscompilers, WAY))
for _ in range(3):
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
