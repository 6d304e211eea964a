"""Warnings of code that torch calls, attributed to the frames around it, one after the other.

Prints where each is attributed to. With the word `scaled` the loss is scaled by a grad scaler.
"""

import sys
import warnings

import torch
from torch import nn

warnings.simplefilter("always")


def show(message, category, filename, lineno, file=None, line=None):
    print(message, filename.replace("\\", "/").rpartition("/")[2], lineno)


warnings.showwarning = show


def warn(name, most=9):
    for level in range(2, most):
        warnings.warn(f"{name} {level}", stacklevel=level + 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        warn("forward")
        return self.layer(x)


class Called(Net):
    def __call__(self, x):
        warn("called")
        return super().__call__(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        warn("function")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        warn("backward", 10)
        return gradient * 2


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        warn("step")
        if closure is not None:
            closure()
        return super().step()

    def zero_grad(self, set_to_none=True):
        warn("zero_grad")
        return super().zero_grad(set_to_none)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        warn("item")
        return torch.ones(4)


def hook(gradient):
    warn("hook", 10)


def total(x):
    warn("transform")
    return (x * 2).sum()


nets = [Net(), Called()]
parameters = [p for net in nets for p in net.parameters()]
optimizer = Optimizer(parameters, lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled="scaled" in sys.argv)


def step(x, number):
    optimizer.zero_grad()
    out = Double.apply(nets[0](x) + nets[1](x))
    out.register_hook(hook)
    loss = out.pow(2).mean() + nn.functional.softmax(out).sum()  # warns of its missing `dim`
    loss = loss + torch.var(out[:1, :1].detach()).nan_to_num()  # in C++
    if number == 1:
        torch.autograd.backward(loss)
    elif number == 2:
        return torch.autograd.grad(loss, parameters)
    elif number == 3:
        return optimizer.step(lambda: (warn("closure"), loss.backward()))
    else:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train():
    for number, x in enumerate(torch.utils.data.DataLoader(Data(), batch_size=1)):
        step(x.repeat(3, 1), number)
    torch.func.vmap(total)(torch.ones(3, 4))
    torch.func.grad(total)(torch.ones(3))


def outside(calls):
    return outside(calls - 1) if calls else train()


outside(8)
