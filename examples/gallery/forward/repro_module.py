# softmax returns nan in the forward pass (torch 2.13.0+cpu).
# The part of the model where it happens, reduced by reprokit from 23 torch calls of a training step to 8.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
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
