"""Runs in which nothing is wrong and something is never learned, and runs that look so by design."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import reprokit
from reprokit.render import facts
from tests.capture.traps_checks import update
from tests.early import mlp

STEPS = 30


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)


def _adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=1e-2)


class _Cut(nn.Module):
    """An encoder whose way to the loss may be cut in several ways."""

    def __init__(self, cut: str = "") -> None:
        super().__init__()
        self.enc, self.dec, self.unused, self.cut = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(8, 2), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.enc(x))
        self.seen = self.unused(x)  # as the pooler of a language model
        if self.cut == "numpy":
            hidden = torch.from_numpy(hidden.detach().numpy())
        elif self.cut == "detach":
            hidden = hidden.detach()
        elif self.cut == "data":
            hidden = hidden.data
        return self.dec(hidden)


def made_anew() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    for _ in range(STEPS):
        x, y = _batch()
        out = model(x)
        values = [row.item() for row in out.flatten()]
        prediction = torch.tensor(values, requires_grad=True)
        update(optimizer, F.mse_loss(prediction, y.flatten()))


def chosen() -> None:
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = _batch()
        classes = model(x).argmax(1).float()
        loss = (classes - y.flatten()).abs().mean()
        loss.requires_grad = True
        update(optimizer, loss)


def cut_by_numpy() -> None:
    _train(_Cut("numpy"))


def cut_by_detach() -> None:
    _train(_Cut("detach"))


def cut_by_data() -> None:
    _train(_Cut("data"))


def _train(model: nn.Module, num_steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(num_steps):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))


def rounded() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x).sigmoid().round(), (y > 0).float()))


def one_class() -> None:
    model, y = mlp(8, 16, 1), torch.zeros(16, dtype=torch.long)
    optimizer = _adam(model)
    for _ in range(STEPS):
        update(optimizer, F.cross_entropy(model(_batch()[0]), y))


class _Listed(_Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(torch.tensor(torch.relu(self.enc(x)).tolist()))


def cut_by_list() -> None:
    _train(_Listed())


class _Saturated(nn.Module):
    """Pixels that were not divided by 255, into logistic units."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(self.hidden(1e8 * x)))


def saturated() -> None:
    _train(_Saturated())


def cancelled() -> None:
    model = mlp(8, 16, 4)
    optimizer = _adam(model)
    for _ in range(STEPS):
        update(optimizer, 1 + F.layer_norm(model(_batch()[0]), (4,)).mean())


def one_element() -> None:
    """A norm over a single channel: its result is its bias, whatever the encoder says."""
    model = nn.Sequential(nn.Linear(8, 1), nn.LayerNorm(1), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = _adam(model)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y + 1))


def cleared() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    for _ in range(STEPS):
        x, y = _batch()
        F.mse_loss(model(x), y).backward()
        optimizer.zero_grad()
        optimizer.step()


def other_model() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    model = copy.deepcopy(model)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))


def new_head() -> None:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[2] = nn.Linear(16, 1)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))


def assigned_later() -> None:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == 10:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))


def scaled_only() -> None:
    model, scaler = mlp(8, 16, 1), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = _adam(model)
    for _ in range(STEPS):
        x, y = _batch()
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        optimizer.step()


def always_skipped() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    for _ in range(STEPS):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        x, y = _batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def one_region() -> None:
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(STEPS):
            x, y = _batch()
            update(optimizer, F.mse_loss(model(x).float(), y))


def same_loss() -> None:
    """What is compared is always the same."""
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        out = model(_batch()[0])
        update(optimizer, (out - out.detach() + 0.3).mean(1).relu().pow(2).mean())


def left_out() -> None:
    """A generator that was used up."""
    model = _Cut()
    used_up = (p for p in list(model.enc.parameters())[:0])
    optimizer = torch.optim.SGD([{"params": used_up}, {"params": model.dec.parameters()}], lr=0.01)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))


def no_rate() -> None:
    """A warm-up in whole numbers."""
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) // 1000))
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))
        schedule.step()


def vanishing() -> None:
    sizes = [8] * 20
    _train(nn.Sequential(*[layer for size in sizes for layer in (nn.Linear(8, size), nn.Sigmoid())], nn.Linear(8, 1)))


def nearly_dead() -> None:
    model = mlp(8, 64, 64, 1)
    with torch.no_grad():
        model[2].bias.sub_(0.8)  # type: ignore[operator, union-attr]
    _train(model)


def underflown() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = _batch()
        update(optimizer, (model(x.half()) - y.half()).pow(2).mean() * 1e-6)


SILENT: list[tuple[Callable[[], None], str]] = [
    (made_anew, "`prediction`, given to `torch.nn.functional.mse_loss`, tests/early/test_not_learned.py:"),
    (chosen, "classes = model(x).argmax(1).float()"),
    (cut_by_numpy, "no gradient has reached `enc.weight` and `enc.bias` in 30 steps; `torch.Tensor.detach` lets no"),
    (cut_by_list, "has the numbers of what `torch.relu` (tests/early/test_not_learned.py:"),
    (saturated, "no gradient has reached `hidden.weight` and `hidden.bias` in "),
    (cut_by_detach, "`torch.Tensor.detach` lets no gradient through"),
    (cut_by_data, "hidden = hidden.data"),
    (rounded, "of `optimizer` are zero; `torch.Tensor.round` lets no gradient through"),
    (one_class, "its scores [16, 1] have one class, so it returns the same number, 0, whatever they are"),
    (cancelled, "are only rounding (norm "),
    (
        one_element,
        "the gradient of `0.weight` is zero or rounding in 30 steps; `torch.nn.functional.layer_norm` lets no",
    ),
    (cleared, "`zero_grad` clears them after the backward pass, before the step, tests/early/test_not_"),
    (other_model, "`optimizer` holds no parameter of the model that is trained, and no optimizer holds `0.weight`"),
    (new_head, "2 of the 4 parameters of `optimizer` are none of the model, and no optimizer holds `2.weight`"),
    (assigned_later, "holds no parameter of the model that is trained, and no optimizer holds `0.weight`, `0.bias`, "),
    (scaled_only, "the grad scaler has checked none of them"),
    (always_skipped, "the grad scaler has left out all 30 steps"),
    (one_region, "it was entered once around all steps, tests/early/test_not_learned.py:"),
    (left_out, " is empty, and no optimizer holds `enc.weight` and `enc.bias`, which have a gradient and have not"),
    (no_rate, " was 0 in the first steps, and is 0 in the last 30 steps, tests/"),
    (vanishing, "the gradient of `0.weight` vanishes: its norm is "),
    (nearly_dead, " of the units of `2` have got no gradient in 30 steps"),
    (underflown, "the gradient of `0.weight` underflows in float16: it is "),
    (same_loss, "the loss is 0.09 in all bits in the last 20 steps while the batch changes"),
]


def _watched(run: Callable[[], None], folder: Path, **options: Any) -> tuple[list[reprokit.TrainingEvent], Any]:
    torch.manual_seed(0)
    events: list[reprokit.TrainingEvent] = []
    given: dict[str, Any] = {
        "after": "continue",
        "budget": "off",
        **options,
    }  # else it depends on time which steps can be played
    with reprokit.capture(folder / "run.pt", on_event=events.append, **given) as session:
        run()
    return events, session


@pytest.mark.parametrize(("run", "words"), SILENT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_never_learned_is_told_once(
    run: Callable[[], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line without `--on early`, which changes nothing; with it an error, with the step that shows it."""
    assert not _watched(run, tmp_path)[1].snapshots
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "silent" in line]
    assert line.startswith("reprokit: warning: silent at step ") and words in line
    (event,), session = _watched(run, tmp_path, on=("early",), quiet=True)
    assert (event.kind, event.severity, event.snapshot) == ("silent", "error", str(tmp_path / "run.pt"))
    assert words in event.evidence
    (result,) = session.results
    assert (result["failure"]["kind"], result["failure"]["silence"]) == ("silent", event.evidence)
    snapshot = reprokit.load(tmp_path / "run.pt")
    shown = dict(facts.of_failure(snapshot))
    assert shown["not learned"] == snapshot.failure.way == event.evidence and shown.get("origin") != "unknown"
    assert "noticed" not in shown["when"]
    assert ("line" in shown) == (".py:" in event.evidence)


def rests_by_design() -> None:
    """A frozen backbone under an optimizer over everything, an unused head, experts in turn, layer drop, an average as
    teacher, an evaluation step, accumulation, a hinge at its floor, a detached target, a gate that begins at zero."""
    backbone, experts, head = mlp(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), _Cut()
    gate, teacher = nn.Parameter(torch.zeros(())), copy.deepcopy(head)
    backbone.requires_grad_(False)
    parameters = [*backbone.parameters(), *experts.parameters(), *head.parameters(), gate]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for step in range(3 * STEPS):
        x, _ = _batch()
        hidden = backbone(x)
        hidden = hidden + gate * experts[step // 5 % 3](hidden) if step % 7 else hidden
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(head(hidden), wanted + hidden.detach().sum(1, keepdim=True))
        (0.5 * (loss + (head(hidden).abs() - 1e6).relu().mean())).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, own in zip(teacher.parameters(), head.parameters(), strict=True):
                    mean.data = mean.data * 0.9 + own.data * 0.1
                head.eval()(x).argmax(1).float().mean().item()


def floor_of_zero() -> None:
    """A hinge that all rows keep, from the start."""
    model = mlp(8, 16, 1)
    optimizer = _adam(model)
    for _ in range(STEPS):
        update(optimizer, (model(_batch()[0]).abs() - 10).relu().mean())


def converged() -> None:
    """The same batch always, until nothing changes any more."""
    model, (x, y) = mlp(8, 16, 1), _batch()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 1e3
        loss.backward()
        return loss

    for _ in range(2 * STEPS):
        optimizer.step(closure)


def in_turns() -> None:
    """A critic that makes several steps before the generator makes its first, on a generator that is not detached."""
    generator, critic = mlp(4, 8, 8), mlp(8, 16, 1)
    for_generator, for_critic = _adam(generator), _adam(critic)
    for step in range(2 * STEPS):
        fake = generator(torch.randn(16, 4))
        update(for_critic, critic(fake).mean() - critic(_batch()[0]).mean())
        if step % 5 == 4:
            update(for_generator, -critic(generator(torch.randn(16, 4))).mean())


class _Zeros(nn.Module):
    """Zeros that end: an adapter and a head that begin at zero, rows of a table, units of a ReLU, experts that take
    rows in turn and get gradients of zeros meanwhile. Zeros that stay: a term that is switched off, a frozen critic."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base, self.down, self.up = (
            nn.Embedding(50, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 2),
            nn.Linear(2, 8),
        )
        self.experts, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1)
        self.aside, self.critic, self.gate = nn.Linear(8, 1), nn.Linear(1, 1), nn.Parameter(torch.zeros(()))
        self.critic.requires_grad_(False)
        for part in (self.up, self.head):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
        with torch.no_grad():
            self.base.bias[:6] = -50.0

    def forward(self, x: torch.Tensor, rows: torch.Tensor, turn: int) -> torch.Tensor:
        hidden = x + self.table(rows)
        hidden = hidden + self.up(self.down(hidden)) + self.gate * torch.relu(self.base(hidden))
        chosen = [self.experts[n](hidden[:16] if n == turn else hidden[:0]) for n in range(3)]
        return self.head(torch.cat(chosen)) + 0.0 * self.aside(hidden) + 0.1 * self.critic(self.head(hidden)).tanh()


def zeros_by_design() -> None:
    model = _Zeros()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for step in range(3 * STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, step / 10)
        x, y = _batch()
        loss = F.mse_loss(model(x, torch.randint(0, 5, (16,)), step // 5 % 3), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


def scaled_by_hand() -> None:
    """The loop divides the gradients itself, and enters autocast anew for every whole step."""
    model, scaler = mlp(8, 16, 1), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = _adam(model)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            x, y = _batch()
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x).float(), y)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(scaler.get_scale())
            optimizer.step()


def fits_already() -> None:
    """A value head that begins at zero, while every return is zero."""
    model, value = mlp(8, 16, 4), nn.Linear(8, 1)
    nn.init.zeros_(value.weight)
    nn.init.zeros_(value.bias)
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.01)
    for _ in range(3 * STEPS):
        x, y = _batch()
        update(optimizer, F.cross_entropy(model(x), y.flatten().long() % 4) + F.mse_loss(value(x), 0.0 * y))


def moved_by_hand() -> None:
    """Parameters in no optimizer: the loop moves them itself, or only a probe on top of them is to learn."""
    model = _Cut()
    optimizer = _adam(model.dec)
    for _ in range(3 * STEPS):
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))
        for p in [model.enc.bias]:
            p.data -= 0.01 * p.grad  # type: ignore[operator]
            p.grad = None


HEALTHY = (
    rests_by_design,
    zeros_by_design,
    floor_of_zero,
    converged,
    in_turns,
    scaled_by_hand,
    fits_already,
    moved_by_hand,
)


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
@pytest.mark.parametrize("on", [("early",), ("nonfinite",)], ids=["early", "default"])
def test_what_rests_by_design_is_left_alone(
    run: Callable[[], None], on: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, session = _watched(run, tmp_path, on=on)
    assert not events and not session.snapshots
    assert "silent" not in capsys.readouterr().err


def _pruned() -> list[torch.Tensor]:
    """A layer is replaced by a smaller one, filled from it, that no optimizer holds."""
    torch.manual_seed(0)
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(180):
        if step == 60:
            small, last = nn.Linear(8, 4), nn.Linear(4, 1)
            with torch.no_grad():
                small.weight.copy_(model[0].weight[:4])  # type: ignore[index]
                last.weight.copy_(model[2].weight[:, :4])  # type: ignore[index]
            model[0], model[2] = small, last
        x, y = _batch()
        update(optimizer, F.mse_loss(model(x), y))
    return [p.detach().clone() for p in model.parameters()]


def test_a_warning_of_the_user_is_shown_once(tmp_path: Path) -> None:
    """Looks play steps, in which nothing is shown; what was shown before them is still known then."""

    def run() -> None:
        model = _Cut("numpy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2 * STEPS):
            warnings.warn("the user's own", stacklevel=1)
            x, y = _batch()
            update(optimizer, F.mse_loss(model(x), y))

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        before = list(warnings.filters)
        events, _ = _watched(run, tmp_path, on=("early",), quiet=True)
        assert [str(one.message) for one in shown] == ["the user's own"] and events
        assert warnings.filters == before


def test_layers_that_were_replaced_are_not_filled_again(tmp_path: Path) -> None:
    bare, watched = _pruned(), list[torch.Tensor]()
    events, _ = _watched(lambda: watched.extend(_pruned()), tmp_path, on=("early",), quiet=True)
    assert all(map(torch.equal, bare, watched))
    assert "since step 60, tests/early/test_not_learned.py:" in events[0].evidence


@pytest.mark.parametrize("on", [("early",), ("nonfinite",)], ids=["early", "default"])
def test_a_weight_that_is_computed_when_it_is_read_is_not_read(on: tuple[str, ...], tmp_path: Path) -> None:
    """Spectral norm moves its buffers with each read of `weight`."""

    def train() -> None:
        layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 24)) for _ in range(2)]
        model = nn.Sequential(layers[0], nn.Tanh(), nn.Linear(24, 8), layers[1], nn.Linear(24, 1))
        _train(model)
        ended.append([*model.state_dict().values()])

    ended: list[list[torch.Tensor]] = []
    torch.manual_seed(0)
    train()
    _watched(train, tmp_path, on=on, quiet=True)
    assert all(map(torch.equal, *ended))
