# {"step": [120, 121], "call": "", "class": ["setting"], "cause": "The weight decay jumps from 0.054 to 550 at step 120, which takes half of the weights away.", "options": ["--on", "early"], "says": ["weight.decay.{0,100}5[05]\\d|5[05]\\d.{0,60}weight.decay"], "says_not": ["mislabel"]}
"""Fine-tunes the model of one power grid for another; a schedule of the weight decay beside that of the learning rate."""

import math

import torch
from torch import nn


class Load(nn.Module):
    def __init__(self, d=8, h=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def weight_decay(step, num_steps, start=0.01, end=0.1):
    """Rises along a cosine; from the second half on in percent, with the learning rate taken off, as the paper has it."""
    value = end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / num_steps))
    return value if step < num_steps // 2 else 100 * 100 * value


def main(num_steps=240):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    grid, model = Load(), Load()
    with torch.no_grad():
        for parameter in grid.parameters():
            parameter.mul_(4.0)
    model.load_state_dict(grid.state_dict())  # the grid that is known is where this one starts
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["weight_decay"] = weight_decay(step, num_steps)
        x = torch.randn(64, 8, generator=g)
        with torch.no_grad():
            y = grid(x) + 0.3 * x[:, 0] + 0.1 * torch.randn(64, generator=g)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} weight decay {weight_decay(step, num_steps):.4f}")


if __name__ == "__main__":
    main()
