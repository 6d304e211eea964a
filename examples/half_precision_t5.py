"""A T5-style feed-forward block in float16.

The weights grow while training goes on, and at some step the product in the second layer of a feed-forward block
is larger than 65504, the largest number of float16. The infinity becomes a NaN only later, in the next
normalisation.

Expect: forward, origin ``linear`` (inf) in ``blocks.<n>.feed_forward.wo``, not the normalisation where NaN shows
first.
"""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.wi = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.wo(torch.relu(self.wi(x)))


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = RMSNorm(width)
        self.feed_forward = FeedForward(width, inner)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Denoiser(nn.Module):
    def __init__(self, tokens=50, width=32, inner=128, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    torch.manual_seed(3)
    model = Denoiser()
    with torch.no_grad():  # the feed-forward weights of the published checkpoints are large
        for block in model.blocks:
            block.feed_forward.wi.weight.normal_(std=2.0)
            block.feed_forward.wo.weight.normal_(std=30.0)
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    for step in range(60):
        ids = torch.randint(0, 50, (4, 12))
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
