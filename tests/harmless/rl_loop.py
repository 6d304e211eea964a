"""Reinforcement learning: an environment of NumPy, a replay memory, a target network, an exploration that draws."""

import collections
import copy
import random

import numpy
import torch
from torch import nn

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
online = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3, amsgrad=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
memory = collections.deque(maxlen=60)
state = numpy.zeros(3, dtype=numpy.float32)
rewards = []
for step in range(120):
    with torch.no_grad():
        greedy = int(online(torch.from_numpy(state)).argmax())
    action = greedy if random.random() > 0.3 else random.randrange(2)
    following = (0.9 * state + numpy.random.randn(3) * 0.1 + (action - 0.5) * 0.2).astype(numpy.float32)
    rewards.append(float(-abs(following).sum()))
    memory.append((state, action, rewards[-1], following))
    state = following
    if len(memory) < 16:
        continue
    batch = random.sample(list(memory), 8)
    x = torch.as_tensor(numpy.stack([row[0] for row in batch]))
    a = torch.tensor([row[1] for row in batch])
    r = torch.tensor([row[2] for row in batch])
    with torch.inference_mode():
        best = target(torch.as_tensor(numpy.stack([row[3] for row in batch]))).max(1).values
    loss = nn.functional.smooth_l1_loss(online(x).gather(1, a[:, None]).squeeze(1), r + 0.9 * best.clone())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_value_(online.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.05)
print(sum(rewards), loss.item(), scheduler.get_last_lr(), random.random(), numpy.random.rand())
