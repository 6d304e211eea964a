# Adam.step makes a parameter nan in the optimizer step (torch 2.13.0+cpu).
# The part of the model where it happens, reduced by reprokit from 8 torch calls of a training step to 2.
# Ends with exit code 1 while the failure is there, and with 0 once it is gone.
import torch
from torch import nn


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Parameter(torch.zeros(2, 1, dtype=torch.float16))

    def forward(self, user):
        return self.users[user]


model = Ratings()
user = torch.tensor([0])
model(user).backward()
opt = torch.optim.Adam([model.users], lr=0.01)
opt.step()

print("model.users =", model.users.data)
assert not torch.isnan(model.users).any(), "after Adam.step(), model.users contains nan"
