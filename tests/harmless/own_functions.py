"""Custom autograd functions, hooks on modules, tensors and gradients, forward-mode and functional derivatives."""

import torch
from torch import nn

seen = []


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        seen.append(float(gradient.abs().sum()))
        return gradient * (x.abs() < ctx.limit), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x + Clip.apply(self.layer(x), 0.8)


torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
model[0].register_forward_hook(lambda module, args, output: output * 1.01)
model[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.99,))
model[1].register_full_backward_hook(lambda module, given, made: (given[0] * 0.5,))
model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(15):
    x = torch.randn(7, 6, requires_grad=True)
    jacobian = torch.func.jacrev(lambda v: model[2](v))(x[0].detach())
    _, slope = torch.func.jvp(lambda v: model[2](v), (x[0].detach(),), (torch.ones(6),))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = model(x).pow(2).mean() + 0.01 * jacobian.sum() + 0.01 * slope.sum()
    optimizer.zero_grad()
    loss.backward()
    x.register_hook(print)
    optimizer.step()
print(len(seen), sum(seen), model[0].calls.item(), x.grad.sum().item(), loss.item())
