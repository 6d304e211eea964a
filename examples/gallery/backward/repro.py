# gradient of sqrt is nan in the backward pass (torch 2.13.0+cpu).
# Reduced mechanically by reprokit from 15 torch calls of a training step to 1.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
import torch

squared = torch.tensor(0.0, requires_grad=True)
torch.sqrt(squared).backward(torch.tensor(0.0))

print("squared.grad =", squared.grad)
assert not torch.isnan(squared.grad).any(), "squared.grad is nan"
