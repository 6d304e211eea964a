import sys

import torch
from accelerate import Accelerator
from outcome import print_parameters, run_modes
from torch import nn
from torch.utils.data import DataLoader

BAD_BATCH = 5  # with two batches a step: the second of step 2


class Contrast(nn.Module):
    """Log of how unlike the two halves of a row are."""

    def forward(self, rows):
        left, right = rows.chunk(2, -1)
        return torch.log((left - right).square().sum(-1))


def batches(mode):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(8):
        batch = torch.randn(4, 6, generator=generator)
        if number == BAD_BATCH and mode == "nan":
            batch[2] = 0.0
        if number == BAD_BATCH and mode == "raise":
            batch = batch[:, :5]
        rows += list(batch)
    return DataLoader(rows, batch_size=4)


def train(mode):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Dropout(0.1), Contrast())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, batches(mode), schedule)
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print_parameters(accelerator.unwrap_model(model))


run_modes(train, sys.argv[1:])
