"""A learning rate that explodes.

A schedule was meant to decay the learning rate by a factor of ten and multiplies it by a thousand instead. The
model of a river's level diverges over a few steps until its squared error is larger than the largest float32.

Expect: forward, the first call that overflows, with the growth of the loss visible in the timeline.
"""

import torch
from torch import nn


def levels(generator, length=30):
    rain = torch.rand(16, length, generator=generator)
    return rain, rain.cumsum(1)[:, -1:] / length


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=1000.0)
    for step in range(20):
        rain, level = levels(generator)
        error = model(rain) - level
        loss = error.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {step} lr {schedule.get_last_lr()[0]:g} loss {loss.item():.4g}")


if __name__ == "__main__":
    main()
