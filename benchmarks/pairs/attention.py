"""A small transformer; the word on the command line is what one of two runs does otherwise."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WAY = sys.argv[1]
WIDTH, HEADS = 32, 4


def patched_layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


if WAY == "shim":
    F.layer_norm = patched_layer_norm  # of another version, which divides by n - 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        if WAY in ("three_linears", "three_linears_wrong"):
            weights = self.qkv.weight.chunk(3)
            biases = self.qkv.bias.chunk(3)
            if WAY == "three_linears_wrong":
                biases = biases[::-1]
            return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        return self.qkv(x).chunk(3, -1)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.project(x))
        if WAY == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        elif WAY == "tf32":
            q = torch.round(q * 2**8) / 2**8
            scores = q @ k.transpose(-1, -2)
        elif WAY == "chunked":
            scores = torch.cat([part @ k.transpose(-1, -2) for part in q.split(3, 2)], 2)
        else:
            scores = q @ k.transpose(-1, -2)
        if WAY != "no_scale":
            scores = scores / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril(1 if WAY == "mask" else 0)
        scores = scores.masked_fill(~mask, float("-inf"))
        if WAY == "softmax_by_hand":
            top = (scores - scores.amax(-1, keepdim=True)).exp()
            weights = top / top.sum(-1, keepdim=True)
        elif WAY == "softmax_dim":
            weights = scores.softmax(-2).nan_to_num()
        else:
            weights = scores.softmax(-1)
        if WAY == "draws_more":
            F.dropout(scores, 0.1, self.training)
        weights = F.dropout(weights, 0.1, self.training)
        made = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        if WAY == "half":
            with torch.autocast("cpu", torch.bfloat16):
                return self.out(made)
        return self.out(made)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-3 if WAY == "eps" else 1e-5)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU("tanh" if WAY == "gelu" else "none"), nn.Linear(64, WIDTH)
        )

    def normed(self, x):
        if WAY == "norm_by_hand":
            mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
            return (x - mean) * torch.rsqrt(variance + 1e-5) * self.norm1.weight + self.norm1.bias
        return self.norm1(x)

    def forward(self, x):
        hidden = self.attention(self.normed(x))
        if WAY == "detach":
            hidden = hidden.detach()
        x = hidden if WAY == "no_residual" else x + hidden
        if WAY == "in_place":
            kept = x
            x.mul_(1.0).add_(0.5)
            return kept + self.mlp(self.norm2(x))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(1 if WAY == "init" else 0)
model = nn.Sequential(
    nn.Embedding(50, WIDTH, padding_idx=1 if WAY == "padding" else 0), Block(), Block(), nn.Linear(WIDTH, 50)
)
if WAY == "double":
    model.double()
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
    betas=(0.9, 0.95 if WAY == "betas" else 0.999),
    weight_decay=0.1 if WAY == "decay" else 0.01,
)
torch.manual_seed(7)
for step in range(3):
    if WAY == "seed" and step == 1:
        torch.manual_seed(8)
    ids = torch.randint(1, 50, (4, 12))
    ids[:, -2:] = 0
    logits = model(ids)
    targets = ids.roll(-1, 1)
    if WAY == "by_hand":
        found = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        loss = -(found * (targets != 0)).sum() / (targets != 0).sum()
    else:
        smoothing = 0.1 if WAY == "smoothing" else 0.0
        logits, ignored = logits.flatten(0, 1), -100 if WAY == "ignored" else 0
        logits = logits.softmax(-1) if WAY == "double_softmax" else logits
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, label_smoothing=smoothing)
    optimizer.zero_grad()
    loss.backward()
    if WAY != "no_clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
