# {"step": [8], "call": "exp", "class": ["setting"], "cause": "The learning rate is warmed up to 0.384, and the model diverges on the way.", "says": ["(learning rate|\\blr\\b).{0,80}0\\.\\d"], "says_not": ["(fixed when tried|and helped): clamp"]}
"""Claim counts with a Poisson regression; the learning rate is warmed up and scaled with the size of the batch."""

import torch
from torch import nn

BASE_LR, BASE_BATCH = 0.006, 8


class PoissonNet(nn.Module):
    def __init__(self, d=6, h=32):
        super().__init__()
        self.hidden = nn.Linear(d, h)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(1)


def batches(size, num, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.tensor([0.6, -0.4, 0.0, 0.3, 0.0, -0.2])
    for _ in range(num):
        x = torch.randn(size, 6, generator=g)
        yield x, torch.poisson(torch.exp(x @ weight + 1.5), generator=g)


def main(batch=512, warmup=40, num_steps=120):
    torch.manual_seed(0)
    model = PoissonNet()
    peak = BASE_LR * batch / BASE_BATCH  # the linear scaling rule, far beyond where it holds
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for step, (x, y) in enumerate(batches(batch, num_steps, 1)):
        log_rate = model(x)
        loss = (torch.exp(log_rate) - y * log_rate).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {step} lr {schedule.get_last_lr()[0]:.3f} loss {loss.item():.4g}")


if __name__ == "__main__":
    main()
