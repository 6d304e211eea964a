# softmax returns nan in the forward pass (torch 2.13.0+cpu).
# Reduced mechanically by reprokit from 23 torch calls of a training step to 1.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
import torch

scores = torch.tensor(float("-inf"))
weights = torch.softmax(scores, dim=-1)

print("weights =", weights)
assert not torch.isnan(weights).any(), "torch.softmax(scores, dim=-1) is nan"
