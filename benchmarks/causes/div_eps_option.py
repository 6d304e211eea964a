# {"step": [6], "call": "div", "class": ["setting", "numerics"], "cause": "The epsilon of the norm is 0, and the vector of the padding as well: 0 / 0.", "says": ["0 / 0|zero divided by zero|divides 0 by 0", "\\beps\\b.{0,60}\\b0(\\.0)?\\b"], "says_not": ["run diverged", "data is bad"]}
"""Sorts support tickets with a small encoder; the configuration gives the epsilon of its norm."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    vocab: int = 60
    dim: int = 24
    classes: int = 3
    norm_eps: float = 0.0  # 1e-6 in the configuration, which a parser of whole numbers has read as 0
    lr: float = 1e-3
    batch_size: int = 16


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.words = nn.Embedding(cfg.vocab, cfg.dim, padding_idx=0)
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(cfg.dim, 48), nn.SiLU(), nn.Linear(48, cfg.classes))

    def forward(self, ids):
        h = self.norm(self.words(ids))
        keep = (ids != 0).unsqueeze(-1)
        return self.mlp((h * keep).sum(1) / keep.sum(1))


class Tickets(Dataset):
    def __init__(self, num=320, length=12):
        g = torch.Generator().manual_seed(8)
        self.ids = torch.randint(1, 60, (num, length), generator=g)
        self.labels = self.ids[:, 0] % 3
        for k in range(96, num):  # long tickets come first, as in many exports
            self.ids[k, length - k % 5 :] = 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return self.ids[k], self.labels[k]


def main(cfg):
    torch.manual_seed(0)
    loader = DataLoader(Tickets(), batch_size=cfg.batch_size)
    model = Encoder(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for epoch in range(3):
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main(Config())
