# Adam.step makes a parameter nan in the optimizer step (torch 2.13.0+cpu).
# Reduced mechanically by reprokit from 8 torch calls of a training step to 1.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
import torch

users = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float16))
users.grad = torch.tensor(0.0, dtype=torch.float16)
opt = torch.optim.Adam([users])
opt.step()

print("users =", users.data)
assert not torch.isnan(users).any(), "after Adam.step(), users is nan"
