"""DCGAN with the losses of the paper written out, noisy labels (real and generated images swapped at times)."""

import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bright squares on a dark ground."""

    def __init__(self, n=256, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.images = -torch.ones(n, 1, 16, 16)
        for image in self.images:
            top, left = torch.randint(0, 9, (2,), generator=g).tolist()
            image[0, top : top + 6, left : left + 6] = 1.0
        self.images += 0.05 * torch.randn(self.images.shape, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class Generator(nn.Module):
    def __init__(self, nz, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 2 * ngf, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 2 * ndf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * ndf),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * ndf, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return torch.sigmoid(self.main(x)).view(-1)


def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.05)


def discriminator_loss(d_real, d_fake):
    return -(torch.log(d_real) + torch.log(1 - d_fake)).mean()


class SampleGrid:
    """Called every few steps: saves what the generator draws from a fixed noise, and both networks."""

    def __init__(self, folder, nz, every):
        self.folder, self.every, self.noise = folder, every, torch.randn(4, nz, 1, 1)
        os.makedirs(folder, exist_ok=True)

    def __call__(self, step, netG, netD):
        if step % self.every:
            return
        netG.eval()
        with torch.no_grad():
            images = netG(self.noise)
        netG.train()
        torch.save({"images": images, "G": netG.state_dict(), "D": netD.state_dict()}, f"{self.folder}/{step}.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--nz", type=int, default=8)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--flip-every", type=int, default=12)
    parser.add_argument("--out", default="samples")
    opt = parser.parse_args()
    torch.manual_seed(999)
    loader = DataLoader(Shapes(), opt.batch)
    netG, netD = Generator(opt.nz), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    optD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=opt.lr / 80, betas=(0.5, 0.999))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in (optD, optG)]
    grid = SampleGrid(opt.out, opt.nz, 5)
    for step, real in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = netG(torch.randn(len(real), opt.nz, 1, 1))
            good, bad = (fake.detach(), real) if step % opt.flip_every == 0 else (real, fake.detach())
            lossD = discriminator_loss(netD(good), netD(bad))
        optD.zero_grad()
        lossD.backward()
        optD.step()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            lossG = nn.functional.softplus(-torch.logit(netD(fake).float().clamp(1e-6, 1 - 1e-6))).mean()
        optG.zero_grad()
        lossG.backward()
        optG.step()
        for scheduler in schedulers:
            scheduler.step()
        grid(step, netG, netD)
        print(f"[{step}/{len(loader)}] Loss_D {lossD.item():.4f} Loss_G {lossG.item():.4f}")


if __name__ == "__main__":
    main()
