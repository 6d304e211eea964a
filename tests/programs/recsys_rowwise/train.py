"""Two-tower recommender with sparse embeddings, a row-wise Adagrad for them and Adam for the rest, three losses."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    users: int = 24
    items: int = 30
    dim: int = 8
    batch_size: int = 12
    embedding_lr: float = 0.05
    dense_lr: float = 2e-3
    rating_weight: float = 0.5
    decay_weight: float = 1e-3
    eval_every: int = 5
    out: str = "ckpt"


class Interactions(Dataset):
    """(user, liked item, other item, rating, weight); a weight of zero marks what was skipped within a second."""

    def __init__(self, cfg, n=192, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.users = torch.randint(0, cfg.users - 1, (n,), generator=g)
        self.pos = torch.randint(0, cfg.items, (n,), generator=g)
        self.neg = (self.pos + torch.randint(1, cfg.items, (n,), generator=g)) % cfg.items
        self.rating = torch.rand(n, generator=g) * 4 + 1
        self.weight = torch.ones(n)
        if n > 125:
            newcomer = cfg.users - 1
            self.users[[75, 124]] = newcomer
            self.weight[75] = 0.0

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        return self.users[i], self.pos[i], self.neg[i], self.rating[i], self.weight[i]


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row, for embeddings with sparse gradients."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros(p.size(0))
                state["sum"][rows] += values.pow(2).mean(dim=1)
                p[rows] -= group["lr"] * values / state["sum"][rows].sqrt()[:, None]


class TwoTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim, sparse=True)
        self.item = nn.Embedding(cfg.items, cfg.dim, sparse=True)
        self.user_mlp = nn.Sequential(nn.Linear(cfg.dim, cfg.dim), nn.Tanh(), nn.Linear(cfg.dim, cfg.dim))
        self.item_mlp = nn.Sequential(nn.Linear(cfg.dim, cfg.dim), nn.Tanh(), nn.Linear(cfg.dim, cfg.dim))
        self.rating = nn.Linear(2 * cfg.dim, 1)

    def forward(self, user, pos, neg):
        u = self.user_mlp(self.user(user))
        p, n = self.item_mlp(self.item(pos)), self.item_mlp(self.item(neg))
        return (u * p).sum(-1), (u * n).sum(-1), self.rating(torch.cat([u, p], -1)).squeeze(-1)


def compute_losses(model, batch, cfg):
    user, pos, neg, rating, weight = batch
    score_pos, score_neg, predicted = model(user, pos, neg)
    ranking = (weight * F.softplus(score_neg - score_pos)).sum() / weight.sum()
    regression = (weight * (predicted - rating) ** 2).sum() / weight.sum()
    decay = sum(p.pow(2).sum() for name, p in model.named_parameters() if "mlp" in name)
    return {"ranking": ranking, "rating": cfg.rating_weight * regression, "decay": cfg.decay_weight * decay}


@torch.no_grad()
def hit_rate(model, cfg):
    test = Interactions(cfg, 40, seed=6)
    model.eval()
    pos, neg, _ = model(test.users.clamp(max=10), test.pos, test.neg)
    model.train()
    return (pos > neg).float().mean().item()


def main():
    cfg = Config()
    torch.manual_seed(0)
    out = Path(cfg.out)
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(asdict(cfg)))
    model = TwoTower(cfg)
    sparse = RowwiseAdagrad([model.user.weight, model.item.weight], lr=cfg.embedding_lr)
    rest = [p for n, p in model.named_parameters() if n not in ("user.weight", "item.weight")]
    dense = torch.optim.Adam(rest, lr=cfg.dense_lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(dense, [6, 12], gamma=0.5)
    for step, batch in enumerate(DataLoader(Interactions(cfg), cfg.batch_size)):
        losses = compute_losses(model, batch, cfg)
        loss = sum(losses.values())
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        scheduler.step()
        print(step, " ".join(f"{name} {value.item():.4f}" for name, value in losses.items()))
        if step % cfg.eval_every == cfg.eval_every - 1:
            print("hit rate", hit_rate(model, cfg))
            torch.save(model.state_dict(), out / f"{step}.pt")


if __name__ == "__main__":
    main()
