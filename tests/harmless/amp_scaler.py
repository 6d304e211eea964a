"""Automatic mixed precision with a grad scaler, whose first steps are skipped, and gradient accumulation."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
scales = []
for step in range(24):
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(6, 8))
            loss = nn.functional.mse_loss(out.float(), torch.ones(6, 2)) / 2
        scaler.scale(loss * (1e5 if step == 9 else 1)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scales.append((scaler.get_scale(), float(norm)))
print(scales)
