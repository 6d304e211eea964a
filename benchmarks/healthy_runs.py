"""Thirty healthy trainings of different kinds: the body of each function is written out as a script of its own.

They do what makes numbers jump without anything being wrong: schedules with restarts, two optimizers, rewards, noise,
batches of two, a loss of zero, layers that rest. `watching.py` runs them; a line of output is a step and its loss.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


def warmup_cosine(seed: int) -> None:
    """AdamW with a linear warm-up and a cosine to zero."""
    teacher = nn.Linear(20, 5)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [50])
    for step in range(300):
        x = torch.randn(32, 20)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


def warm_restarts(seed: int) -> None:
    """SGD whose learning rate jumps from zero back to its maximum every 60 steps."""
    x, noise = torch.randn(512, 10), 0.1 * torch.randn(512, 1)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] + noise
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    for step in range(360):
        rows = torch.randint(0, 512, (32,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


def gan(seed: int) -> None:
    """A generator and a discriminator on a ring of eight Gaussians."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for step in range(300):
        angle = torch.randint(0, 8, (64,)) * (math.pi / 4)
        real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 8))
        true, false = critic(real), critic(fake.detach())
        loss = F.binary_cross_entropy_with_logits(true, torch.ones_like(true))
        loss = loss + F.binary_cross_entropy_with_logits(false, torch.zeros_like(false))
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        verdict = critic(fake)
        fooled = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
        for_generator.zero_grad()
        fooled.backward()
        for_generator.step()
        print(step, loss.item() + fooled.item())


def wgan_gp(seed: int) -> None:
    """A Wasserstein GAN with gradient penalty, five steps of the critic to one of the generator."""
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for step in range(300):
        real = torch.randn(64, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.3]]) + torch.tensor([2.0, -1.0])
        fake = generator(torch.randn(64, 4)).detach()
        share = torch.rand(64, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        if step % 5 == 4:
            for_generator.zero_grad()
            (-critic(generator(torch.randn(64, 4))).mean()).backward()
            for_generator.step()
        print(step, loss.item())


def reinforce(seed: int) -> None:
    """Policy gradient on a corridor, returns as they come: sums over episodes of very different lengths."""
    policy = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for step in range(300):
        position, chances, rewards = random.uniform(-1, 1), [], []
        for moment in range(16):
            logits = policy(torch.tensor([position, position**2, moment / 16]))
            choice = torch.distributions.Categorical(logits=logits)
            action = choice.sample()
            chances.append(choice.log_prob(action))
            position += (0.3 if action.item() == 1 else -0.3) + random.gauss(0, 0.1)
            rewards.append(1.0 if abs(position) < 0.5 else -0.2 + random.gauss(0, 0.5))
            if abs(position) > 1.3:
                rewards[-1] -= 10
                break
        returns = torch.tensor([sum(rewards[moment:]) for moment in range(len(rewards))])
        loss = -(torch.stack(chances) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def dqn(seed: int) -> None:
    """Q-learning with a replay memory and a target network that is copied every 50 steps."""
    online = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    memory: deque[tuple[list[float], int, float, list[float], float]] = deque(maxlen=1000)
    state = [random.uniform(-1, 1), 0.0]
    for step in range(400):
        for _ in range(4):
            with torch.no_grad():
                greedy = online(torch.tensor(state)).argmax().item()
            action = random.randrange(3) if random.random() < 0.2 else int(greedy)
            speed = 0.9 * state[1] + 0.1 * (action - 1)
            following = [state[0] + speed, speed]
            is_over = abs(following[0]) > 2
            memory.append((state, action, -5.0 if is_over else 1 - abs(following[0]), following, float(is_over)))
            state = [random.uniform(-1, 1), 0.0] if is_over else following
        batch = random.choices(memory, k=32)
        states, actions, rewards, nexts, ends = (torch.tensor(column) for column in zip(*batch, strict=True))
        with torch.no_grad():
            goal = rewards + 0.95 * (1 - ends) * target(nexts).max(1).values
        loss = F.smooth_l1_loss(online(states).gather(1, actions[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            target.load_state_dict(online.state_dict())
        print(step, loss.item())


def ppo(seed: int) -> None:
    """Clipped policy and value losses, six updates on each batch of experience, normalised advantages."""
    body, policy, value = nn.Sequential(nn.Linear(4, 64), nn.Tanh()), nn.Linear(64, 3), nn.Linear(64, 1)
    parameters = [*body.parameters(), *policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3, eps=1e-5)
    teacher = nn.Linear(4, 3)
    for step in range(300):
        if step % 6 == 0:
            states = torch.randn(128, 4)
            with torch.no_grad():
                before = torch.distributions.Categorical(logits=policy(body(states)))
                actions = before.sample()
                chances, guess = before.log_prob(actions), value(body(states)).squeeze(1)
                rewards = teacher(states).gather(1, actions[:, None]).squeeze(1) + torch.randn(128)
                advantage = rewards - guess
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        rows = torch.randperm(128)[:64]
        hidden = body(states[rows])
        now = torch.distributions.Categorical(logits=policy(hidden))
        ratio = (now.log_prob(actions[rows]) - chances[rows]).exp()
        gain = torch.minimum(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]).mean()
        miss = F.mse_loss(value(hidden).squeeze(1), rewards[rows])
        loss = -gain + 0.5 * miss - 0.01 * now.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        print(step, loss.item())


def tiny_batches(seed: int) -> None:
    """One row a batch, with noise as large as the signal."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(500):
        x = torch.randn(1, 8)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True) + 2 * torch.randn(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def dropout_heavy(seed: int) -> None:
    """Four of five activations dropped after every layer."""
    teacher = nn.Linear(30, 4)
    layers = [nn.Linear(30, 128), nn.ReLU(), nn.Dropout(0.8), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.8)]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(300):
        x = torch.randn(8, 30)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def fine_tuning(seed: int) -> None:
    """Begins at a solution: the loss is small from the first step, on data that differ a little."""
    teacher = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 3))
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for step in range(300):
        x = torch.randn(16, 12) + 0.2
        loss = F.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def loss_to_zero(seed: int) -> None:
    """A linear problem without noise: the loss falls by ten powers of ten, in Adam's small bursts."""
    x = torch.randn(128, 6)
    y = x @ torch.randn(6, 1)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(700):
        rows = torch.randint(0, 128, (32,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def gaussian_likelihood(seed: int) -> None:
    """A regression that learns its own variance: the loss crosses zero and goes on below."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(400):
        x = torch.rand(32, 4) * 2 - 1
        y = torch.sin(3 * x[:, 0]) + 0.05 * (1 + x[:, 1].abs()) * torch.randn(32)
        mean, variance = model(x).unbind(1)
        loss = F.gaussian_nll_loss(mean, y, F.softplus(variance) + 1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def flow_bound(seed: int) -> None:
    """Variational inference with affine couplings: the negative evidence bound of a density with two modes."""
    couplings = nn.ModuleList([nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in range(4)])
    optimizer = torch.optim.Adam(couplings.parameters(), lr=3e-3)
    for step in range(300):
        a, b = torch.randn(64, 2).split(1, 1)
        entropy = 0.5 * (a**2 + b**2) + math.log(2 * math.pi)
        for coupling in couplings:
            scale, shift = coupling(a).split(1, 1)
            scale = torch.tanh(scale)
            a, b = b * scale.exp() + shift, a
            entropy = entropy + scale
        ridge = -0.5 * ((b - a**2) / 0.2) ** 2 - 0.5 * a**2
        loss = -(ridge + 20 + entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(couplings.parameters(), 5.0)
        optimizer.step()
        print(step, loss.item())


def penalty_from_midway(seed: int) -> None:
    """An L1 penalty is switched on at step 180, on purpose: the loss rises at once."""
    teacher = nn.Linear(20, 3)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(360):
        x = torch.randn(32, 20)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        if step >= 180:
            loss = loss + 0.005 * sum(parameter.abs().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def curriculum(seed: int) -> None:
    """A GRU adds up numbers in ever longer sequences: the data gets harder at steps 120 and 240."""
    cell, head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=5e-3)
    for step in range(360):
        x = torch.rand(16, (4, 6, 9)[step // 120], 1)
        outputs, _ = cell(x)
        loss = F.mse_loss(head(outputs[:, -1]), x.sum(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


def evaluation_and_accumulation(seed: int) -> None:
    """Four micro-batches to an update, an evaluation every 20 updates, and the best state loaded again."""
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    held_out = torch.randn(256, 16)
    best, kept = math.inf, copy.deepcopy(model.state_dict())
    for step in range(200):
        total = 0.0
        for _ in range(4):
            x = torch.randn(8, 16)
            loss = F.cross_entropy(model(x), teacher(x).argmax(1)) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                score = F.cross_entropy(model(held_out), teacher(held_out).argmax(1)).item()
            model.train()
            if score < best:
                best, kept = score, copy.deepcopy(model.state_dict())
            else:
                model.load_state_dict(kept)
        print(step, total)


def lstm_clipped(seed: int) -> None:
    """A character model over stretches of a text, its state carried on; every gradient is clipped hard."""
    text = "the quick brown fox jumps over the lazy dog; " * 40
    words = sorted(set(text))
    codes = torch.tensor([words.index(letter) for letter in text])
    embed, cell, head = nn.Embedding(len(words), 16), nn.LSTM(16, 48, batch_first=True), nn.Linear(48, len(words))
    parameters = [*embed.parameters(), *cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=2.0)
    state = None
    for step in range(250):
        begin = step * 20 % (len(codes) - 21)
        outputs, state = cell(embed(codes[None, begin : begin + 20]), state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(head(outputs)[0], codes[begin + 1 : begin + 21])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()
        print(step, loss.item())


def lbfgs(seed: int) -> None:
    """L-BFGS with line search on a small regression: several evaluations in every step."""
    x = torch.linspace(-2, 2, 64)[:, None]
    y = torch.sin(3 * x) + 0.05 * torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 1e-4 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        loss.backward()
        return loss

    for step in range(150):
        loss = optimizer.step(closure)
        print(step, loss.item())


def sparse_embeddings(seed: int) -> None:
    """Word vectors with sparse gradients; rare words get one every hundred steps or never."""
    count = 200
    center, context = nn.Embedding(count, 16, sparse=True), nn.Embedding(count, 16, sparse=True)
    optimizer = torch.optim.SparseAdam([*center.parameters(), *context.parameters()], lr=0.01)
    often = 1 / torch.arange(1, count + 1)
    for step in range(300):
        words = torch.multinomial(often, 64, replacement=True)
        near = (words + torch.randint(1, 4, (64,))) % count
        far = torch.multinomial(often, 64, replacement=True)
        loss = -F.logsigmoid((center(words) * context(near)).sum(1)).mean()
        loss = loss - F.logsigmoid(-(center(words) * context(far)).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def transformer_lm(seed: int) -> None:
    """A small causal transformer on sequences of a Markov chain, with warm-up and clipping."""
    embed, positions = nn.Embedding(16, 32), nn.Parameter(0.02 * torch.randn(24, 32))
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    body, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 16)
    parameters = [*embed.parameters(), positions, *body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 30))
    chances = torch.softmax(2 * torch.randn(16, 16), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(24)
    for step in range(200):
        tokens = [torch.randint(0, 16, (8,))]
        for _ in range(24):
            tokens.append(torch.multinomial(chances[tokens[-1]], 1).squeeze(1))
        batch = torch.stack(tokens, 1)
        outputs = head(body(embed(batch[:, :-1]) + positions, mask=mask, is_causal=True))
        loss = F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        print(step, loss.item())


def batch_norm_one_cycle(seed: int) -> None:
    """A small convolutional network with batch norm and a learning rate that climbs to 0.5 and back."""
    pictures, labels = torch.randn(256, 3, 8, 8), torch.randint(0, 4, (256,))
    pictures += labels[:, None, None, None] * 0.5
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=250)
    for step in range(250):
        rows = torch.randint(0, 256, (16,))
        loss = F.cross_entropy(model(pictures[rows]), labels[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


def mixed_precision(seed: int) -> None:
    """Half precision with a grad scaler whose scale begins far too high and grows often: steps are skipped."""
    teacher = nn.Linear(24, 6)
    model = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=25)
    for step in range(300):
        x = torch.randn(16, 24)
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), teacher(x).argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item())


def frozen_backbone(seed: int) -> None:
    """Only the head learns for 150 steps, then the last layer of the frozen body as well."""
    body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    head = nn.Linear(64, 3)
    body.requires_grad_(False)
    teacher = nn.Linear(10, 3)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
    for step in range(300):
        if step == 150:
            body[2].requires_grad_(True)
        x = torch.randn(16, 10)
        loss = F.cross_entropy(head(body(x)), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def decay_to_zero(seed: int) -> None:
    """Nothing can be learned from the labels, and a strong decay takes all weights to zero."""
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=3.0)
    for step in range(400):
        loss = F.cross_entropy(model(torch.randn(32, 10)), torch.randint(0, 2, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def teacher_of_noisy_labels(seed: int) -> None:
    """A mean teacher: 40% of the labels are random, and a moving average of the student is agreed with."""
    truth = nn.Linear(16, 4)
    student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for step in range(300):
        x = torch.randn(16, 16)
        labels = torch.where(torch.rand(16) < 0.4, torch.randint(0, 4, (16,)), truth(x).argmax(1))
        logits, agreed = student(x), teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        weight = min(1.0, step / 100)
        loss = F.cross_entropy(logits, labels) + weight * F.mse_loss(logits.softmax(1), agreed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(parameter, 0.02)
        print(step, loss.item())


def triplets(seed: int) -> None:
    """A margin loss over triplets: in more and more batches no triplet is violated and everything is zero."""
    centers = torch.randn(20, 12)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(300):
        first = torch.randint(0, 20, (16,))
        second = (first + torch.randint(1, 20, (16,))) % 20
        anchor, near, far = (centers[kind] + 0.5 * torch.randn(16, 12) for kind in (first, first, second))
        loss = F.triplet_margin_loss(model(anchor), model(near), model(far), margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def vae_annealing(seed: int) -> None:
    """A variational autoencoder whose KL term grows from nothing to its full weight over 150 steps."""
    basis = torch.randn(4, 20)
    encoder = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 8))
    decoder = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 20))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    for step in range(300):
        x = torch.randn(32, 4) @ basis + 0.1 * torch.randn(32, 20)
        mean, logvar = encoder(x).chunk(2, 1)
        latent = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        distance = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
        loss = (decoder(latent) - x).pow(2).sum(1).mean() + min(1.0, step / 150) * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def tasks_in_turns(seed: int) -> None:
    """One body and three heads, one task a step with losses of different sizes: two heads rest."""
    body = nn.Sequential(nn.Linear(10, 64), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(64, 1), nn.Linear(64, 5), nn.Linear(64, 1)])
    teacher = nn.Linear(10, 5)
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=2e-3)
    for step in range(300):
        x = torch.randn(16, 10)
        task = random.choices(range(3), (5, 3, 1))[0]
        outputs, goal = heads[task](body(x)), teacher(x)
        if task == 0:
            loss = F.mse_loss(outputs, goal[:, :1])
        elif task == 1:
            loss = F.cross_entropy(outputs, goal.argmax(1))
        else:
            loss = 5 * F.l1_loss(outputs, 4 * goal[:, 1:2] + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def sparse_activations(seed: int) -> None:
    """A wide layer of which nineteen units of twenty are silent for any one input."""
    model = nn.Sequential(nn.Linear(12, 512), nn.ReLU(), nn.Linear(512, 1))
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(300):
        x = torch.randn(16, 12)
        loss = F.mse_loss(model(x), x[:, :1] * x[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def new_optimizers(seed: int) -> None:
    """Every 100 steps the optimizer is made anew, another kind each time, and starts without a history."""
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    for step in range(400):
        if step % 100 == 0:
            kinds = ((torch.optim.Adam, 3e-3), (torch.optim.SGD, 0.05), (torch.optim.RMSprop, 2e-3))
            kind, rate = kinds[step // 100 % 3]
            optimizer = kind(model.parameters(), lr=rate)
        x = torch.randn(32, 8)
        loss = F.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


RUNS = (
    *(warmup_cosine, warm_restarts, gan, wgan_gp, reinforce, dqn, ppo, tiny_batches, dropout_heavy, fine_tuning),
    *(loss_to_zero, gaussian_likelihood, flow_bound, penalty_from_midway, curriculum, evaluation_and_accumulation),
    *(lstm_clipped, lbfgs, sparse_embeddings, transformer_lm, batch_norm_one_cycle, mixed_precision, frozen_backbone),
    *(decay_to_zero, teacher_of_noisy_labels, triplets, vae_annealing, tasks_in_turns, sparse_activations),
    new_optimizers,
)
