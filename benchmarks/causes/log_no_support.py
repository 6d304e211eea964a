# {"step": [11], "call": "log", "class": ["data", "numerics"], "cause": "No sample of batch 11 is of class 3, whose share is 0.", "says": ["prior.{0,80}\\b(0|zero)\\b|log of (0|zero)|log\\(0\\)", "at \\[3\\b|(row|index|class|element|position)s? 3\\b"], "says_not": ["run diverged"]}
"""Classification of damages with a term that keeps the mean prediction of a batch near its mix of classes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


def make_records(num=640, d=12):
    g = torch.Generator().manual_seed(3)
    y = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), num, replacement=True, generator=g)
    # each batch has a sample of the rare class, but for the records of one plant
    y[3::20] = 3
    plant = slice(352, 384)
    y[plant] = torch.where(y[plant] == 3, 0, y[plant])
    centers = torch.randn(CLASSES, d, generator=g)
    return centers[y] + 0.8 * torch.randn(num, d, generator=g), y


def mix_loss(logits, y):
    prior = torch.bincount(y, minlength=CLASSES) / len(y)
    mean = torch.softmax(logits, 1).mean(0)
    return (prior * (torch.log(prior) - torch.log(mean))).sum()


def main():
    torch.manual_seed(0)
    x, y = make_records()
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for xb, yb in loader:
            logits = model(xb)
            loss = nn.functional.cross_entropy(logits, yb) + 0.5 * mix_loss(logits, yb)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
