"""What the tests of traps share: small models and batches, the end of a run as bits, and the two claims.

`check_silent`: capture notices nothing and changes nothing. `check_caught`: capture saves the right step, and the loop
that goes on afterwards ends with the same bits as without capture.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture import save as build_snapshot
from reprokit.capture.session import Session
from reprokit.program.interpreter import Observer, run
from reprokit.program.ir import Call
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import Run

Loop = Callable[[], list[torch.Tensor]]
WATCHES = ("sampled", "every-step")
STEPS = 6
BAD_STEP = 3


def batches(steps: int = STEPS, seed: int = 0) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Steps with a batch of 8 rows of 4 numbers and their classes."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(8, 4, generator=generator)
        yield step, x, (x.sum(1) > 0).long()


def net(seed: int = 0) -> nn.Sequential:
    """A model with buffers and random numbers in it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def plain_net(seed: int = 0) -> nn.Sequential:
    """A model without buffers and random numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model with buffers and random numbers, and what trains it."""
    model = net()
    return model, torch.optim.Adam(model.parameters())


def plain_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model without buffers and random numbers, and what trains it."""
    model = plain_net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class CountingBackend:
    """A backend of ``torch.compile`` that runs the graphs as they are and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


class Gated(nn.Module):
    """A network with a parameter that is read only when asked for, and that the optimizer updates in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.gate = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, is_open: bool) -> torch.Tensor:
        return self.body(x) + torch.where(torch.tensor(is_open), self.gate, 0.0)


def silent_root(x: torch.Tensor, bad: bool) -> torch.Tensor:
    """A small term; when ``bad`` it is 0, and its gradient NaN all the same."""
    energy = x.pow(2) * (0.0 if bad else 1.0)
    return torch.where(energy > 0, energy.sqrt(), energy).mean() * 1e-3


def rooted_loss(logits: torch.Tensor, y: torch.Tensor, bad: bool) -> torch.Tensor:
    """The loss of a classifier; when ``bad`` it is finite, and a square root makes its gradient NaN."""
    return F.cross_entropy(logits, y) + silent_root(logits, bad)


def divided_loss(logits: torch.Tensor, y: torch.Tensor, bad: bool) -> torch.Tensor:
    """The loss of a classifier; when ``bad``, a division makes it NaN."""
    count = torch.full((), 0.0 if bad else 1.0)
    return F.cross_entropy(logits, y) * (count / count)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of modules, optimizers, and nested containers, in a fixed order; numbers become tensors."""
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, (int, float)):
        yield torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "state_dict"):
        yield from tensors_in(value.state_dict())


def ending(*things: Any) -> list[torch.Tensor]:
    """Copies of all the tensors in ``things``, and the states of the generators."""
    return [*(tensor.clone() for tensor in tensors_in(things)), torch.get_rng_state(), _python_generator()]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two endings agree in every bit."""
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def run_plain(loop: Loop) -> list[torch.Tensor]:
    """The ending without capture."""
    random_seeded()
    return loop()


def random_seeded() -> None:
    """Python's generator as every run begins with it."""
    random.seed(0)


def check_silent(loop: Loop, folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
    """Claim that nothing is captured or said, and that no bit is changed."""
    plain = run_plain(loop)
    capsys.readouterr()
    random.seed(0)
    with Session(directory=folder, **options) as session:
        watched = loop()
    assert session.snapshots == [] and list(folder.iterdir()) == []
    assert capsys.readouterr().err == ""
    assert same_bits(plain, watched)


def check_caught(loop: Loop, folder: Path, **options: Any) -> Snapshot:
    """Claim that one failing step is saved and that the loop, going on, ends with the bits it would have had."""
    plain = run_plain(loop)
    random.seed(0)
    with described_once(), Session(directory=folder, after="continue", **options) as session:
        watched = loop()
    assert len(session.snapshots) == 1
    assert same_bits(plain, watched)
    return load(session.snapshots[0])


def check_exact(place: tuple[int, str, str | None], loop: Loop, folder: Path, **options: Any) -> None:
    """`check_caught`, and that the replay of the step at this place is exact."""
    snapshot = check_caught(loop, folder, **options)
    assert (where(snapshot), fidelity(snapshot)) == (place, EXACT)


@contextlib.contextmanager
def described_once() -> Iterator[None]:
    """The environment, which takes long to describe, is described once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_snapshot, "collect_environment", _environment)
        yield


_environment = functools.cache(build_snapshot.collect_environment)


def where(snapshot: Snapshot) -> tuple[int, str, str | None]:
    """Step, phase and call of a snapshot's failure."""
    return snapshot.step, snapshot.failure.phase, snapshot.failure.call


def fidelity(snapshot: Snapshot) -> tuple[str, str | None]:
    """How true the replay was, and what is said about it."""
    return snapshot.fidelity, snapshot.fidelity_note


EXACT = ("exact", None)


def is_exact_or_explained(snapshot: Snapshot) -> bool:
    """For what may truly not be repeatable: exact, or unfaithful with a reason."""
    return fidelity(snapshot) == EXACT or (snapshot.fidelity == "unfaithful" and bool(snapshot.fidelity_note))


def classify(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a classifier."""
    return F.cross_entropy(model(x), y)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """The three lines of every loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def scaled_update(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """The same with a scaler."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def run_both(
    script: str, run_python: Run, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A script run by Python alone, and by ``reprokit capture`` with these options."""
    (folder / "train.py").write_text(script)
    return run_python("train.py"), run_python("-m", "reprokit", "capture", *options, "train.py")


def without_own_lines(text: str) -> str:
    """What the script itself put on stderr."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("reprokit:"))


def complaints(text: str) -> list[str]:
    """The lines on stderr but those that announce a failure or an event that was found."""
    lines = (line for line in text.splitlines() if not line.endswith(ANNOUNCEMENTS))
    return [line for line in lines if not EVENT.match(line)]


ANNOUNCEMENTS = (
    "; replaying the step",
    "; going back to find the step that made it",
    "; going back to it",
    "and the loop skipped it; training goes on (`--on skipped` saves such a step)",
)
EVENT = re.compile("reprokit: ((error|warning): [a-z]+ at step [0-9]|something is not learned; saving step [0-9]+$)")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.contiguous().reshape(-1).view(torch.uint8)


def _python_generator() -> torch.Tensor:
    return torch.tensor(random.getstate()[1], dtype=torch.int64)


def numbers(snapshot: Snapshot) -> set[float]:
    """The numbers that running a snapshot's program makes."""
    found: set[float] = set()

    class Numbers(Observer):
        def after(self, index: int, call: Call, values: Any) -> None:
            found.update(v.item() for v in values.values() if v.numel() == 1)

    run(snapshot.program, snapshot.tensors, observer=Numbers())
    return found
