# gradient of sqrt is nan in the backward pass (torch 2.13.0+cpu).
# This is the part of the model where it happens, cut out of a training step of 15 torch calls by reprokit.
# Exit code 1: the failure is there. Exit code 0: it is gone.
import torch


def distance(hand, target):
    squared = (hand - target).pow(2).sum(-1)
    return torch.where(squared > 0, torch.sqrt(squared), torch.zeros_like(squared))


hand = torch.ones(1, 1, requires_grad=True)
target = torch.ones(1, 1)
distance(hand, target).sum().backward()

print("hand.grad =", hand.grad)
assert not torch.isnan(hand.grad).any(), "hand.grad is nan"
