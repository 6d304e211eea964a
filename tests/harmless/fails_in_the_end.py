"""A step fails and is handled, the next is not finite, and the script ends with an exception in a function."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)


def train(step):
    x = torch.randn(5, 3 if step in (7, 16) else 4)
    out = model(x)
    if step == 12:
        out = out / out.sub(out)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    return loss.item()


for step in range(20):
    try:
        print(step, train(step))
    except RuntimeError as error:
        print(step, str(error).splitlines()[0], error.__traceback__.tb_next.tb_frame.f_code.co_name)
        if step == 16:
            raise ValueError("the end") from error
