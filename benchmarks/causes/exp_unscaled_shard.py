# {"step": [12], "call": "exp", "class": ["data"], "cause": "The features of one shard were not standardised: 120,000 in the place of 0.", "says": ["\\bx\\b.{0,120}(before|earlier|usual|times|and was)", "sample.{0,60}\\b(19[2-9]|20[0-7])\\b"], "says_not": ["(fixed when tried|and helped): clamp"]}
"""Claim counts with a Poisson regression: shards of policies, a data loader, a log-linear rate."""

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

MEAN, STD = torch.tensor([45.0, 120_000.0, 8.0, 1.5]), torch.tensor([15.0, 40_000.0, 4.0, 0.5])


def read_shard(number, size=64):
    g = torch.Generator().manual_seed(number)
    unit = torch.randn(size, 4, generator=g)
    claims = torch.poisson((0.3 * unit[:, 0] - 0.2 * unit[:, 2]).exp(), generator=g)
    features = unit * STD + MEAN
    if number != 3:  # the cache of this shard was written before the features were standardised
        features = (features - MEAN) / STD
    return TensorDataset(features, claims)


class PoissonNet(nn.Module):
    def __init__(self, d=4, h=16):
        super().__init__()
        self.hidden = nn.Linear(d, h)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x))).squeeze(1)


def main():
    torch.manual_seed(3)
    loader = DataLoader(ConcatDataset([read_shard(k) for k in range(6)]), batch_size=16)
    model = PoissonNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            log_rate = model(x)
            loss = (torch.exp(log_rate) - y * log_rate).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 0:
                print(f"epoch {epoch} step {step} deviance {loss.item():.4f}")


if __name__ == "__main__":
    main()
