# gradient of sqrt is nan in the backward pass (torch 2.13.0+cpu).
# The part of the model where it happens, reduced by reprokit from 15 torch calls of a training step to 8.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
import torch


def distance(hand, target):
    squared = (hand - target).pow(2).sum(-1)
    return torch.where(squared > 0, torch.sqrt(squared), torch.zeros_like(squared))


hand = torch.zeros(1, 1, requires_grad=True)
target = torch.zeros(1, 1)
distance(hand, target).sum().backward()

print("hand.grad =", hand.grad)
assert not torch.isnan(hand.grad).any(), "hand.grad is nan"
