"""Functions of torch that a script has replaced, methods, functionals and a context, draw from `random` and NumPy."""

import functools
import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F


def drawing(owner, name):
    """Replace a function by one that draws before it calls it, and scales by what it has drawn."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        scale = 1 + 1e-3 * random.random() + 1e-3 * numpy.random.rand()
        result = original(*args, **kwargs)
        return result * scale if isinstance(result, torch.Tensor) and result.is_floating_point() else result

    setattr(owner, name, patched)


random.seed(1)
numpy.random.seed(2)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(12), nn.Linear(12, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for name in ("to", "detach", "clone", "abs", "sum", "max", "isfinite", "isnan", "any", "numel", "reshape", "double"):
    drawing(torch.Tensor, name)
for name in ("isfinite", "isnan", "stack", "zeros_like", "where", "is_grad_enabled", "get_rng_state", "no_grad"):
    drawing(torch, name)
for name in ("cross_entropy", "gelu", "linear", "layer_norm", "softmax"):
    drawing(F, name)
drawing(torch.linalg, "vector_norm")
drawing(torch.autograd, "grad")
for step in range(60):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    logits = model(x.to(torch.float32))
    weights = F.softmax(x.detach().abs().sum(1).clone(), 0)
    loss = (F.cross_entropy(logits, y, reduction="none") * weights).sum() + logits.reshape(-1).abs().max()
    torch.autograd.grad(logits.sum(), model[0].bias, retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(loss.item(), random.random(), numpy.random.rand(), torch.rand(()).item())
