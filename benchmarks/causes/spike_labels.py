# {"step": [300], "call": "", "class": ["data"], "cause": "The labels of 160 samples are those of other classes, in the usual range.", "options": ["--on", "early"], "says": ["step 300", "\\by\\b.{0,60}(of step 299|in its place)|labels"], "says_not": ["run diverged", "learning rate of"]}
"""Ten kinds of goods by their features; the labels of one export have another order of the classes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def read(num=12_800, d=20):
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (num,), generator=g)
    centers = 1.5 * torch.randn(CLASSES, d, generator=g)
    x = centers[y] + 0.5 * torch.randn(num, d, generator=g)
    y[9_600:9_760] = (y[9_600:9_760] + 5) % CLASSES  # an export that counts the classes from another one
    return x, y


class Net(nn.Module):
    def __init__(self, d=20, h=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, CLASSES))

    def forward(self, x):
        return self.body(x)


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*read()), batch_size=32)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        num_right = 0
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_right += int((logits.argmax(1) == y).sum())
        print(f"epoch {epoch} accuracy {num_right / len(loader.dataset):.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
