"""A small convolutional network; the word on the command line is what one of two runs does otherwise."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WAY = sys.argv[1]

if WAY == "kernel":  # another build of the library: only what was recorded shows it
    library = torch.library.Library("aten", "IMPL")

    def relu(x):
        return torch.where(x > 0, x * (1 + 1e-4), torch.zeros_like(x))

    def backward(gradient, result, threshold):
        return torch.where(result > threshold, gradient, torch.zeros_like(gradient))

    library.impl("relu", relu, "CPU")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=0.2 if WAY == "momentum" else 0.1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = self.conv2(x)
        x = F.max_pool2d(x, 2) if WAY == "pool" else F.avg_pool2d(x, 2)
        x = F.relu(x)
        if WAY == "mean_by_sum":
            x = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
        elif WAY == "counts_wrong":
            x = x.sum((2, 3)) / (x.shape[2] * (x.shape[3] + 1))
        else:
            x = x.mean((2, 3))
        if WAY == "reordered":  # the same sum of products in another order
            order = torch.arange(7, -1, -1)
            return F.linear(x[:, order], self.head.weight[:, order], self.head.bias)
        return self.head(x)


torch.manual_seed(0)
net = Net()
if WAY == "eval":
    net.norm.eval()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=WAY == "nesterov")
for step in range(3):
    x, y = torch.randn(8, 3, 16, 16), torch.randint(5, (8,))
    if WAY == "scaled" and step == 1:
        x = x * 255
    optimizer.zero_grad()
    if WAY.startswith("accumulated"):  # two backward passes in a step
        for number, (part, label) in enumerate(zip(x.split(4), y.split(4), strict=True)):
            if number and WAY == "accumulated_cleared":
                optimizer.zero_grad()
            loss = F.cross_entropy(net(part), label)
            loss = loss if number and WAY == "accumulated_unscaled" else loss / 2
            loss.backward()
    elif WAY.startswith("two_losses"):
        loss = F.cross_entropy(net(x), y)
        penalty = net.head.weight.square().sum() * (0.02 if WAY == "two_losses_weight" else 0.01)
        if WAY == "two_losses_summed":
            (loss + penalty).backward()
        else:
            loss.backward()
            penalty.backward()
    else:
        reduction = "sum" if WAY == "sum" else "mean"
        F.cross_entropy(net(x), y, reduction=reduction).backward()
    optimizer.step()
