"""A batch that is bad before the model sees it.

Heart-beat recordings are normalised to unit variance by the dataset. One electrode was off, its recording is
constant, and 0 / 0 makes NaN. The model is innocent.

Expect: forward, origin ``div`` in the dataset's own line, module ``null``.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class HeartBeats(Dataset):
    def __init__(self, size=96, length=40):
        generator = torch.Generator().manual_seed(7)
        time = torch.linspace(0, 6.28, length)
        rate = torch.randint(1, 4, (size, 1), generator=generator)
        self.signals = torch.sin(rate * time) + 0.1 * torch.randn(size, length, generator=generator)
        self.signals[45] = 0.5  # electrode off
        self.labels = rate.squeeze(1) - 1

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, i):
        signal = self.signals[i]
        centred = signal - signal.mean()
        return centred / centred.pow(2).mean().sqrt(), self.labels[i]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 40)), nn.Conv1d(1, 8, 5), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (signal, label) in enumerate(DataLoader(HeartBeats(), batch_size=12)):
        loss = nn.functional.cross_entropy(model(signal), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
