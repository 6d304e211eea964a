# {"step": [63], "call": "exp", "class": ["setting", "numerics"], "cause": "The sharpness, a plain number, grows by 8% in each step without a limit.", "says": ["`sharpness` (rose|grows)"], "says_not": ["`(scores|model\\(.*?\\))` rose"]}
"""Hard routing of queries to experts: the scores are sharpened from step to step, by a plain number."""

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self, d=12, num=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 24), nn.SiLU(), nn.Linear(24, num))

    def forward(self, x):
        return self.net(x)


def share(scores, sharpness):
    weights = torch.exp(sharpness * scores)
    return weights / weights.sum(1, keepdim=True)


def main(num_steps=200, growth=1.08):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Router()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sharpness = 1.0
    for step in range(num_steps):
        x = torch.randn(32, 12, generator=g)
        shares = share(model(x), sharpness)
        expert = x[:, :5].argmax(1)
        loss = (shares - nn.functional.one_hot(expert, 5)).pow(2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sharpness *= growth
        if step % 10 == 0:
            print(f"step {step} sharpness {sharpness:.3f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
