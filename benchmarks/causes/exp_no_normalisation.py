# {"step": [10], "call": "exp", "class": ["numerics", "state"], "cause": "Dot products of vectors of 160 numbers, not normalised, go above 88 while the loss falls.", "says": ["\\b(88|89|9\\d)(\\.\\d+)?\\b"], "says_not": ["run diverged", "loss rose"]}
"""Retrieval with two towers and in-batch negatives; the similarities are plain dot products."""

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, num_items, d=160):
        super().__init__()
        self.table = nn.Embedding(num_items, d)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, ids):
        e = self.table(ids)
        return e + self.mlp(e)


class TwoTower(nn.Module):
    def __init__(self, num_users, num_items):
        super().__init__()
        self.users, self.items = Tower(num_users), Tower(num_items)

    def forward(self, users, items):
        # the vectors are not normalised, and the largest score is not taken off
        scores = self.users(users) @ self.items(items).T
        weights = torch.exp(scores)
        return -torch.log(weights.diag() / weights.sum(1)).mean()


def main(num_steps=400, batch=64):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = TwoTower(200, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(num_steps):
        users = torch.randperm(200, generator=g)[:batch]
        items = (users * 7 + 3) % 200
        loss = model(users, items)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
