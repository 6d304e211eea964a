"""Pickles modules whose classes are defined here by value, and loads them in this process and in one without reprokit.

It prints each time whether the loaded modules compute the same, and what is in the dict of a class.
"""

import subprocess
import sys

import cloudpickle
import torch
from torch import nn

LOADER = """
import pickle, sys
sys.modules["reprokit"] = None  # as if it were not installed
import torch
print(*(module(torch.ones(3, 4)).sum().item() for module in pickle.load(sys.stdin.buffer)))
"""


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


class Doubled(Plain):
    def __call__(self, x):
        return super().__call__(x) * 2


def losses_of(modules):
    return [module(torch.ones(3, 4)).sum().item() for module in modules]


torch.manual_seed(0)
modules = Plain(), Doubled()
optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    sum(module(torch.ones(3, 4)).pow(2).mean() for module in modules).backward()
    optimizer.step()
    pickled = cloudpickle.dumps(modules)
    if step in (0, 6):
        ran = subprocess.run([sys.executable, "-c", LOADER], input=pickled, capture_output=True, check=False)
        print(step, losses_of(modules), ran.stdout.decode(), ran.stderr.decode())
    if step == 6:
        print("in this process", losses_of(cloudpickle.loads(pickled)))
