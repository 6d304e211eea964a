# {"step": [31], "call": "exp", "class": ["data"], "cause": "Two counts of batch 30 hold 999999, the code of a missing value; its update ruins the weights, and the usual batch 31 overflows.", "says": ["\\by\\b.{0,60}999,?999.{0,60}step 30|step 30.{0,80}999,?999"], "says_not": ["learning rates? of", "clipped"]}
"""Visits of a shop with a Poisson regression; counts come from a table with a code for missing values."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read(num=1_920, d=6):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(num, d, generator=g)
    visits = torch.poisson(torch.exp(0.3 * x[:, 0]), generator=g)
    visits[964:966] = 999_999.0
    return x, visits


class RateNet(nn.Module):
    def __init__(self, d=6, h=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*read()), batch_size=32)
    model = RateNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            log_rate = model(x)
            loss = (torch.exp(log_rate) - y * log_rate).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} deviance {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
