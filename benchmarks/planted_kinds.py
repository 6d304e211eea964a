"""Trainings that go wrong in ways that `planted_runs.py` does not have: scripts, as those of `healthy_runs.py`.

Most of them never see a NaN: they learn wrongly, or nothing more. The truth is beside each run: `began` is the step in
which the cause first acts, as capture counts steps. An answer is right if it names one of `layers` (modules, or inputs
of the step), or if what is said of that event matches `words`: what the user calls the setting that is wrong.
"""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable

import torch
import torch.nn.functional as F
from planted_runs import Planted
from torch import nn

RUNS: list[Planted] = []
MOST_WRONG = {"steps": 4, "layers": 5}


def planted(
    began: int, *layers: str, words: str, until: int | None = None
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Add a run to `RUNS` together with its truth; whether it ends in a NaN is no part of it."""

    def add(function: Callable[[int], None]) -> Callable[[int], None]:
        RUNS.append(Planted(function, began, began if until is None else until, layers, None, words))
        return function

    return add


@planted(90, "blocks.1", words=r"blocks\.1|detach")
def block_detached(seed: int) -> None:
    """The result of the middle one of three residual blocks is detached, as for an ablation, from step 90 on."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(12, 32)
            self.blocks = nn.ModuleList([Block(32) for _ in range(3)])
            self.head = nn.Linear(32, 4)
            self.fixed: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                update = block(x)
                if number == self.fixed:
                    update = update.detach()
                x = x + update
            return self.head(x)

    model, truth = Net(), nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(180):
        if step == 90:
            model.fixed = 1
        x = torch.randn(32, 12)
        with torch.no_grad():
            labels = (4 * truth(x)).argmax(1)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(100, "decoder", "decoder.2", words="smooth|total variation|roughness")
def factor_of_a_term(seed: int) -> None:
    """The factor of a smoothness term is 1,000 times too large once the settings are read again."""
    time = torch.linspace(0, 1, 40)
    encoder = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 6))
    decoder = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 40))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    settings = {"smoothness": 2e-3}
    for step in range(170):
        if step == 100:
            settings = {"smoothness": 2.0}
        phase, pitch = torch.rand(24, 1), torch.randint(1, 5, (24, 1))
        curves = torch.sin(2 * math.pi * (pitch * time + phase)) + 0.05 * torch.randn(24, 40)
        outputs = decoder(encoder(curves))
        roughness = (outputs[:, 1:] - outputs[:, :-1]).pow(2).sum(1).mean()
        loss = F.mse_loss(outputs, curves) + settings["smoothness"] * roughness
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "critic", "critic.4", words="real|fake|label|target|ones|zeros|critic")
def gan_labels_swapped(seed: int) -> None:
    """From step 80 on the critic learns that what is real is false and what is made is real."""
    generator = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    real_label, fake_label = torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(160):
        if step == 80:
            real_label, fake_label = fake_label, real_label
        angle = 2 * math.pi * torch.rand(64)
        real = torch.stack([angle.cos(), 0.5 * angle.sin()], 1) + 0.05 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 6))
        loss_critic = F.binary_cross_entropy_with_logits(critic(real), real_label)
        loss_critic = loss_critic + F.binary_cross_entropy_with_logits(critic(fake.detach()), fake_label)
        of_critic.zero_grad()
        loss_critic.backward()
        of_critic.step()
        loss_generator = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(64, 1))
        of_generator.zero_grad()
        loss_generator.backward()
        of_generator.step()
        print(step, loss_critic.item())


@planted(80, until=90, words="gamma|discount|goal|target")
def discount_above_one(seed: int) -> None:
    """The discount grows past 1 with a schedule of horizons that is off by one: 1.2 from step 80 on."""
    online = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
    memory: deque[tuple[torch.Tensor, int, float, torch.Tensor]] = deque(maxlen=2000)
    state = torch.randn(3)
    for step in range(180):
        gamma = 1 - 1 / (10 if step < 80 else -5)
        for _ in range(8):
            action = random.randrange(2)
            following = 0.9 * state + 0.3 * torch.randn(3) + 0.1 * (2 * action - 1)
            memory.append((state, action, 1 - following.abs().mean().item(), following))
            state = following
        batch = random.choices(memory, k=32)
        states, nexts = torch.stack([item[0] for item in batch]), torch.stack([item[3] for item in batch])
        actions, rewards = torch.tensor([item[1] for item in batch]), torch.tensor([item[2] for item in batch])
        with torch.no_grad():
            goal = rewards + gamma * target(nexts).amax(1)
        chosen = online(states).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(chosen, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            target.load_state_dict(online.state_dict())
        print(step, loss.item())


@planted(60, words=r"\blr\b|learning rate|exp_avg|state of the optimizer|optimizer's state|optimizer state")
def optimizer_lost_at_resume(seed: int) -> None:
    """Resumes at step 60 from a checkpoint that holds the model alone: Adam is new, and its rate is not scheduled."""
    truth = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    checkpoint: dict[str, torch.Tensor] = {}
    done = 0
    for until in (60, 160):
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        if checkpoint:
            model.load_state_dict(checkpoint)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if done == 0:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.03 * 0.99**number)
        for step in range(done, until):
            x = torch.randn(32, 16)
            with torch.no_grad():
                y = truth(x)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if done == 0:
                schedule.step()
            print(step, loss.item())
        checkpoint, done = copy.deepcopy(model.state_dict()), until


@planted(100, "1", "4", words=r"\beval\b|`training`|training mode|running.(mean|var|statistics)|batch_norm|BatchNorm")
def norm_left_in_eval(seed: int) -> None:
    """Nothing sets the model back to training after the first validation: batch norm uses old statistics for good."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    kinds = torch.randn(4, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.035, momentum=0.9)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, 4, (size,))
        return 3 + 2 * kinds[labels] + 2 * torch.randn(size, 1, 8, 8), labels

    model.train()
    for step in range(180):
        pictures, labels = batch(16)
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
        if step == 99:
            model.eval()
            with torch.no_grad():
                pictures, labels = batch(64)
                print("accuracy", (model(pictures).argmax(1) == labels).float().mean().item())


@planted(110, "head", "prices", words="target|label|price")
def code_for_missing_labels(seed: int) -> None:
    """In one batch two labels are -999999, the code of the table for a missing number; Adam and clipping hide it."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(10, 48), act=nn.ReLU(), head=nn.Linear(48, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(160):
        rows = torch.randn(24, 10)
        prices = (rows[:, :3].sum(1) + rows[:, 3] * rows[:, 4])[:, None]
        if step == 110:
            prices[[4, 17]] = -999999.0
        loss = F.l1_loss(model(rows), prices)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


@planted(100, "encoder", "padding", words="mask|padding")
def mask_inverted(seed: int) -> None:
    """A collate function of another library is used from step 100 on: its mask is true where there are words."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 24, padding_idx=0)
            layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(24, 2)

        def forward(self, words: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(self.embed(words), src_key_padding_mask=padding)
            return self.head(hidden[:, 0])

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(170):
        words = torch.randint(1, 40, (24, 12))
        lengths = torch.randint(5, 12, (24,))
        words[torch.arange(12)[None] >= lengths[:, None]] = 0
        labels = (((words > 20).sum(1) * 2) > lengths).long()
        padding = words == 0 if step < 100 else words != 0
        loss = F.cross_entropy(model(words, padding), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(70, words=r"\blr\b|learning rate")
def rate_in_percent(seed: int) -> None:
    """After the warm-up a schedule returns percents where a share is asked for: a hundred times the learning rate."""
    model = nn.Sequential(
        nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 3)
    )
    truth = nn.Linear(12, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def share(number: int) -> float:
        if number < 70:
            return min(1.0, (number + 1) / 20)
        return 100 * (1 - (number - 70) / 200)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(150):
        x = torch.randn(32, 12)
        loss = F.cross_entropy(model(x), truth(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(step, loss.item())


@planted(90, "signals", "0", words="signals|same in|constant|does not change|did not change|repeat")
def reader_stuck(seed: int) -> None:
    """A reader of records fails at step 90 and gives its last buffer again and again; the labels go on."""
    model = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten())
    model.append(nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    shape = torch.linspace(-1, 1, 32)
    buffer = torch.zeros(16, 1, 32)
    for step in range(170):
        levels = torch.randn(16, 1)
        if step < 90:
            buffer = (levels * shape + 0.3 * torch.randn(16, 32))[:, None]
        signals = buffer.clone()
        loss = F.mse_loss(model(signals), levels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(70, "blocks.1", words=r"blocks\.1|requires_grad|frozen")
def frozen_by_callback(seed: int) -> None:
    """A callback is to freeze block 10, looks for names that begin with 1, and freezes block 1 at step 70."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.GroupNorm(2, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.silu(self.norm(self.conv(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv1d(2, 12, 3, padding=1), nn.ModuleList([Block(12) for _ in range(4)])
            self.head = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(2))

    def on_step_end(model: nn.Module, step: int) -> None:
        if step == 69:
            for name, parameter in model.named_parameters():
                if name.startswith("blocks.1"):
                    parameter.requires_grad_(False)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    time = torch.linspace(0, 1, 24)
    for step in range(160):
        labels = torch.randint(0, 3, (24,))
        angle = 2 * math.pi * ((labels + 1)[:, None] * time + torch.rand(24, 1))
        x = torch.stack([angle.sin(), angle.cos()], 1) + 0.9 * torch.randn(24, 2, 24)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step_end(model, step)
        print(step, loss.item())


@planted(
    90,
    "backbone",
    "backbone.1",
    words=r"`training`|training mode|running.(mean|var|statistics)|batch_norm|BatchNorm",
)
def fine_tuning_in_train_mode(seed: int) -> None:
    """After a validation the whole model is set to training, with the batch norm of a backbone that is not trained."""
    backbone = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU())
    with torch.no_grad():
        for _ in range(60):
            backbone(4 + 2 * torch.randn(128, 12))
    model = nn.Sequential(OrderedDict(backbone=backbone.requires_grad_(False), head=nn.Linear(48, 3)))
    truth = nn.Linear(12, 3)
    model.head.train()
    model.backbone.eval()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)

    def patients(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = 4 + 1.8 * torch.randn(1, 12) + 0.8 * torch.randn(size, 12)  # those of one clinic are alike
        return x, truth(x - 4).argmax(1)

    for step in range(180):
        x, labels = patients(12)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
        if step == 89:
            model.eval()
            with torch.no_grad():
                print("validation", sum(F.cross_entropy(model(x), y).item() for x, y in map(patients, [12] * 20)) / 20)
            model.train()


@planted(80, words=r"exp_avg|\bstate\b|state of the optimizer|optimizer's state|optimizer state|\bstep\b of Adam")
def state_of_another_run(seed: int) -> None:
    """At step 80 the state of Adam comes from a run with a summed loss: its moments are 30,000 times too large."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
        return model, torch.optim.Adam(model.parameters(), lr=4e-3)

    other, of_other = make()
    for _ in range(3):
        x = torch.randn(30000, 10)
        of_other.zero_grad()
        F.mse_loss(other(x), x[:, :1], reduction="sum").backward()
        of_other.step()
    saved = of_other.state_dict()
    model, optimizer = make()
    for step in range(170):
        if step == 80:
            optimizer.load_state_dict(copy.deepcopy(saved))
        x = torch.randn(32, 10)
        loss = F.mse_loss(model(x), x[:, :3].sum(1, keepdim=True) + x[:, 3:4].abs())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(20, "head", "masks", words="mask|target|label")
def early_border_of_255(seed: int) -> None:
    """The masks of the batch of step 20 still have their border of 255, which means: do not count."""
    layers = OrderedDict(conv=nn.Conv2d(1, 12, 3, padding=1), act=nn.ReLU(), head=nn.Conv2d(12, 1, 3, padding=1))
    model = nn.Sequential(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(120):
        centers = torch.randint(3, 13, (8, 2))
        rows, columns = torch.arange(16)[None, :, None], torch.arange(16)[None, None]
        masks = ((rows - centers[:, 0, None, None]).abs() < 3) & ((columns - centers[:, 1, None, None]).abs() < 3)
        masks = masks[:, None].float()
        pictures = masks + 0.5 * torch.randn(8, 1, 16, 16)
        if step == 20:
            masks[:, :, :1], masks[:, :, -1:] = 255.0, 255.0
        loss = F.binary_cross_entropy_with_logits(model(pictures), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(110, "records", "stem", words="records")
def shard_in_millimetres(seed: int) -> None:
    """The shard that begins at step 110 has lengths in millimetres; a saturating layer keeps the loss in bounds."""
    model = nn.Sequential(OrderedDict(stem=nn.Linear(8, 48), act=nn.Tanh(), hidden=nn.Linear(48, 32), end=nn.ReLU()))
    model.append(nn.Linear(32, 3))
    truth = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(170):
        records = 0.5 * torch.randn(32, 8)
        labels = (truth(records) + torch.tensor([0.0, 0.1, -0.1])).argmax(1)
        if step >= 110:
            records[:, :5] *= 1000
        loss = F.cross_entropy(model(records), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "embed", "tokens", words="tokens|same in|constant|unknown")
def every_word_unknown(seed: int) -> None:
    """From step 80 on a tokenizer without its vocabulary makes every word the unknown one, number 1."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell = nn.Embedding(60, 20), nn.GRU(20, 24, batch_first=True)
            self.head = nn.Linear(24, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(self.embed(tokens))[0]).transpose(1, 2)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    kinds = torch.randint(0, 3, (60,))
    for step in range(160):
        tokens = torch.randint(2, 60, (16, 10))
        labels = kinds[tokens]
        if step >= 80:
            tokens = torch.ones_like(tokens)
        loss = F.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


@planted(60, "norm", until=90, words="weight_decay|weight decay|decay")
def decay_of_a_norm(seed: int) -> None:
    """From step 60 on the weight of a layer norm is decayed with the wrong sign: 8% more in every step."""
    layers = OrderedDict(stem=nn.Linear(12, 32), act=nn.GELU(), hidden=nn.Linear(32, 32), norm=nn.LayerNorm(32))
    model = nn.Sequential(OrderedDict(**layers, head=nn.Linear(32, 3)))
    truth = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    plain = [parameter for name, parameter in model.named_parameters() if not name.startswith("norm")]
    groups = [{"params": plain, "weight_decay": 0.01}, {"params": model.norm.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    for step in range(160):
        if step == 60:
            optimizer.param_groups[1]["weight_decay"] = -40.0
        x = torch.randn(32, 12)
        with torch.no_grad():
            labels = (4 * truth(x)).argmax(1)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(80, "0", "2", "4", words="accumul|divi|number of micro|gradient")
def accumulation_not_divided(seed: int) -> None:
    """From step 80 on sixteen small batches make an update in place of four, and nobody divides by their number."""
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.5)
    for step in range(140):
        count = 4 if step < 80 else 16
        total = 0.0
        for _ in range(count):
            x = torch.randn(8, 10)
            loss = F.mse_loss(model(x), x[:, :3].sum(1, keepdim=True).abs())
            (loss / count if step < 80 else loss).backward()
            total += loss.item() / count
        optimizer.step()
        optimizer.zero_grad()
        print(step, total)


@planted(60, "encoder", "encoder.2", until=77, words="temperature")
def temperature_to_zero(seed: int) -> None:
    """From step 60 on a contrastive temperature falls by a fixed amount a step, and ends at its floor of 1e-6."""
    encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 12))
    centers = torch.randn(200, 16)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    temperature = 0.5
    for step in range(150):
        temperature = 0.5 - 0.005 * step if step < 60 else max(1e-6, temperature - 0.01)
        base = centers[torch.randint(0, 200, (32,))]
        one, other = (F.normalize(encoder(base + 0.6 * torch.randn(32, 16)), dim=1) for _ in range(2))
        loss = F.cross_entropy(one @ other.T / temperature, torch.arange(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@planted(90, "teacher", until=120, words="teacher|pace")
def teacher_runs_away(seed: int) -> None:
    """The pace of a mean teacher has the wrong sign from step 90 on: it moves away from the student, 8% a step."""
    truth = nn.Linear(16, 4)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    model = Pair()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=5e-3)
    pace = 0.05
    for step in range(180):
        if step == 90:
            pace = -0.08
        x = torch.randn(64, 16)
        logits, agreed = model.student(x + 0.3 * torch.randn_like(x)), model.teacher(x)
        loss = F.cross_entropy(logits[:8], truth(x[:8]).argmax(1)) + 5 * F.mse_loss(logits, agreed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                mean.lerp_(parameter, pace)
        print(step, loss.item())
