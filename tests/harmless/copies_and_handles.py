"""A script counts the calls of `copy.deepcopy` and `copy.copy` that it has replaced, and prints numbers of hooks."""

import copy

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

calls = []


def counted(function):
    def count(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return count


class Net(nn.Linear):
    def forward(self, x):
        self.register_forward_pre_hook(lambda module, given: None).remove()
        return super().forward(x)


copy.deepcopy, copy.copy = counted(copy.deepcopy), counted(copy.copy)
torch.manual_seed(0)
model = Net(4, 4)
handles = [model.register_forward_hook(lambda module, given, made: None)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
handles.append(optimizer.register_step_pre_hook(lambda *given: None))
for _ in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    handles.append(register_optimizer_step_post_hook(lambda *given: None))
print(calls, [handle.id for handle in handles], RemovableHandle.next_id)
