"""A sentence that is all padding.

A small classifier reads song titles, word by word. Titles are filtered against a vocabulary before padding, and
one title has no known word at all: every position of it is masked, its attention scores are all ``-inf``, and
softmax returns NaN.

Expect: step 6, forward, origin ``softmax`` inside ``block.attention``. The mask itself is not blamed.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x, padding):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return weights @ self.value(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, padding):
        return self.norm(x + self.attention(x, padding))


class TitleClassifier(nn.Module):
    def __init__(self, words=40, width=24, genres=3):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.block = Block(width)
        self.head = nn.Linear(width, genres)

    def forward(self, title):
        padding = title == 0
        hidden = self.block(self.words(title), padding)
        return self.head(hidden.mean(1))


def titles(step, generator, size=8, length=5):
    title = torch.randint(1, 40, (size, length), generator=generator)
    title[:, 3:] *= torch.randint(0, 2, (size, 1), generator=generator)  # some titles are shorter
    if step == 6:
        title[5] = 0  # no word of this one is in the vocabulary
    return title, title[:, 0] % 3


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = TitleClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(12):
        title, genre = titles(step, generator)
        loss = nn.functional.cross_entropy(model(title), genre)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
