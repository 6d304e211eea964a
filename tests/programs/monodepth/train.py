"""Depth from a single image: the network predicts log disparity, depth is its inverse within a range."""

import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    """Images whose brightness falls with distance; a camera fault leaves one frame far too dark."""

    def __init__(self, n=64, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.depth = 1 + 9 * torch.rand(n, 1, 8, 8, generator=g)
        self.images = 2 / self.depth + 0.05 * torch.randn(n, 1, 8, 8, generator=g)
        if seed == 0:
            self.images[45] -= 100.0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.depth[i]


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * self.conv2(torch.tanh(self.conv1(x)))


class DepthNet(nn.Module):
    def __init__(self, width=12, nearest=0.5, farthest=80.0):
        super().__init__()
        self.nearest, self.farthest = nearest, farthest
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(width), ResidualBlock(width))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        log_disparity = 0.1 * self.head(torch.tanh(self.blocks(self.stem(x)))) + self.gain * x - 1.5
        disparity = torch.exp(log_disparity)
        depth = 1 / disparity
        return depth.clamp(self.nearest, self.farthest), log_disparity


def silog(depth, target, balance=0.5):
    d = torch.log(depth) - torch.log(target)
    return (d.pow(2).mean() - balance * d.mean().pow(2)).clamp(min=1e-6).sqrt()


def smoothness(log_disparity, image):
    weight = torch.exp(-image.diff(dim=-1).abs())
    return (log_disparity.diff(dim=-1).abs() * weight).mean()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors = [((model(x)[0] - y).abs() / y).mean().item() for x, y in loader]
    model.train()
    return sum(errors) / len(errors)


class Saver:
    """Post-hook of the optimizer's step: a checkpoint now and then."""

    def __init__(self, model, folder, every):
        self.model, self.folder, self.every, self.count = model, folder, every, 0
        os.makedirs(folder, exist_ok=True)

    def __call__(self, optimizer, args, kwargs):
        self.count += 1
        if self.count % self.every == 0:
            torch.save(self.model.state_dict(), f"{self.folder}/{self.count}.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--smooth", type=float, default=0.05)
    parser.add_argument("--log_dir", default="models")
    args = parser.parse_args()
    torch.manual_seed(0)
    train, valid = DataLoader(Scenes(), args.batch_size), DataLoader(Scenes(12, seed=1), 6)
    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer.register_step_post_hook(Saver(model, args.log_dir, 3))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=len(train))
    for step, (image, target) in enumerate(train):
        depth, log_disparity = model(image)
        losses = {"silog": silog(depth, target), "smooth": args.smooth * smoothness(log_disparity, image)}
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step}", " ".join(f"{k} {v.item():.4f}" for k, v in losses.items()))
        if step % 4 == 3:
            print(f"abs rel {evaluate(model, valid):.4f}")


if __name__ == "__main__":
    main()
