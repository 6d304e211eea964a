"""Node regression with principal neighbourhood aggregation (mean, max and standard deviation), in plain torch."""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Graph:
    """One graph: node features ``x``, ``edge_index`` of shape (2, edges), a target a node."""

    def __init__(self, x, edge_index, y):
        self.x, self.edge_index, self.y = x, edge_index, y


class Molecules(torch.utils.data.Dataset):
    """Rings with chords; from the 21st on also some with a pendant atom."""

    def __init__(self, n=48, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.graphs = []
        for i in range(n):
            size = int(torch.randint(6, 10, (1,), generator=g))
            ring = [(j, (j + 1) % size) for j in range(size)]
            edges = ring + [(0, size // 2)]
            if seed == 0 and i in (21, 33):
                edges = edges + [(2, size)]
                size += 1
            edge_index = torch.tensor(edges + [(b, a) for a, b in edges]).t()
            x = torch.randn(size, 6, generator=g)
            y = x[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(size, 1, generator=g)
            self.graphs.append(Graph(x, edge_index, y))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        return self.graphs[i]


def collate(graphs):
    offsets = torch.tensor([0] + [len(g.x) for g in graphs[:-1]]).cumsum(0)
    batch = torch.cat([torch.full((len(g.x),), i) for i, g in enumerate(graphs)])
    x, y = torch.cat([g.x for g in graphs]), torch.cat([g.y for g in graphs])
    edge_index = torch.cat([g.edge_index + o for g, o in zip(graphs, offsets)], 1)
    return x, edge_index, batch, y


def scatter_mean(src, index, size):
    total = src.new_zeros(size, src.size(1)).index_add(0, index, src)
    count = torch.bincount(index, minlength=size).clamp(min=1)
    return total / count[:, None]


class PNAConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.pre = nn.Linear(2 * cin, cin)
        self.post = nn.Linear(4 * cin, cout)

    def aggregate(self, messages, index, size):
        mean = scatter_mean(messages, index, size)
        largest = messages.new_zeros(size, messages.size(1)).scatter_reduce(
            0, index[:, None].expand_as(messages), messages, "amax", include_self=False
        )
        variance = scatter_mean(messages * messages, index, size) - mean * mean
        std = torch.sqrt(variance.clamp(min=0))
        return torch.cat([mean, largest, std], dim=1)

    def forward(self, x, edge_index):
        source, target = edge_index
        messages = torch.tanh(self.pre(torch.cat([x[target], x[source]], dim=1)))
        return self.post(torch.cat([x, self.aggregate(messages, target, len(x))], dim=1))


class Net(nn.Module):
    def __init__(self, cin=6, hidden=12, layers=2):
        super().__init__()
        self.embed = nn.Linear(cin, hidden)
        self.convs = nn.ModuleList(PNAConv(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, x, edge_index, batch):
        h = self.embed(x)
        for conv, norm in zip(self.convs, self.norms):
            h = h + F.silu(norm(conv(h, edge_index)))
        return self.out(h), scatter_mean(h, batch, int(batch.max()) + 1)


class Checkpoint:
    """Keeps the best model by validation error."""

    def __init__(self, folder):
        self.folder, self.best = Path(folder), float("inf")
        self.folder.mkdir(exist_ok=True)

    def on_eval(self, model, error, step):
        if error < self.best:
            self.best = error
            torch.save(model.state_dict(), self.folder / f"step{step}.pt")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors = [F.l1_loss(model(x, e, b)[0], y).item() for x, e, b, y in loader]
    model.train()
    return sum(errors) / len(errors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--ckpt", default="checkpoints")
    args = parser.parse_args()
    torch.manual_seed(3)
    train = torch.utils.data.DataLoader(Molecules(), batch_size=4, collate_fn=collate)
    valid = torch.utils.data.DataLoader(Molecules(8, seed=1), batch_size=4, collate_fn=collate)
    model, checkpoint, step = Net(), Checkpoint(args.ckpt), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    for _ in range(args.epochs):
        for x, edge_index, batch, y in train:
            pred, pooled = model(x, edge_index, batch)
            node_loss = F.smooth_l1_loss(pred, y)
            spread_loss = 0.01 * pooled.pow(2).mean()
            loss = node_loss + spread_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
            if step % 4 == 0:
                checkpoint.on_eval(model, evaluate(model, valid), step)


if __name__ == "__main__":
    main()
