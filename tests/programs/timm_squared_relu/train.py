"""Image classification in the manner of a timm recipe: mixup, label smoothing, EMA, float16 autocast with a scaler."""

import argparse
import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--model-ema-decay", type=float, default=0.98)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--output", default="output")
    return parser.parse_args()


class ImageFolder(Dataset):
    """Textures as raw pixel values; most files have 8 bits a channel, one was saved by a scanner with 16."""

    def __init__(self, n=72, classes=5, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, classes, (n,), generator=g)
        grid = torch.arange(16.0)
        wave = torch.sin(grid[None, :, None] * (self.labels[:, None, None] + 1) / 3 + grid[None, None, :] / 4)
        noise = 0.2 * torch.randn(n, 3, 16, 16, generator=g)
        self.pixels = ((wave[:, None] + noise).clamp(-1.5, 1.5) * 80 + 127).round()
        self.scanned = {45: 65535 / 255} if seed == 0 else {}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.pixels[i] * self.scanned.get(i, 1.0)
        return (image / 255 - 0.5) / 0.25, self.labels[i]


class SquaredReLU(nn.Module):
    def forward(self, x):
        return F.relu(x).pow(2)


class Stem(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False))


class ConvBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.act = SquaredReLU()
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return self.bn(self.act(self.conv(x)))


class Net(nn.Module):
    def __init__(self, classes=5, width=12):
        super().__init__()
        self.stem = Stem(width)
        self.stages = nn.Sequential(ConvBlock(width, width), ConvBlock(width, 2 * width, 2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(2 * width, classes)

    def forward_features(self, x):
        return self.stages(self.stem(x)).mean((2, 3))

    def forward(self, x):
        return self.head(self.drop(self.forward_features(x)))


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            if ema.is_floating_point():
                ema.mul_(self.decay).add_(value, alpha=1 - self.decay)
            else:
                ema.copy_(value)


def mixup(x, y, alpha, classes=5, smoothing=0.1):
    lam = torch.distributions.Beta(alpha, alpha).sample()
    target = F.one_hot(y, classes).float() * (1 - smoothing) + smoothing / classes
    return lam * x + (1 - lam) * x.flip(0), lam * target + (1 - lam) * target.flip(0)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    args = parse_args()
    torch.manual_seed(42)
    os.makedirs(args.output, exist_ok=True)
    train_loader = DataLoader(ImageFolder(), args.batch_size)
    val_loader = DataLoader(ImageFolder(24, seed=1), 24)
    model = Net()
    ema = ModelEma(model, args.model_ema_decay)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            x, target = mixup(x, y, args.mixup)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
                loss = torch.sum(-target * F.log_softmax(output.float(), dim=-1), dim=-1).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            ema.update(model)
            updates += 1
            print(f"epoch {epoch} update {updates} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
            if updates % args.eval_every == 0:
                acc = validate(ema.module, val_loader)
                states = {"state_dict": model.state_dict(), "ema": ema.module.state_dict(), "acc": acc}
                torch.save(states, os.path.join(args.output, "last.pth"))


if __name__ == "__main__":
    main()
