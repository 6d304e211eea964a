"""VQ-VAE as a Hydra application; the codebook follows the encoder by a moving average once training has settled."""

import hydra
import torch
import torch.nn as nn
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    """Small patches with an edge of some angle."""

    def __init__(self, n=256, seed=0):
        g = torch.Generator().manual_seed(seed)
        angle = torch.rand(n, 1, 1, generator=g) * 6.28
        grid = torch.linspace(-1, 1, 6)
        slope = torch.cos(angle) * grid[None, :, None] + torch.sin(angle) * grid[None, None, :]
        self.patches = torch.tanh(4 * slope) + 0.05 * torch.randn(n, 6, 6, generator=g)

    def __len__(self):
        return len(self.patches)

    def __getitem__(self, i):
        return self.patches[i].flatten()


class Quantizer(nn.Module):
    """Nearest code; codes are means of what was assigned to them (exponential moving averages)."""

    def __init__(self, codes, dim, decay, update_from):
        super().__init__()
        self.decay, self.update_from, self.calls = decay, update_from, 0
        self.register_buffer("embed", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_sum", torch.zeros(codes, dim))

    @torch.no_grad()
    def update(self, z, index):
        onehot = F.one_hot(index, len(self.embed)).to(z.dtype)
        self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.embed_sum.mul_(self.decay).add_(onehot.t() @ z, alpha=1 - self.decay)
        if self.calls > self.update_from:
            self.embed.copy_(self.embed_sum / self.cluster_size.unsqueeze(1))

    def forward(self, z):
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.embed.t() + self.embed.pow(2).sum(1)
        index = distance.argmin(1)
        quantized = F.embedding(index, self.embed)
        if self.training:
            self.calls += 1
            self.update(z, index)
        commitment = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment, index


class VQVAE(nn.Module):
    def __init__(self, hidden, dim, codes, decay, update_from):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        self.quantizer = Quantizer(codes, dim, decay, update_from)
        self.decoder = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, 36))

    def forward(self, x):
        quantized, commitment, index = self.quantizer(self.encoder(x))
        return self.decoder(quantized), commitment, index


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors, used = [], set()
    for x in loader:
        recon, _, index = model(x)
        errors.append(F.mse_loss(recon, x).item())
        used |= set(index.tolist())
    model.train()
    return sum(errors) / len(errors), len(used)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig):
    print(OmegaConf.to_yaml(cfg.model).strip().replace("\n", ", "))
    torch.manual_seed(cfg.seed)
    train, valid = DataLoader(Patches(), cfg.batch_size), DataLoader(Patches(32, seed=1), 16)
    model = VQVAE(**cfg.model)
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for step, x in enumerate(train):
        recon, commitment, index = model(x)
        reconstruction = F.mse_loss(recon, x)
        sharpness = 0.1 * (recon.diff(dim=1) - x.diff(dim=1)).abs().mean()
        loss = reconstruction + cfg.loss.commitment * commitment + sharpness
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.4f} commitment {commitment.item():.4f} codes {len(index.unique())}")
        if step % cfg.eval_every == cfg.eval_every - 1:
            error, used = evaluate(model, valid)
            print(f"validation {error:.4f}, {used} codes in use")
            torch.save({"model": model.state_dict(), "cfg": OmegaConf.to_container(cfg)}, f"step{step}.pt")


if __name__ == "__main__":
    main()
