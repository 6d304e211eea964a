# softmax returns nan in the forward pass (torch 2.13.0+cpu).
# This is the part of the model where it happens, cut out of a training step of 23 torch calls by reprokit.
# Exit code 1: the failure is there. Exit code 0: it is gone.
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(1, 1)
        self.key = nn.Linear(1, 1)

    def forward(self, x, padding):
        out = self.query(x)
        scores = out @ self.key(x).transpose(1, 2) / 4.898979485566356
        scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        return torch.softmax(scores, dim=-1)


torch.manual_seed(0)
model = Attention()
x = torch.zeros(1, 1, 1)
padding = torch.tensor([[True]])
weights = model(x, padding)

print("weights =", weights)
assert not torch.isnan(weights).any(), "model(x, padding) is nan"
