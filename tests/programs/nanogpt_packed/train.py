"""A small GPT fine-tuned on dialogues: prompts are masked out of the loss, four micro-batches make a step.

python train.py --max_iters 12 --learning_rate 3e-3
"""

import argparse
import math
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    block_size: int = 24
    vocab_size: int = 40
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.1
    batch_size: int = 2
    gradient_accumulation_steps: int = 4
    max_iters: int = 10
    eval_interval: int = 3
    learning_rate: float = 2e-3
    warmup_iters: int = 2
    grad_clip: float = 1.0
    dtype: str = "bfloat16"
    out_dir: str = "out-dialogues"


class Dialogues(Dataset):
    """Token sequences of a prompt and an answer; only the answer is learned."""

    def __init__(self, cfg, n=96, seed=1337):
        g = torch.Generator().manual_seed(seed)
        self.cfg = cfg
        lengths = torch.randint(4, 14, (n,), generator=g)
        lengths[[42, 43]] = 30  # two pasted log files, next to each other because the set is sorted by topic
        self.items = []
        for length in lengths.tolist():
            prompt = torch.randint(2, 20, (length,), generator=g)
            answer = 20 + (prompt[:12] + length) % 20
            self.items.append((prompt, answer))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        prompt, answer = self.items[i]
        tokens = torch.cat([prompt, answer, torch.zeros(self.cfg.block_size + 1, dtype=torch.long)])
        x = tokens[: self.cfg.block_size]
        y = tokens[1 : self.cfg.block_size + 1].clone()
        y[: len(prompt) - 1] = -1
        y[len(prompt) + len(answer) - 1 :] = -1
        return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.dropout = cfg.n_head, cfg.dropout
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(cfg.n_embd), CausalSelfAttention(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        wide = 4 * cfg.n_embd
        self.mlp = nn.Sequential(nn.Linear(cfg.n_embd, wide), nn.GELU(), nn.Linear(wide, cfg.n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(cfg.vocab_size, cfg.n_embd),
                wpe=nn.Embedding(cfg.block_size, cfg.n_embd),
                h=nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer)),
                ln_f=nn.LayerNorm(cfg.n_embd),
            )
        )
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_lr(it, cfg):
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    ratio = (it - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    return 0.1 * cfg.learning_rate + 0.45 * cfg.learning_rate * (1 + math.cos(math.pi * ratio))


@torch.no_grad()
def estimate_loss(model, loader, ctx):
    model.eval()
    losses = []
    for x, y in loader:
        with ctx:
            losses.append(model(x, y)[1].item())
    model.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    for f in fields(Config):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
    cfg = Config(**vars(parser.parse_args()))
    torch.manual_seed(1337)
    os.makedirs(cfg.out_dir, exist_ok=True)
    train = iter(DataLoader(Dialogues(cfg), batch_size=cfg.batch_size))
    val = DataLoader(Dialogues(cfg, n=48, seed=7), batch_size=16)
    model = GPT(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    ctx = nullcontext() if cfg.dtype == "float32" else torch.autocast("cpu", dtype=getattr(torch, cfg.dtype))
    best = 1e9
    for iter_num in range(cfg.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num, cfg)
        if iter_num % cfg.eval_interval == 0:
            val_loss = estimate_loss(model, val, ctx)
            print(f"step {iter_num}: val loss {val_loss:.4f}")
            if val_loss < best:
                best = val_loss
                checkpoint = {"model": model.state_dict(), "config": asdict(cfg), "iter": iter_num}
                torch.save(checkpoint, os.path.join(cfg.out_dir, "ckpt.pt"))
        for micro_step in range(cfg.gradient_accumulation_steps):
            x, y = next(train)
            with ctx:
                logits, loss = model(x, y)
                loss = loss / cfg.gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {iter_num}: loss {loss.item() * cfg.gradient_accumulation_steps:.4f}")


if __name__ == "__main__":
    main()
