"""Two models and two optimizers; one is frozen while the other learns, and one has spectral norm."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), weight_norm(nn.Linear(16, 2)))
critic = nn.Sequential(spectral_norm(nn.Linear(2, 16)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(16, 1)))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for step in range(20):
    for _ in range(2):
        real, fake = torch.randn(16, 2) + 2, generator(torch.randn(16, 4)).detach()
        mix = torch.rand(16, 1)
        point = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
    critic.requires_grad_(False)
    of_generator.zero_grad()
    (-critic(generator(torch.randn(16, 4))).mean()).backward()
    of_generator.step()
    critic.requires_grad_(True)
print(loss.item(), [p.sum().item() for p in (*generator.parameters(), *critic.buffers())])
