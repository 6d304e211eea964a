"""Training loops as data: a `Loop` says what a training does and what goes wrong in it, `Training` does it.

Every field has a fixed set of values, `CHOICES`, so a seeded generator (`draw`) and hypothesis make the same loops.
All values of a run follow from ``seed``. Models and batches are tiny: one run takes some 20 milliseconds.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, HIDDEN, CLASSES, WORDS = 6, 5, 8, 3, 12
RARE = WORDS - 1  # the row of the embedding that only the faulty batch, and perhaps a later one, looks up
SLOW_SECONDS = 0.006  # a step as long as the ones whose gradients are looked at


@dataclass(frozen=True)
class Loop:
    """One training loop. The first of a field's `CHOICES` is the plain one.

    ``fault`` is planted in batch ``bad_step``, micro-batch ``bad_micro``; a ruined row of the embedding is looked up
    again ``gap`` steps later. ``event_step`` is the step of the conversion, of the change of a toggle, and of
    unfreezing.
    """

    fault: str = "none"
    style: str = "supervised"
    norm: str = "none"
    dropout: float = 0.0
    block: str = "plain"
    optimizer: str = "sgd"
    update: str = "step"
    accumulate: int = 1
    losses: str = "one"
    clip: str = "none"
    schedule: str = "none"
    teacher: str = "none"
    toggle: str = "none"
    freeze: str = "none"
    convert: str = "none"
    skip: str = "none"
    batch: str = "fresh"
    extra: str = "none"
    scaler: bool = False
    zero: str = "before"
    is_slow: bool = False
    steps: int = 12
    bad_step: int = 4
    bad_micro: int = 0
    gap: int = 3
    event_step: int = 2
    history: int | None = None
    seed: int = 0

    @property
    def phase(self) -> str | None:
        """The phase of the failure that the fault leads to; ``None`` if the loop itself skips or corrects it."""
        if self.fault in _BACKWARD:
            is_skipped = self.fault != "raise_backward" and (self.scaler or self.skip == "gradient")
            return None if is_skipped else "backward"
        if self.fault in _BAD_LOSS and (self.skip == "loss" or (self.skip == "gradient" and not self.scaler)):
            return None
        if self.fault in ("rate", "eps"):
            return "optimizer"
        return None if self.fault == "none" else "forward"

    @property
    def healthy(self) -> Loop:
        """The same loop with nothing planted."""
        return replace(self, fault="none")

    def settled(self) -> Loop:
        """The loop without what contradicts the rest of it."""
        changes: dict[str, Any] = {}
        if self.fault == "eps":
            changes |= {"optimizer": "adam", "style": "supervised", "update": "step", "scaler": False}
        if self.fault == "fake":
            changes["style"] = "adversarial"
        loop = replace(self, **changes)
        changes = {}
        if loop.style != "supervised":
            changes |= {"update": "step", "scaler": False, "convert": "none"}
        if loop.style in ("adversarial", "actor_critic") and loop.skip == "loss":
            changes["skip"] = "none"  # these loops update whatever the loss is
        if loop.fault in ("forward", "buffer"):
            changes["style"] = "adversarial" if loop.style == "recurrent" else loop.style  # the cell leaves no zeros
        if loop.convert == "reloaded" and loop.fault in ("rate", "eps", "write"):
            changes["convert"] = "none"  # it would heal what the fault has ruined, before anybody looks at it
        if loop.update not in ("step",):
            changes |= {"scaler": False, "skip": "none", "clip": "none"}
        if loop.update == "lbfgs":
            changes |= {"accumulate": 1, "losses": "one"}
        if loop.block == "reentrant" and (loop.losses == "penalty" or loop.update == "by_grad"):
            changes["block"] = "checkpoint"  # torch refuses `autograd.grad` there
        if loop.bad_micro >= replace(loop, **changes).accumulate:
            changes["bad_micro"] = 0
        loop = replace(loop, bad_step=min(loop.bad_step, loop.steps - 1), **changes)
        if loop.style == "turns" and loop.fault in ("row", "gate"):  # these gradients are the one optimizer's only
            changes["bad_step"] = 2 * (loop.bad_step // 2) + (loop.fault == "gate")
            changes["steps"] = max(loop.steps, changes["bad_step"] + 1)
        if loop.fault == "fake":
            changes["bad_step"] = 2 * (loop.bad_step // 2)  # the generator's turn
        return replace(loop, **changes)


_BACKWARD = ("backward", "gate", "row", "fake", "raise_backward")
_BAD_LOSS = ("forward", "overflow", "loss", "input")

CHOICES: dict[str, tuple[Any, ...]] = {
    "fault": (
        *("forward", "overflow", "loss", "input", "backward", "gate", "row", "row", "fake"),
        *("rate", "eps", "write", "buffer"),
        *("raise_forward", "raise_loss", "raise_backward", "raise_user"),
    ),
    "style": ("supervised", "supervised", "supervised", "adversarial", "turns", "actor_critic", "recurrent"),
    "norm": ("none", "batch", "batch", "layer", "moving"),
    "dropout": (0.0, 0.3),
    "block": ("plain", "plain", "checkpoint", "reentrant", "random_depth", "tied"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "rmsprop", "own"),
    "update": ("step", "step", "step", "closure", "lbfgs", "by_hand", "by_data", "by_grad"),
    "accumulate": (1, 1, 2, 3),
    "losses": ("one", "one", "summed", "separate", "penalty"),
    "clip": ("none", "none", "norm", "value"),
    "schedule": ("none", "none", "cosine", "by_hand"),
    "teacher": ("none", "none", "average", "copied"),
    "toggle": ("none", "none", "attribute", "dropout", "evaluating", "frozen_norm", "method"),
    "freeze": ("none", "none", "always", "until", "from"),
    "convert": ("none", "none", "none", "double", "bfloat16", "grown", "moved", "reloaded"),
    "skip": ("none", "none", "none", "loss", "gradient"),
    "batch": ("fresh", "fresh", "noise", "reused", "cleared", "augmented"),
    "extra": ("none", "none", "evaluation", "clamped", "reset", "metric"),
    "scaler": (False, False, False, True),
    "zero": ("before", "before", "after", "kept"),
    "is_slow": (False, False, False, False, True),
    "steps": (12, 6, 20),
    "bad_step": (4, 0, 1, 3, 7, 11),
    "bad_micro": (0, 0, 1),
    "gap": (3, 1, 6, 99),
    "event_step": (2, 0, 3, 5),
    "history": (None, 1, 7, 0),
    "seed": tuple(range(1000)),
}
assert set(CHOICES) == {field.name for field in fields(Loop)}


def draw(generator: random.Random) -> Loop:
    """A loop whose every field is drawn from its choices."""
    return Loop(**{name: generator.choice(choices) for name, choices in CHOICES.items()}).settled()


# -- the model ---------------------------------------------------------------------------------------------------


class UnitRows(nn.Module):
    """Rows divided by their length: NaN for a row of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class MovingNorm(nn.Module):
    """Divides by a moving size, a buffer that every forward replaces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean(0)
        return x / (self.size + 0.1)


class Meter(nn.Module):
    """Keeps a moving mean of ratios, which training does not read: NaN for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                sizes = x.detach().abs().float()
                self.level.lerp_((sizes.mean(1) / sizes.amax(1)).mean().to(self.level.dtype), 0.1)
        return x


class Net(nn.Module):
    """Words and numbers to class scores."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "moving": MovingNorm}
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(2 * WIDTH, HIDDEN)
        self.norm = norms[loop.norm](HIDDEN)
        self.drop = nn.Dropout(loop.dropout)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.unit = UnitRows() if loop.fault == "forward" else nn.Identity()
        self.meter = Meter() if loop.fault == "buffer" else nn.Identity()
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.late = nn.Parameter(torch.zeros(CLASSES))
        self.gate = nn.Parameter(torch.ones(CLASSES))
        self.block = loop.block
        self.strength = 1.0
        self.is_open = True
        if loop.block == "tied":
            self.again = self.middle

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Scores, one row for each row of ``x``."""
        x = self.meter(self.unit(x))
        h = torch.cat([x, self.words(words).mean(1)], 1)
        h = self.drop(torch.tanh(self.norm(self.first(h))))
        h = h + self.inner(h)
        return self.head(h) * self.gate * self.strength if self.is_open else self.head(h)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        """The part in the middle, run again in backward where it is checkpointed."""
        if self.block == "checkpoint":
            return checkpoint(self.deep, h, use_reentrant=False)
        if self.block == "reentrant":
            return checkpoint(self.deep, h, use_reentrant=True)
        if self.block == "random_depth" and self.training and random.random() < 0.5:
            return h
        return self.again(self.deep(h)) if self.block == "tied" else self.deep(h)

    def deep(self, h: torch.Tensor) -> torch.Tensor:
        """A layer with random numbers of its own."""
        return F.dropout(torch.relu(self.middle(h)), 0.2, self.training and self.drop.p > 0)


class SignDescent(torch.optim.Optimizer):
    """An optimizer that a user might write: the gradient divided by its mean size."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.sub_(p.grad / (p.grad.abs().mean() + 1e-6), alpha=group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "own": SignDescent,
}


# -- batches -----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """``mask`` says which rows count; ``weight`` multiplies what the loss takes a root of."""

    x: torch.Tensor
    words: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    is_bad: bool


def make_batch(loop: Loop, step: int, micro: int) -> Batch:
    """The batch of a step, with what the fault needs."""
    generator = torch.Generator().manual_seed(1000 * loop.seed + 10 * step + micro)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    words = torch.randint(0, RARE, (ROWS, 2), generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    mask, weight = torch.ones(ROWS), torch.ones(())
    is_bad = loop.fault != "none" and step == loop.bad_step and micro == loop.bad_micro
    if loop.fault == "row" and micro == loop.bad_micro and step in (loop.bad_step, loop.bad_step + loop.gap):
        words[1, 0] = RARE
    if is_bad:
        match loop.fault:
            case "forward" | "buffer":
                x[2] = 0.0
            case "overflow":
                x[3, 1] = 3e38
            case "input":
                x[1, 2] = math.nan
            case "loss":
                mask = torch.zeros(ROWS)
            case "backward" | "gate" | "row" | "fake":
                weight = torch.zeros(())
            case "raise_forward":
                words[4, 1] = WORDS
            case "raise_loss":
                y[0] = CLASSES
    return Batch(x, words, y, mask, weight, is_bad)


def root(values: torch.Tensor) -> torch.Tensor:
    """A small term: 0 with a NaN as its gradient where the values are 0."""
    energy = values.square()
    return 1e-3 * torch.where(energy > 0, energy.sqrt(), energy).mean()


# -- the training ------------------------------------------------------------------------------------------------


class Training:
    """One run of a loop. ``planted`` is the iteration in which the fault was met, if it was: one ends before an
    optimizer steps a second time. ``turn`` is the optimizer that steps next."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.planted: int | None = None
        self.iteration, self.stepped, self.turn = 0, set[str](), "main"
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        torch.manual_seed(loop.seed)
        random.seed(loop.seed)
        self.model = Net(loop)
        self.teacher = copy.deepcopy(self.model) if loop.teacher != "none" else None
        self.other = nn.Linear(WIDTH, WIDTH) if loop.style == "adversarial" else None
        self.value = nn.Linear(CLASSES, 1) if loop.style == "actor_critic" else None
        self.memory = torch.zeros(ROWS, WIDTH) if loop.style == "recurrent" else None
        self.cell = nn.GRUCell(WIDTH, WIDTH) if loop.style == "recurrent" else None
        if loop.freeze in ("always", "until"):
            self.model.first.requires_grad_(False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5) if loop.scaler else None
        self.held = torch.zeros(ROWS, WIDTH)
        self.kept = copy.deepcopy(self.model.state_dict())
        self.make_optimizers()

    @property
    def phase(self) -> str | None:
        """That of the failure to be found: a step that was skipped leaves a bad statistic of a normalisation behind."""
        is_ruined = self.planted is not None and not all(b.isfinite().all() for b in self.model.buffers())
        return self.loop.phase or ("forward" if is_ruined else None)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the run."""
        return [m for m in (self.model, self.teacher, self.other, self.value, self.cell) if m is not None]

    def make_optimizers(self) -> None:
        """Optimizers for what the style trains, by role."""
        loop, model = self.loop, self.model
        groups = {"main": list(model.parameters())}
        if loop.style == "turns":
            own = [*model.words.parameters(), *model.first.parameters()]
            rest = [p for p in model.parameters() if all(p is not known for known in own)]
            groups = {"main": own, "second": rest}
        elif self.other is not None:
            groups["second"] = list(self.other.parameters())
        elif self.value is not None:
            groups["second"] = list(self.value.parameters())
        elif self.cell is not None:
            groups["main"] += list(self.cell.parameters())
        make = OPTIMIZERS[loop.optimizer]
        self.optimizers = {role: make(parameters, lr=0.01) for role, parameters in groups.items()}
        if loop.fault == "eps":
            rest = [p for p in groups["main"] if p is not model.late]
            self.optimizers["main"] = make([{"params": rest}, {"params": [model.late], "eps": 0.0}], lr=0.01)
        if loop.update == "lbfgs":
            self.optimizers = {"main": torch.optim.LBFGS(groups["main"], lr=0.05, max_iter=2)}
        main = self.optimizers["main"]
        self.scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(main, loop.steps) if loop.schedule == "cosine" else None
        )

    def run(self) -> None:
        """The whole training."""
        for step in range(self.loop.steps):
            if self.loop.is_slow:
                time.sleep(SLOW_SECONDS)
            self.begin(step)
            getattr(self, f"step_{self.loop.style}")(step)
            self.finish(step)

    def ending(self) -> list[torch.Tensor]:
        """The state at the end: modules, optimizers, gradients, generators."""
        states = [module.state_dict() for module in self.modules]
        gradients = [p.grad for module in self.modules for p in module.parameters() if p.grad is not None]
        options = [optimizer.state_dict() for optimizer in self.optimizers.values()]
        python = torch.tensor(random.getstate()[1])
        return [tensor.clone() for tensor in _tensors([states, options, gradients, torch.get_rng_state(), python])]

    # -- around the steps ------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The lines between two steps."""
        loop, model = self.loop, self.model
        if loop.schedule == "by_hand":
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + step)
        if loop.fault == "rate":
            for group in self.optimizers["main"].param_groups:
                if step == loop.bad_step:
                    self.rate, group["lr"] = group["lr"], math.inf
                elif step == loop.bad_step + 1 and group["lr"] == math.inf:
                    group["lr"] = self.rate
        self.toggle(step)
        if loop.freeze == "until" and step == loop.event_step:
            model.first.requires_grad_(True)
        if loop.freeze == "from" and step == loop.event_step:
            model.first.requires_grad_(False)
        if step == loop.event_step:
            self.convert()

    def toggle(self, step: int) -> None:
        """Plain attributes of the model that the loop sets."""
        loop, model = self.loop, self.model
        match loop.toggle:
            case "attribute":
                model.strength = 1.0 + 0.1 * step
            case "method":
                model.is_open = step % 3 != 1
            case "dropout" if step == loop.event_step:
                model.drop.p = 0.6
            case "evaluating":
                model.train(step % 4 != 2)
            case "frozen_norm" if step >= loop.event_step:
                model.norm.eval()

    def convert(self) -> None:
        """Another type, shape or memory for the parameters."""
        loop, model = self.loop, self.model
        match loop.convert:
            case "double":
                model.double()
            case "bfloat16":
                model.bfloat16()
            case "grown":
                model.words = nn.Embedding(WORDS + 2, WIDTH)
            case "moved":
                for p in model.parameters():
                    p.data = p.data.clone()
            case "reloaded":
                model.load_state_dict(self.kept)
        if loop.convert in ("double", "bfloat16", "grown"):
            self.make_optimizers()

    def finish(self, step: int) -> None:
        """The lines after an update."""
        loop, model = self.loop, self.model
        if self.scheduler is not None:
            self.scheduler.step()
        if self.teacher is not None:
            self.teach()
        if loop.fault == "write" and step == loop.bad_step:
            self.plant()
            with torch.no_grad():
                weight = model.words.weight
                weight[RARE] /= weight[RARE].sub(weight[RARE]).norm()
        match loop.extra:
            case "evaluation" if step % 3 == 2:
                self.evaluate(step)
            case "clamped":
                with torch.no_grad():
                    for p in model.head.parameters():
                        p.clamp_(-1, 1)
            case "reset" if step == loop.event_step:
                with torch.no_grad():
                    model.head.weight[0].normal_(std=0.1)

    def teach(self) -> None:
        """Move the teacher towards the model."""
        assert self.teacher is not None
        with torch.no_grad():
            for old, new in zip(self.teacher.state_dict().values(), self.model.state_dict().values(), strict=True):
                if old.shape != new.shape:
                    continue
                if self.loop.teacher == "average" and old.is_floating_point():
                    old.mul_(0.9).add_(new.to(old.dtype), alpha=0.1)
                else:
                    old.copy_(new)

    def evaluate(self, step: int) -> None:
        """A look at the model in between."""
        model, was_training = self.model, self.model.training
        model.eval()
        with torch.no_grad():
            for micro in range(3):
                batch = make_batch(self.loop.healthy, step, 5 + micro)
                x = batch.x.to(model.head.weight.dtype)
                model(x, batch.words).argmax(1).eq(batch.y).float().mean().item()
        model.train(was_training)

    def plant(self) -> None:
        """The fault has just been met."""
        if self.planted is None:
            self.planted = self.iteration + (self.turn in self.stepped)

    def count(self, role: str) -> None:
        """An update was made, or left out by a grad scaler."""
        if role in self.stepped:
            self.iteration, self.stepped = self.iteration + 1, set()
        self.stepped.add(role)

    def plant_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """An update is about to be made."""
        if self.loop.fault == "rate" and optimizer.param_groups[0]["lr"] == math.inf:
            self.plant()

    # -- steps -----------------------------------------------------------------------------------------------------

    def batch(self, step: int, micro: int) -> Batch:
        """The batch of a step as the loop handles it."""
        batch = make_batch(self.loop, step, micro)
        batch.x = batch.x.to(self.model.head.weight.dtype)
        match self.loop.batch:
            case "noise":
                batch.x.add_(torch.randn_like(batch.x), alpha=0.01 * float(not batch.is_bad))
            case "augmented":
                batch.x = batch.x.roll(random.randrange(WIDTH), 1) * 1.5
            case "reused":
                self.held = self.held.to(batch.x.dtype)
                self.held.copy_(batch.x)
                batch.x = self.held
        if batch.is_bad and self.loop.fault not in ("rate", "write", "fake"):
            self.plant()
        return batch

    def scores(self, batch: Batch) -> torch.Tensor:
        """The expression that calls the model on a batch."""
        x = batch.x
        if self.cell is not None:
            assert self.memory is not None
            self.memory = self.cell(x, self.memory.detach().to(x.dtype))
            x = self.memory
        with torch.autocast("cpu", torch.bfloat16) if self.scaler is not None else contextlib.nullcontext():
            return self.model(x, batch.words)

    def objective(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        loop, model = self.loop, self.model
        scores = self.scores(batch)
        if batch.is_bad and loop.fault == "raise_user":
            raise ValueError("a batch that the loop does not like")
        if batch.is_bad and loop.fault == "raise_backward":
            kept = scores.exp()
            loss = F.cross_entropy(scores, batch.y) + kept.sum() * 1e-3
            kept.zero_()
            return loss
        if batch.is_bad and loop.fault == "overflow":
            scores = scores * batch.x.abs().max().exp()
        losses = F.cross_entropy(scores.float() if self.scaler is not None else scores, batch.y, reduction="none")
        loss = (losses * batch.mask).sum() / batch.mask.sum()
        match loop.fault:
            case "backward":
                loss = loss + root(scores * batch.weight)
            case "gate":
                loss = loss + root(model.gate * batch.weight)
            case "row" if RARE in batch.words:
                loss = loss + root(model.words(batch.words[1, :1]) * batch.weight)
            case "eps" if batch.is_bad:
                loss = loss + (model.late * 0.0).sum()
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher(batch.x.to(self.teacher.head.weight.dtype), batch.words.clamp(max=RARE))
            loss = loss + 0.1 * (scores - target.to(scores.dtype)).square().mean()
        if loop.extra == "metric":
            with torch.no_grad():
                spread = (losses - losses.mean()) / losses.std()
            loss = loss * (1 + 0.01 * spread.tanh().mean())
        return loss

    def penalty(self, batch: Batch) -> torch.Tensor:
        """A gradient penalty on the input."""
        x = batch.x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x, batch.words).sum(), x, create_graph=True)
        return 1e-3 * (slope.square().sum(1) + 1e-6).sqrt().mean()

    def backward(self, loss: torch.Tensor) -> None:
        """From a loss to gradients."""
        loss = loss / self.loop.accumulate
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def zero_grad(self) -> None:
        """Drop the gradients of all optimizers."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=self.loop.zero != "kept")

    def step_supervised(self, step: int) -> None:
        """One model, one optimizer."""
        loop = self.loop
        if loop.zero != "after":
            self.zero_grad()
        if loop.update in ("closure", "lbfgs"):
            self.update_by_closure(step)
            return
        is_usable = True
        for micro in range(loop.accumulate):
            is_usable = self.differentiate(self.batch(step, micro)) and is_usable
        if is_usable:
            self.update("main")
        if loop.zero == "after":
            self.zero_grad()

    def differentiate(self, batch: Batch) -> bool:
        """Forward and backward of one batch; false if the loop skips it."""
        loop = self.loop
        loss = self.objective(batch)
        if loop.skip == "loss" and not math.isfinite(loss.item()):
            return False
        if loop.update == "by_grad":
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad + gradient
        elif loop.losses == "summed":
            self.backward(loss + 0.1 * self.objective(replace(batch, is_bad=False)))
        elif loop.losses == "separate":
            again = self.objective(batch)
            self.backward(loss)
            self.backward(0.1 * again)
        elif loop.losses == "penalty":
            self.backward(loss + self.penalty(batch))
        else:
            self.backward(loss)
        if loop.batch == "cleared":
            batch.x.zero_()
        return True

    def update_by_closure(self, step: int) -> None:
        """The optimizer calls for the loss itself."""
        optimizer = self.optimizers["main"]
        batches = [self.batch(step, micro) for micro in range(self.loop.accumulate)]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([self.objective(batch) for batch in batches]).mean()
            loss.backward()
            return loss

        self.plant_rate(optimizer)
        optimizer.step(closure)
        self.count("main")
        if self.loop.zero == "after":
            self.zero_grad()

    def update(self, role: str) -> None:
        """Clip, and let an optimizer (or the loop) update."""
        loop, optimizer = self.loop, self.optimizers[role]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.scaler is not None and loop.clip != "none":
            self.scaler.unscale_(optimizer)
        if loop.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.5)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0) if loop.clip == "norm" else None
        if loop.skip == "gradient":
            if norm is None:
                norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if not math.isfinite(norm.item()) and self.scaler is None:
                self.zero_grad()
                return
        self.plant_rate(optimizer)
        if loop.update in ("by_hand", "by_data"):
            self.update_by_hand(parameters, optimizer.param_groups[0]["lr"])
        elif self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        self.count(role)

    def update_by_hand(self, parameters: list[torch.Tensor], rate: float) -> None:
        """Gradient descent as the loop writes it."""
        if self.loop.update == "by_data":
            for p in parameters:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-rate)
            return
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p -= rate * p.grad

    step_recurrent = step_supervised

    def step_turns(self, step: int) -> None:
        """Two optimizers for two parts of one model, one in each step."""
        self.turn = "main" if step % 2 == 0 else "second"
        self.zero_grad()
        if all([self.differentiate(self.batch(step, micro)) for micro in range(self.loop.accumulate)]):
            self.update(self.turn)
            self.turn = "second" if self.turn == "main" else "main"

    def step_actor_critic(self, step: int) -> None:
        """Two losses over one forward, an optimizer for each."""
        assert self.value is not None
        batch = self.batch(step, 0)
        loss = self.objective(batch)
        scores = self.scores(batch)
        advantage = self.value(scores.detach().to(self.value.weight.dtype)).squeeze(1) - batch.y
        self.zero_grad()
        if self.loop.losses == "separate":
            loss.backward()
            (0.5 * advantage.square().mean()).backward()
        else:
            policy = -(scores.log_softmax(1)[:, 0] * advantage.detach()).mean()
            (loss + 0.1 * policy + 0.5 * advantage.square().mean()).backward()
        self.update("main")
        self.update("second")

    def step_adversarial(self, step: int) -> None:
        """A critic in every step, a generator in every second."""
        self.turn = "main"
        assert self.other is not None
        batch = self.batch(step, 0)
        fake = self.other(torch.randn(ROWS, WIDTH))
        self.zero_grad()
        loss = self.objective(batch) + self.model(fake.detach(), batch.words)[:, 0].mean()
        if self.loop.losses == "penalty":
            loss = loss + self.penalty(batch)
        loss.backward()
        self.update("main")
        if step % 2 == 0:
            self.turn = "second"
            self.optimizers["second"].zero_grad()
            loss = -self.model(fake, batch.words)[:, 0].mean()
            if self.loop.fault == "fake":
                loss = loss + root(fake * batch.weight)
            if self.loop.fault == "fake" and batch.is_bad:
                self.plant()
            loss.backward()
            self.update("second")
            self.turn = "main"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, (int, float)):
        yield torch.tensor(float(value), dtype=torch.float64)
