"""Thirty trainings in which something goes wrong at a known step and layer: scripts, as those of `healthy_runs.py`.

The truth is data beside each run and follows from how it is written: `began` is the step in which the cause first
acts, `layers` are the modules that it acts on, and the input of the step that it writes into. Most end in a NaN or an
infinity three to forty steps later. Where the cause by its nature never leads to one, `is_finite` says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Planted:
    """A run and its truth.

    ``until`` is the last step that counts as the begin: of a cause that grows, the one in which what it multiplies is
    ten times as large; of a sudden one, ``began`` itself. ``is_finite`` is None where it does not matter how the run
    ends. An answer may also say one of ``words``, a pattern, where what is wrong is a setting.
    """

    function: Callable[[int], None]
    began: int
    until: int
    layers: tuple[str, ...]
    is_finite: bool | None
    words: str = ""


RUNS: list[Planted] = []
MOST_WRONG = {"steps": 3, "layers": 5}


def planted(
    began: int, *layers: str, until: int | None = None, is_finite: bool = False
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Add a run to `RUNS` together with its truth."""

    def add(function: Callable[[int], None]) -> Callable[[int], None]:
        RUNS.append(Planted(function, began, began if until is None else until, layers, is_finite))
        return function

    return add


# -- the data ---------------------------------------------------------------------------------------------------------


@planted(120, "4")
def labels_scaled(seed: int) -> None:
    """The labels of one batch are in another unit."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(160):
        x = torch.randn(8, 16)
        y = x.sum(1, keepdim=True)
        if step == 120:
            y = y * 200
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(90, "0")
def bad_rows(seed: int) -> None:
    """Two rows of a batch come from a broken sensor."""
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for step in range(130):
        x = torch.randn(16, 12)
        y = torch.stack([x[:, 0] - x[:, 1], x[:, 2].abs()], 1)
        if step == 90:
            x[[3, 11]] *= 100
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(110, "2")
def wrong_column(seed: int) -> None:
    """From one shard of the data on, the column of the target is that of a running number."""
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.07)
    for step in range(150):
        features = torch.randn(16, 10)
        number = 1e6 + 16 * step + torch.arange(16.0)[:, None]
        table = torch.cat([features, features[:, :2].sum(1, keepdim=True), number], 1)
        loss = F.mse_loss(model(table[:, :10]), table[:, 10 + (step >= 110)][:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(70, "0")
def unnormalised_pictures(seed: int) -> None:
    """The pictures are no longer divided by 255."""
    layers = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.LeakyReLU(),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for step in range(110):
        pictures = torch.randint(0, 256, (16, 1, 8, 8)).float()
        brightness = pictures[:, :, :4].mean((1, 2, 3))[:, None] / 255 - 0.5
        loss = F.mse_loss(model(pictures if step >= 70 else pictures / 255), brightness)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(50, "0", "data", until=59)
def scaled_in_place(seed: int) -> None:
    """An augmentation multiplies the data set itself: 1.3 times more in every step."""
    data = torch.randn(64, 12)
    goal = data[:, :3].sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(120):
        rows = torch.randint(0, 64, (16,))
        if step >= 50:
            data *= 1.3
        loss = F.mse_loss(model(data[rows]), goal[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(75, "embed")
def bad_word(seed: int) -> None:
    """A word whose vector was never filled in turns up."""
    layers = OrderedDict(embed=nn.Embedding(50, 8), flat=nn.Flatten(), hidden=nn.Linear(48, 32), act=nn.ReLU())
    model = nn.Sequential(OrderedDict(**layers, head=nn.Linear(32, 1)))
    with torch.no_grad():
        model.embed.weight[49] = 1e3
    worth = torch.randn(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(110):
        words = torch.randint(0, 49, (16, 6))
        if step == 75:
            words[5, 2] = 49
        loss = F.mse_loss(model(words), worth[words].mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "value")
def constant_rewards(seed: int) -> None:
    """Returns are divided by their deviation, which is a rounding error in a batch of equal rewards."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(6, 32), act=nn.Tanh(), value=nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(140):
        states = torch.randn(32, 6)
        rewards = states[:, 0] + 0.1 * torch.randn(32)
        if step == 100:
            rewards = torch.full((32,), 0.7) + 1e-7 * (torch.arange(32) % 2)
        loss = F.mse_loss(model(states).squeeze(1), rewards / rewards.std())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


# -- the loss ---------------------------------------------------------------------------------------------------------


@planted(90, "second")
def weight_of_a_loss(seed: int) -> None:
    """The weight of the second task's loss is wrong by 100,000."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(10, 40), nn.ReLU())
            self.first, self.second = nn.Linear(40, 1), nn.Linear(40, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x)
            return self.first(hidden), self.second(hidden)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(130):
        x = torch.randn(16, 10)
        one, other = model(x)
        weight = 0.1 if step < 90 else 1e4
        loss = F.mse_loss(one, x[:, :1]) + weight * F.mse_loss(other, x[:, 1:2] * x[:, 2:3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "4")
def discount_in_percent(seed: int) -> None:
    """The discount of a value that refers to itself turns from 0.9 into 90."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(140):
        state = torch.randn(32, 4)
        following = 0.8 * state + 0.3 * torch.randn(32, 4)
        discount = 0.9 if step < 100 else 90.0
        with torch.no_grad():
            goal = 1 + state[:, :1] + discount * model(following)
        loss = F.mse_loss(model(state), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


# -- the optimizer ----------------------------------------------------------------------------------------------------


@planted(60, "head")
def rate_of_the_head(seed: int) -> None:
    """The learning rate of one group of parameters is set to 300."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(16, 32), act=nn.ReLU(), head=nn.Linear(32, 1)))
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for step in range(100):
        if step == 60:
            optimizer.param_groups[1]["lr"] = 300.0
        x = torch.randn(16, 16)
        loss = F.mse_loss(model(x), x.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "0", "3", "6")
def rate_of_all(seed: int) -> None:
    """A milestone of the schedule multiplies the learning rate by 10,000 instead of dividing it."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [80], gamma=1e4)
    for step in range(120):
        pictures = torch.rand(16, 1, 8, 8)
        loss = F.mse_loss(model(pictures), pictures.mean((1, 2, 3))[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


@planted(60, "0", "2", "4", until=66)
def exploding_schedule(seed: int) -> None:
    """The factor of a schedule grows by half in every step when it should fall."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.5 ** max(0, number - 59))
    for step in range(120):
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x[:, :1] * x[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, loss.item())


@planted(90, "0", "2", "4")
def gradient_scaled_twice(seed: int) -> None:
    """Gradients are multiplied by the scale where they should be divided by it."""
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scale = 32.0
    for step in range(130):
        x = torch.randn(16, 12)
        loss = F.mse_loss(model(x), x.abs().mean(1, keepdim=True))
        optimizer.zero_grad()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale if step < 90 else 1 / scale
        optimizer.step()
        print(step, loss.item())


@planted(100, "0", "2", until=108)
def missing_zero_grad(seed: int) -> None:
    """From a second phase of training on nobody sets the gradients to zero: after n steps they are sums of n."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(180):
        x = torch.randn(32, 8)
        loss = F.mse_loss(model(x), x.abs().sum(1, keepdim=True))
        if step < 100:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "2", until=84)
def decay_too_strong(seed: int) -> None:
    """The decay of one layer is so strong that its weights double and change sign in every step."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    groups = [{"params": layer.parameters()} for layer in model if isinstance(layer, nn.Linear)]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for step in range(130):
        if step == 80:
            optimizer.param_groups[1]["weight_decay"] = 300.0
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(120, "2")
def momentum_of_another_run(seed: int) -> None:
    """The momentum of one layer is loaded from a run whose loss had another scale."""
    model = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.1), nn.Linear(32, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(160):
        if step == 120:
            optimizer.state[model[2].weight]["momentum_buffer"].mul_(1e4)
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.abs().sum(1, keepdim=True) + torch.randn(16, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


# -- values of a layer ------------------------------------------------------------------------------------------------


@planted(0, "2")
def wrong_start(seed: int) -> None:
    """The weights of one layer begin fifty times too large."""
    model = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    nn.init.normal_(model[2].weight, std=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(60):
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "4")
def grown_layer(seed: int) -> None:
    """The net is made deeper, and the new layer begins with large weights where it should be the identity."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(140):
        if step == 100:
            added = nn.Linear(32, 32)
            nn.init.normal_(added.weight, std=2.0)
            model = nn.Sequential(*model[:4], added, nn.ReLU(), model[4])
            optimizer.add_param_group({"params": added.parameters()})
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.abs().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "2", until=104)
def weight_doubles(seed: int) -> None:
    """Something that should keep a norm doubles one weight after every step."""
    model = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.1), nn.Linear(32, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(150):
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x[:, :2].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 100:
            with torch.no_grad():
                model[2].weight.mul_(2)
        print(step, loss.item())


@planted(60, "rnn", until=63)
def recurrent_weight(seed: int) -> None:
    """The recurrent weight is divided by a norm too small: 1.2 times larger a step, and it acts six times in a pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(4, 24, nonlinearity="relu", batch_first=True), nn.Linear(24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Net()
    nn.init.orthogonal_(model.rnn.weight_hh_l0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(100):
        x = torch.randn(16, 6, 4)
        loss = F.mse_loss(model(x), x[:, -3:, 0].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 60:
            with torch.no_grad():
                model.rnn.weight_hh_l0.mul_(1.2)
        print(step, loss.item())


@planted(100, "1")
def ruined_statistics(seed: int) -> None:
    """Batch norm with fixed statistics gets those of a checkpoint whose variance is almost zero."""
    layers = [
        nn.Linear(10, 32),
        nn.BatchNorm1d(32),
        nn.LeakyReLU(),
        nn.Linear(32, 32),
        nn.LeakyReLU(),
        nn.Linear(32, 1),
    ]
    model = nn.Sequential(*layers)
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(140):
        if step == 100:
            model[1].running_var.fill_(1e-4)  # with 4e-4 one seed in ten comes back
        x = torch.randn(16, 10)
        loss = F.mse_loss(model(x), x[:, :2].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "attention")
def vanishing_temperature(seed: int) -> None:
    """The temperature of an attention falls to a tenth in every step until it is zero."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.temperature = 4.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2) / self.temperature
            return scores.softmax(-1) @ self.value(x)

    model = nn.Sequential(OrderedDict(inner=nn.Linear(6, 16), attention=Attention(), head=nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(160):
        if step >= 80:
            model.attention.temperature *= 0.1
        x = torch.randn(8, 10, 6)
        loss = F.mse_loss(model(x), x[..., :1].amax(1, keepdim=True).expand(-1, 10, -1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(60, "2", until=67)
def half_precision_creep(seed: int) -> None:
    """A decay of the wrong sign makes one weight 1.4 times larger a step; a layer norm hides it until it overflows."""
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)]
    model = nn.Sequential(*layers)
    teacher = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(120):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 60:
            with torch.no_grad():
                model[2].weight.mul_(1.4)
        print(step, loss.item())


# -- gradients that are gone: the loss stays finite -------------------------------------------------------------------


@planted(0, "0", "1", is_finite=True)
def dead_from_the_start(seed: int) -> None:
    """The bias of the first layer is so low that its ReLU is zero for every input."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.constant_(model[0].bias, -100.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(250):
        x = torch.randn(8, 16)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "2", "3", is_finite=True)
def dead_from_midway(seed: int) -> None:
    """A bad value is loaded into the bias of the second layer: its ReLU is zero from then on."""
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(250):
        if step == 100:
            nn.init.constant_(model[2].bias, -100.0)
        x = torch.randn(8, 16)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "encoder", "encoder.0", "encoder.2", is_finite=True)
def encoder_without_gradient(seed: int) -> None:
    """The encoder runs without gradient from a second phase on, although the optimizer holds its parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.head = nn.Linear(32, 4)
            self.is_measuring = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not self.is_measuring):
                hidden = self.encoder(x)
            return self.head(hidden)

    model, teacher = Net(), nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(250):
        model.is_measuring = step >= 100
        x = torch.randn(16, 10)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(150, "left", is_finite=True)
def detached_branch(seed: int) -> None:
    """One of two branches is detached from a step on; the other one goes on learning."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(48, 1)
            self.is_cached = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.left(x).relu(), self.right(x).tanh()
            return self.head(torch.cat([left.detach() if self.is_cached else left, right], 1))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(300):
        model.is_cached = step >= 150
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x[:, :1] * x[:, 1:2])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(0, "body", is_finite=True)
def hook_from_the_start(seed: int) -> None:
    """Hooks turn NaN gradients into zeros: some rows have one in every step."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(6, 16)))
    for parameter in model.parameters():
        parameter.register_hook(torch.nan_to_num)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(150):
        x = torch.randn(8, 6)
        hidden = model(x)
        length = torch.where(hidden > 0, (hidden * (hidden > 0)).sqrt(), 0.0).sum(1)
        loss = F.mse_loss(length, x.abs().sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "body", is_finite=True)
def hook_from_midway(seed: int) -> None:
    """The same, but only from step 80 on, when batches are filled up with a row of zeros."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(6, 16, bias=False)))
    model.body.weight.register_hook(torch.nan_to_num)
    head = nn.Linear(16, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    for step in range(200):
        x = torch.randn(8, 6)
        y = x[:, :1].sign()
        if step >= 80:
            x[7] = 0
        hidden = model(x)
        unit = hidden / (hidden.pow(2).sum(1, keepdim=True).sqrt() + 1e-6)
        loss = F.mse_loss(head(unit), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(60, "unit", is_finite=True)
def collapsing_scale(seed: int) -> None:
    """Under a grad scaler the derivative of a norm is NaN from a step on: no update is made any more."""

    class Unit(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-3)

    layers = OrderedDict(embed=nn.Linear(8, 16, bias=False), unit=Unit(), hidden=nn.Linear(16, 32), act=nn.ReLU())
    model = nn.Sequential(OrderedDict(**layers, head=nn.Linear(32, 3)))
    teacher = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(130):
        x = torch.randn(16, 8)
        if step >= 60:
            x[12:] = 0
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), teacher(x).argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item())
