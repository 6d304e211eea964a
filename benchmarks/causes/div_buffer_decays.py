# {"step": [86, 87], "call": "div", "class": ["state", "numerics"], "cause": "The counts and sums of a code that is not used decay to 0 in 86 steps: 0 / 0.", "says": ["counts.{0,160}(fell|falls|decay|shrinks|each|smaller)", "0 / 0|zero divided by zero|divides 0 by 0"], "says_not": ["run diverged", "data is bad"]}
"""VQ-VAE whose codebook is an exponential moving average, as in the paper, but for the smoothing of the counts."""

import torch
from torch import nn


class Codebook(nn.Module):
    def __init__(self, num=8, d=4, decay=0.3):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(num, d))
        self.register_buffer("counts", torch.ones(num))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        nearest = torch.cdist(z, self.codes).argmin(1)
        one_hot = nn.functional.one_hot(nearest, len(self.codes)).float()
        quantized = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.counts.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(one_hot.T @ z, alpha=1 - self.decay)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        commitment = (z - quantized).pow(2).mean()
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 4))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, d))

    def forward(self, x):
        quantized, commitment = self.codebook(self.encoder(x))
        return (self.decoder(quantized) - x).pow(2).mean() + 0.25 * commitment


def main(num_steps=200):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    blobs = torch.randn(5, 12, generator=g)
    for step in range(num_steps):
        x = blobs[torch.randint(0, 5, (64,), generator=g)] + 0.1 * torch.randn(64, 12, generator=g)
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} least count {model.codebook.counts.min().item():.3g}")


if __name__ == "__main__":
    main()
