# {"step": [145], "call": "log", "class": ["numerics", "setting"], "cause": "In bfloat16 the sigmoid of 6.2 is 1, so that log(1 - p) is -inf.", "says": ["bfloat16|half precision", "log of (0|zero)|log\\(0\\)|\\b(0|zero)\\b"], "says_not": ["run diverged", "data is bad"]}
"""Defects in images of a belt with a focal loss, under autocast in bfloat16."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.stem(x)).squeeze(1)


def focal_loss(logits, y, gamma=2.0):
    p = torch.sigmoid(logits)
    positive = y * (1 - p) ** gamma * torch.log(p)
    negative = (1 - y) * p**gamma * torch.log(1 - p)
    return -(positive + negative).mean()


def images(size, g):
    x = torch.randn(size, 1, 12, 12, generator=g)
    y = (torch.rand(size, generator=g) < 0.4).float()
    x[:, 0, 4:8, 4:8] += 3.0 * y[:, None, None]
    return x, y


def main(num_steps=300):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for step in range(num_steps):
        x, y = images(32, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = focal_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
