"""Adam in float16: eps is lost.

A table of user vectors is trained in float16 with Adam's default ``eps=1e-8``, which is zero in float16. As soon
as a gradient is exactly zero for a vector that was never touched, the update is 0 / 0. Loss and gradients are
finite; the weights are NaN.

Expect: optimizer, origin ``torch.optim.Adam.step``.
"""

import torch
from torch import nn


class Ratings(nn.Module):
    def __init__(self, users=30, films=20, width=8):
        super().__init__()
        self.users = nn.Parameter(torch.randn(users, width) * 0.3)
        self.films = nn.Parameter(torch.randn(films, width) * 0.3)

    def forward(self, user, film):
        return (self.users[user] * self.films[film]).sum(-1)


def main():
    torch.manual_seed(0)
    model = Ratings()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(8):
        if step == 4:  # "now faster": continue in half precision with a fresh optimizer
            model.half()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        user, film = torch.randint(0, 30, (64,)), torch.randint(0, 20, (64,))
        stars = ((user + film) % 5).to(model.users.dtype) / 5
        loss = nn.functional.mse_loss(model(user, film).float(), stars.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
