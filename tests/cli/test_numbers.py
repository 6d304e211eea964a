"""The numbers of a training and its step, as people read them, of loops with one optimizer and with several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from reprokit.capture.failure_text import growth
from reprokit.cli import main
from reprokit.rules.match import diagnose
from reprokit.snapshot.format import Snapshot, load

STEPS, BAD_STEP = 8, 6


def captured(folder: Path, loop: Callable[[], None]) -> Snapshot:
    """The snapshot of the loop's failure."""
    torch.manual_seed(0)
    with reprokit.capture(folder / "x.pt", quiet=True):
        loop()
    return load(folder / "x.pt")


def numbers(snapshot: Snapshot) -> dict[str, str]:
    return dict(growth(snapshot.timeline))


def loss_of(model: nn.Module, level: float, *, is_bad: bool = False) -> torch.Tensor:
    """A loss near ``level``; when ``is_bad`` a division makes it NaN."""
    count = torch.full((), 0.0 if is_bad else 1.0)
    return model(torch.ones(1, 2)).square().mean() * 0.001 + level * (count / count)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def adversaries(
    *, num_critic_steps: int = 1, failing: str = "critic", level: Callable[[int], float] = lambda step: 100.0
) -> None:
    """Two models take turns; the generator's loss is at ``level``, the critic's at 1."""
    critic, generator = nn.Linear(2, 2), nn.Linear(2, 2)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.02)
    for step in range(STEPS):
        for _ in range(num_critic_steps):
            update(critic_optimizer, loss_of(critic, 1.0, is_bad=step == BAD_STEP and failing == "critic"))
        update(
            generator_optimizer,
            loss_of(generator, level(step), is_bad=step == BAD_STEP and failing == "generator"),
        )


@pytest.mark.parametrize(("num_critic_steps", "failing"), [(1, "critic"), (3, "generator")])
def test_every_optimizer_that_takes_turns_has_its_own_line(tmp_path: Path, failing: str, num_critic_steps: int) -> None:
    loop = functools.partial(adversaries, num_critic_steps=num_critic_steps, failing=failing)
    shown = numbers(captured(tmp_path, loop))
    losses = {name: text for name, text in shown.items() if name.startswith("loss")}
    other = "generator" if failing == "critic" else "critic"
    assert set(losses) == {"loss (critic_optimizer)", "loss (generator_optimizer)"}
    assert losses[f"loss ({failing}_optimizer)"].split()[-1] == "nan"
    assert "nan" not in losses[f"loss ({other}_optimizer)"]
    assert "median" not in "".join(losses.values())
    assert {text.split(".")[0] for text in losses["loss (critic_optimizer)"].split()} <= {"1", "nan"}
    assert not any(name.startswith("learning rate") for name in shown)  # they never changed


def test_a_diagnosis_looks_at_the_losses_of_the_failing_one(tmp_path: Path) -> None:
    growing = captured(tmp_path, lambda: adversaries(failing="generator", level=lambda step: 4.0**step))
    (tmp_path / "x.pt").unlink()
    other = captured(tmp_path, lambda: adversaries(failing="critic", level=lambda step: 4.0**step))
    assert [item.id for item in diagnose(growing).also] == ["learning-rate-divergence"]
    assert diagnose(other).also == ()


# -- the step -------------------------------------------------------------------------------------------------------


def accumulated(num_batches: int, failing: int) -> Callable[[], None]:
    """A loop that makes so many backward passes for a step; batch ``failing`` has a loss of 0 / 0."""

    def loop() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            for batch in range(num_batches):
                loss_of(model, 1.0, is_bad=step == BAD_STEP and batch == failing).backward()
            optimizer.step()

    return loop


def when(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `reprokit show` says of the step."""
    main(["show", str(snapshot)])
    lines = capsys.readouterr().err.splitlines()
    return next(line for line in lines if line.startswith("when ")).removeprefix("when").strip()


def test_a_step_of_one_backward_pass_has_no_micro_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if its forward is found out only by the gradients."""

    def loop() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            x = torch.tensor([[1e30 if step == BAD_STEP else 1.0, 1.0]])
            update(optimizer, torch.tanh(model(x.square())).mean())

    snapshot = captured(tmp_path, loop)
    assert (snapshot.failure.phase, snapshot.observed_at) == ("forward", "gradient")
    assert (snapshot.step, snapshot.micro_step) == (BAD_STEP, 0)
    assert when(tmp_path / "x.pt", capsys) == f"step {BAD_STEP}, noticed in a gradient"


def test_micro_steps_are_counted_from_one_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured(tmp_path, accumulated(num_batches=3, failing=2))
    assert when(tmp_path / "x.pt", capsys).startswith(f"step {BAD_STEP}, micro-step 3 (after 2 backward passes), ")
