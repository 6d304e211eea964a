# {"step": [17], "call": "div", "class": ["data", "numerics"], "cause": "The lines of batch 17 are too short for a masked word, so that the count is 0.", "says": ["0 / 0|zero divided by zero|divides 0 by 0", "sample.{0,60}\\b1(3[6-9]|4[0-3])\\b|masked.{0,60}(all|empty|False|zero|\\b0\\b)"], "says_not": ["run diverged"]}
"""Masked language model on short log lines; the loss is the mean over the masked positions."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, MASK, VOCAB, LENGTH = 0, 1, 40, 16


class Lines(Dataset):
    def __init__(self, num=256):
        g = torch.Generator().manual_seed(9)
        self.lines = [
            torch.randint(2, VOCAB, (int(torch.randint(6, LENGTH, (1,), generator=g)),), generator=g)
            for _ in range(num)
        ]
        for k in range(136, 144):  # heartbeats
            self.lines[k] = torch.tensor([7])

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, k):
        return self.lines[k]


def collate(lines):
    ids = torch.full((len(lines), LENGTH), PAD)
    for row, line in zip(ids, lines, strict=True):
        row[: len(line)] = line
    # every fourth word, the first one not
    masked = (torch.arange(LENGTH) % 4 == 3) & (ids != PAD)
    return ids.masked_fill(masked, MASK), ids, masked


class Model(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, d, padding_idx=PAD), nn.Embedding(LENGTH, d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.out(self.layer(h, src_key_padding_mask=ids == PAD))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Lines(), batch_size=8, collate_fn=collate)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        for ids, targets, masked in loader:
            each = nn.functional.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none")
            loss = (each * masked).sum() / masked.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
