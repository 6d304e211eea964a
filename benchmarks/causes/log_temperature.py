# {"step": [88], "call": "log", "class": ["setting", "numerics"], "cause": "The temperature is lowered by 4% in each step without a floor, and a probability underflows to 0.", "says": ["temperature.{0,120}(0\\.01\\d|fell|falls|shrinks|times)"], "says_not": ["run diverged", "data is bad"]}
"""Deep clustering: soft assignments are sharpened by a temperature that is lowered in every step."""

import torch
from torch import nn


class Clusters(nn.Module):
    def __init__(self, d=16, num=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, 8))
        self.centers = nn.Parameter(torch.randn(num, 8))

    def forward(self, x):
        z = nn.functional.normalize(self.encoder(x), dim=1)
        return z @ nn.functional.normalize(self.centers, dim=1).T


def entropy(scores, temperature):
    p = torch.softmax(scores / temperature, 1)
    return -(p * torch.log(p)).sum(1)


def main(num_steps=200, start=0.5, factor=0.96):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    model = Clusters()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    blobs = 2 * torch.randn(6, 16, generator=g)
    temperature = start
    for step in range(num_steps):
        x = blobs[torch.randint(0, 6, (48,), generator=g)] + 0.5 * torch.randn(48, 16, generator=g)
        scores = model(x)
        each = entropy(scores, temperature).mean()
        used = torch.softmax(scores / 0.5, 1).mean(0)
        loss = each - 2 * (-(used * used.log()).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        temperature *= factor  # nothing keeps it above a floor
        if step % 10 == 0:
            print(f"step {step} temperature {temperature:.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
