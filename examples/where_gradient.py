"""The ``where`` trap: a finite loss with a NaN gradient.

A robot arm learns how far its hand is from a target. The distance is a square root that ``torch.where`` guards at
zero, so the forward pass is fine even when the hand is exactly on the target. The gradient is not: the branch that
was not selected still computes 0 * inf. From then on every distance is NaN, ``where`` turns it into 0, and
training looks perfect.

Expect: step 7, backward, origin ``sqrt``.
"""

import torch
from torch import nn


def distance(hand, target):
    squared = (hand - target).pow(2).sum(-1)
    return torch.where(squared > 0, torch.sqrt(squared), torch.zeros_like(squared))


class Arm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32, bias=False), nn.Tanh(), nn.Linear(32, 2, bias=False))

    def forward(self, joints):
        return self.body(joints)


def poses(step, generator):
    joints = torch.randn(16, 4, generator=generator)
    target = joints[:, :2].clone()
    if step == 7:
        joints[3], target[3] = 0.0, 0.0  # the arm rests: hand and target are both at the origin
    return joints, target


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    arm = Arm()
    optimizer = torch.optim.Adam(arm.parameters(), lr=1e-2)
    for step in range(12):
        joints, target = poses(step, generator)
        loss = distance(arm(joints), target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
