"""Healthy trainings that naive rules call wrong, of kinds that `healthy_runs.py` does not have; scripts, as there.

A plan changes what is trained, on what, or how, and says so in its code; or something rare is rare by design.
"""

from __future__ import annotations

import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn


def task_switch(seed: int) -> None:
    """Two heads on one body: classification for 100 steps, then a regression whose loss is many times higher."""
    body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    heads = nn.ModuleDict({"kind": nn.Linear(64, 3), "price": nn.Linear(64, 1)})
    kind, price = nn.Linear(16, 3), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=2e-3)
    for step in range(200):
        task = "kind" if step < 100 else "price"
        x = torch.randn(32, 16)
        with torch.no_grad():
            labels, prices = kind(x).argmax(1), 2 * price(x) + torch.randn(32, 1)
        outputs = heads[task](body(x))
        loss = F.cross_entropy(outputs, labels) if task == "kind" else F.mse_loss(outputs, prices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def staged_unfreezing(seed: int) -> None:
    """Only the head learns at first; at steps 60 and 120 the next lower layer joins, at a third of the rate."""
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    truth = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.3, momentum=0.9)
    stages = {60: (model[2], 0.1), 120: (model[0], 0.03)}
    for step in range(180):
        if step in stages:
            layer, rate = stages[step]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": rate})
        x = torch.randn(32, 12)
        loss = F.cross_entropy(model(x), truth(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def growing_sequences(seed: int) -> None:
    """A language model on longer and longer pieces of a text: 8, 16, 32 and 48 letters, and fewer of them a batch."""
    text = "she sells sea shells by the sea shore and the shells she sells are sea shells for sure. " * 12
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    embed, positions = nn.Embedding(len(letters), 32), nn.Embedding(48, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    body, head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(32, len(letters))
    parameters = [part for module in (embed, positions, body, head) for part in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for step in range(160):
        length = (8, 16, 32, 48)[step // 40]
        begins = torch.randint(0, len(codes) - length - 1, (384 // length,))
        batch = torch.stack([codes[begin : begin + length + 1] for begin in begins])
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = body(embed(batch[:, :-1]) + positions.weight[:length], mask=mask, is_causal=True)
        loss = F.cross_entropy(head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        print(step, loss.item())


def cyclic_rate(seed: int) -> None:
    """A learning rate that goes from 0.02 to ten times as much and back every 30 steps."""
    pictures = torch.randn(256, 1, 8, 8)
    labels = (pictures[:, 0, :4].mean((1, 2)) > pictures[:, 0, 4:].mean((1, 2))).long()
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(128, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.02, 0.2, step_size_up=15, cycle_momentum=False)
    for step in range(180):
        rows = torch.randint(0, 256, (24,))
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


def validation_flips(seed: int) -> None:
    """A validation in eval mode after every epoch of 16 steps, then training mode again; batch norm and dropout."""
    from torch.utils.data import DataLoader, TensorDataset

    truth = nn.Linear(14, 4)
    x = 2 + torch.randn(512, 14)
    y = truth(x - 2).argmax(1)
    training = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=24, shuffle=True)
    layers = [nn.Linear(14, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4)]
    model = nn.Sequential(*layers, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    step = 0
    for epoch in range(10):
        model.train()
        for inputs, labels in training:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item())
            step += 1
        model.eval()
        with torch.no_grad():
            score = F.cross_entropy(model(x[384:]), y[384:])
        schedule.step(score)
        print("epoch", epoch, "validation", score.item())


def rare_experts(seed: int) -> None:
    """A mixture of eight experts, the best one for each row: some are chosen once in twenty steps, or no more."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(10, 8)
            self.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(8)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share, chosen = self.gate(x).softmax(1).max(1)
            outputs = torch.zeros(len(x), 1)
            for number in chosen.unique().tolist():
                rows = (chosen == number).nonzero()[:, 0]
                outputs = outputs.index_add(0, rows, share[rows, None] * self.experts[number](x[rows]))
            return outputs

    model = Mixture()
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([1.5, 1.0, 0.8, 0.5, 0.0, -0.5, -1.0, -1.4]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(200):
        x = torch.randn(24, 10)
        loss = F.mse_loss(model(x), (x[:, :1] * x[:, 1:2].sign()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def distillation_annealed(seed: int) -> None:
    """A student learns from a teacher at a temperature that falls from 8 to 1, and from labels more and more."""
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 5)).requires_grad_(False)
    with torch.no_grad():
        teacher[2].weight.mul_(6)
    student = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    for step in range(180):
        share = min(1.0, step / 150)
        temperature = 8 ** (1 - share)
        x = torch.randn(32, 16)
        logits, goal = student(x), teacher(x)
        soft = F.kl_div((logits / temperature).log_softmax(1), (goal / temperature).softmax(1), reduction="batchmean")
        hard = F.cross_entropy(logits, goal.argmax(1))
        loss = (1 - share) * temperature**2 * soft + share * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def adam_then_sgd(seed: int) -> None:
    """As planned, the last third is trained with SGD in place of Adam."""
    truth = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)).requires_grad_(False)
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    steps = 180
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        if step == 2 * steps // 3:
            print("from here on SGD")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x = torch.randn(32, 10)
        loss = F.mse_loss(model(x), 3 * truth(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def weights_averaged(seed: int) -> None:
    """Stochastic weight averaging in the last 60 steps: the learning rate rises again from its cosine, and stays."""
    truth = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)).requires_grad_(False)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    constant = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.08, anneal_epochs=5)
    x = torch.randn(640, 12)
    y = (3 * truth(x)).argmax(1)
    for step in range(180):
        rows = torch.randint(0, 640, (32,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < 120:
            cosine.step()
        else:
            mean.update_parameters(model)
            constant.step()
        print(step, loss.item())
    torch.optim.swa_utils.update_bn([x[i : i + 64] for i in range(0, 640, 64)], mean)
    mean.eval()
    print("averaged", F.cross_entropy(mean(x), y).item())


def rare_class(seed: int) -> None:
    """One row in two hundred is of the second class, whose weight is 60: a batch that has one costs 20 times more."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    weight = torch.tensor([1.0, 60.0])
    for step in range(200):
        labels = (torch.rand(16) < 0.005).long()
        x = torch.randn(16, 8) + labels[:, None] * torch.tensor([1.5, -1.5, 1, -1, 0, 0, 0, 0])
        loss = (weight[labels] * F.cross_entropy(model(x), labels, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def critic_frozen_as_planned(seed: int) -> None:
    """Five steps of the critic to one of the generator; after 120 rounds the critic is frozen, by plan."""
    generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for step in range(150):
        if step == 120:
            print("the critic is frozen from here on")
            critic.requires_grad_(False)
        for _ in range(5 if step < 120 else 0):
            real = torch.randn(32, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.4]]) + torch.tensor([1.5, -1.0])
            fake = generator(torch.randn(32, 4)).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
        loss = F.softplus(-critic(generator(torch.randn(32, 4)))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        print(step, loss.item())


def progressive_resizing(seed: int) -> None:
    """The same pictures at 8, 12 and 16 pixels, in smaller and smaller batches."""
    layers = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    layers += [nn.Conv2d(12, 12, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    grid = torch.linspace(-3, 3, 32)
    for step in range(150):
        size, count = ((8, 48), (12, 32), (16, 24))[step // 50]
        labels = torch.randint(0, 3, (count,))
        angle = labels[:, None, None] * (math.pi / 3)
        waves = torch.sin(
            2 * (angle.cos() * grid[None, :, None] + angle.sin() * grid[None, None]) + torch.rand(count, 1, 1)
        )
        pictures = F.interpolate((waves + 1.5 * torch.randn(count, 32, 32))[:, None], size=(size, size), mode="area")
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def growing_batches(seed: int) -> None:
    """Bags of words, nearly all zeros, in batches of 2 that double every 30 steps, and the learning rate with them."""
    model = nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 2))
    worth = torch.randn(400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(180):
        size = 2 * 2 ** (step // 30)
        optimizer.param_groups[0]["lr"] = 0.02 * math.sqrt(size / 2)
        bags = (torch.rand(size, 400) < 0.01).float()
        loss = F.cross_entropy(model(bags), (bags @ worth > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def layer_drop(seed: int) -> None:
    """Residual blocks that are left out by chance, the last one in 60% of the steps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(10, 32), nn.Linear(32, 3)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(6)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                if not self.training or random.random() > 0.1 * (number + 1):
                    x = x + block(x)
            return self.head(x)

    model, truth = Net(), nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(180):
        x = torch.randn(32, 10)
        with torch.no_grad():
            labels = (4 * truth(x)).argmax(1)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def rare_rewards(seed: int) -> None:
    """An actor and a critic; rewards are divided by a running deviation, and one in two hundred is 40 times larger."""
    body, policy, value = nn.Sequential(nn.Linear(4, 48), nn.Tanh()), nn.Linear(48, 2), nn.Linear(48, 1)
    parameters = [*body.parameters(), *policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    square, count = 1.0, 1.0
    for step in range(200):
        states = torch.randn(24, 4)
        choice = torch.distributions.Categorical(logits=policy(body(states)))
        actions = choice.sample()
        rewards = torch.where((states[:, 0] > 0) == (actions == 1), 1.0, 0.0) + 0.2 * torch.randn(24)
        rewards = rewards * torch.where(torch.rand(24) < 0.005, 40.0, 1.0)
        square, count = square + rewards.pow(2).sum().item(), count + 24
        rewards = rewards / math.sqrt(square / count)
        guess = value(body(states)).squeeze(1)
        gain = (choice.log_prob(actions) * (rewards - guess.detach())).mean()
        loss = F.mse_loss(guess, rewards) - gain - 0.01 * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        print(step, loss.item())


def pseudo_labels(seed: int) -> None:
    """From step 90 on a model learns from its own sure answers as well; the smoothing of labels ends at step 150."""
    centers = 1.4 * torch.randn(5, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    known = torch.arange(5).repeat(8)
    x_known = centers[known] + torch.randn(40, 16)
    for step in range(190):
        rows = torch.randint(0, 40, (16,))
        smoothing = 0.2 * max(0.0, 1 - step / 150)
        loss = F.cross_entropy(model(x_known[rows]), known[rows], label_smoothing=smoothing)
        if step >= 90:
            x = centers[torch.randint(0, 5, (64,))] + torch.randn(64, 16)
            model.eval()
            with torch.no_grad():
                sure, answers = model(x).softmax(1).max(1)
            model.train()
            is_sure = sure > 0.9
            if is_sure.any():
                loss = loss + F.cross_entropy(model(x[is_sure]), answers[is_sure])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def rare_huge_norms(seed: int) -> None:
    """Targets with heavy tails: one gradient in fifty is a hundred times as long, and clipping is there for that."""
    model = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    noise = torch.distributions.StudentT(torch.tensor(1.6))
    for step in range(200):
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x[:, :2].sum(1, keepdim=True) + 0.2 * noise.sample((16, 1)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


def three_tasks(seed: int) -> None:
    """Continual learning: the order of the inputs changes at steps 60 and 120; 8 rows of before are rehearsed."""
    truth = nn.Linear(20, 4)
    model = nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for task in range(3):
        order = torch.arange(20) if task == 0 else torch.randperm(20)
        for number in range(60):
            x = torch.randn(32, 20)
            labels = (3 * truth(x)).argmax(1)
            loss = F.cross_entropy(model(x[:, order]), labels)
            for inputs, goal in kept:
                loss = loss + 0.3 * F.cross_entropy(model(inputs), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(60 * task + number, loss.item())
        kept.append((x[:8, order], labels[:8]))


def growing_queue(seed: int) -> None:
    """Contrastive learning with a queue of keys that grows to 512: the loss rises while the model learns."""
    query = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
    centers = torch.randn(2000, 16)
    queue = F.normalize(torch.randn(1, 16), dim=1)
    for step in range(180):
        base = centers[torch.randint(0, 2000, (16,))]
        questions = F.normalize(query(base + 0.3 * torch.randn(16, 16)), dim=1)
        with torch.no_grad():
            for mean, parameter in zip(key.parameters(), query.parameters(), strict=True):
                mean.lerp_(parameter, 0.05)
            keys = F.normalize(key(base + 0.3 * torch.randn(16, 16)), dim=1)
        alike = (questions * keys).sum(1, keepdim=True)
        logits = torch.cat([alike, questions @ queue.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[:512]
        print(step, loss.item())


def quantised_from_midway(seed: int) -> None:
    """From step 100 on weights and activations are rounded to four bits; gradients go straight through."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().max() / 7
        return x + ((x / scale).round() * scale - x).detach()

    class Layer(nn.Linear):
        is_quantised = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_quantised:
                return super().forward(x)
            return F.linear(rounded(x), rounded(self.weight), self.bias)

    model = nn.Sequential(Layer(12, 48), nn.ReLU(), Layer(48, 48), nn.ReLU(), Layer(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(190):
        if step == 100:
            print("quantised from here on")
            for layer in (model[0], model[2], model[4]):
                layer.is_quantised = True
        x = torch.randn(32, 12)
        loss = F.mse_loss(model(x), x[:, :2].sum(1, keepdim=True) + (x[:, 2:3] * x[:, 3:4]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


RUNS = (
    *(task_switch, staged_unfreezing, growing_sequences, cyclic_rate, validation_flips, rare_experts),
    *(distillation_annealed, adam_then_sgd, weights_averaged, rare_class),
    *(critic_frozen_as_planned, progressive_resizing, growing_batches, layer_drop, rare_rewards, pseudo_labels),
    *(rare_huge_norms, three_tasks, growing_queue, quantised_from_midway),
)
