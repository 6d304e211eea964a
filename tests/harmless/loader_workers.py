"""A loader with workers, a sampler and a generator of its own; augmentations draw from Python's and NumPy's."""

import random

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return torch.full((4,), index / 48) + noise, index % 3


def seed_worker(number):
    numpy.random.seed(torch.initial_seed() % 2**32)


if __name__ == "__main__":
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(7)
    sampler = WeightedRandomSampler([1.0, 2.0] * 24, 48, generator=own)
    loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker, generator=own)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(loss.item(), own.get_state().sum().item(), random.random(), numpy.random.rand(), torch.rand(()).item())
