# {"step": [193], "call": "exp", "class": ["numerics", "setting"], "cause": "exp(11.1) is beyond the 65504 of float16, and is 66,000 in float32.", "says": ["float16|half precision|65,?504", "\\b11\\.\\d"], "says_not": ["run diverged", "data is bad"]}
"""Counts of visitors with a Poisson regression, under autocast in float16; the rate passes 65504 at a concert."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Visitors(Dataset):
    """Hours of a venue: weather, hour, whether there is an event, its size (in tens of thousands); count of visitors."""

    def __init__(self, num=480):
        g = torch.Generator().manual_seed(5)
        self.x = torch.rand(num, 4, generator=g)
        self.x[:, 3] *= 0.3
        self.x[330:334, 3] = 1.0  # concerts
        self.log_rate = 6.0 + self.x[:, 0] + 4.5 * self.x[:, 3]
        self.y = torch.poisson(self.log_rate.exp(), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        return self.x[k], self.y[k]


class RateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Visitors(), batch_size=24)
    model = RateNet()
    with torch.no_grad():
        model.net[-1].bias.fill_(6.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(20):
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                log_rate = model(x)
                rate = torch.exp(log_rate)
            loss = nn.functional.mse_loss(torch.log1p(rate.float()), torch.log1p(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
