"""The closing line: a run that ended badly, or in which nothing was checked, says what was seen and what to do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reprokit
from reprokit.capture.failure_text import COMPILED, Seen, closing_line
from reprokit.capture.session import Session
from tests.capture.traps_checks import batches, classify, described_once, plain_net, plain_training, update
from tests.conftest import Run

JUDGED = Seen(has_torch=True, has_forward=True, has_backward=True, num_steps=5, on=("nonfinite", "exception"))


@pytest.mark.parametrize("ending", [None, SystemExit(), SystemExit(0)])
def test_a_run_that_was_judged_and_ended_well_has_no_line(ending: BaseException | None) -> None:
    assert closing_line(JUDGED, ending) is None


@pytest.mark.parametrize(
    ("seen", "ending", "words"),
    [
        (JUDGED, SystemExit("no data"), "exit code 1"),
        (JUDGED, KeyboardInterrupt(), "none was bad"),
        (replace(JUDGED, num_skipped=1), OSError("x"), "checked and the loop skipped 1 bad step"),
        (replace(JUDGED, on=("exception",)), SystemExit(2), "--on nonfinite"),
        (replace(JUDGED, num_steps=0, num_skipped=4), None, "--on skipped"),
        (replace(JUDGED, on=("nonfinite",)), ValueError(), "--on exception"),
        (Seen(has_torch=True, has_forward=True, unseen=(COMPILED,)), None, "TORCH_COMPILE_DISABLE=1"),
    ],
)
def test_the_line_names_what_was_seen(seen: Seen, ending: BaseException | None, words: str) -> None:
    line = closing_line(seen, ending)
    assert line is not None and words in line and "\n" not in line


# -- what is seen of a block ----------------------------------------------------------------------------------------


def forward_only() -> None:
    plain_net()(torch.ones(8, 4))


def nothing_at_all() -> None:
    torch.ones(3).sum()


def transformed() -> None:
    weight = torch.ones(3)
    for _ in range(3):
        weight = weight - 0.1 * torch.func.jacrev(lambda w: w.square().sum())(weight)


def trained() -> None:
    model, optimizer = plain_training()
    for _, x, y in batches():
        update(optimizer, classify(model, x, y))


def failing_between_steps() -> None:
    trained()
    raise OSError("no space left")


LINES: dict[Callable[[], None], tuple[str, ...]] = {
    forward_only: ("forward passes but no backward pass was seen",),
    nothing_at_all: ("no backward pass was seen",),
    transformed: ("no update made of its gradients was seen",),
    trained: (),
    failing_between_steps: ("ended with OSError", "outside of a step", "6 steps were checked"),
}


@pytest.mark.parametrize("loop", LINES, ids=lambda loop: loop.__name__)
def test_what_was_seen(loop: Callable[[], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(OSError), reprokit.capture(tmp_path / "x.pt"):
        loop()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(LINES[loop])
    assert all(words in lines[0] for words in LINES[loop])
    assert not list(tmp_path.iterdir())


class Listening(torch.nn.Module):
    """Keeps what has been printed when it is played again."""

    def __init__(self, print_of: Callable[[], str]) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self._print_of = print_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Session.active is not None and not Session.active.is_watching:
            HEARD.append(self._print_of())
        return self.layer(self.norm(x) if self.training else x)


HEARD: list[str] = []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("loss", "the loss is nan at step 3; replaying"),
        ("gradient", "a gradient is nan or inf at step 3; replaying"),
        ("parameter", "a parameter is nan or inf at step 3; going back"),
        ("buffer", "a buffer is nan or inf at step 3; going back"),
        ("exception", "IndexError was raised at step 3; replaying"),
    ],
)
def test_a_failure_is_announced_before_anything_is_played(
    kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HEARD.clear()
    model = Listening(lambda: capsys.readouterr().err)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with described_once(), contextlib.suppress(IndexError), reprokit.capture(tmp_path / "x.pt", watch="every-step"):
        for step, x, y in batches():
            bad = kind if step == 3 else None
            loss = classify(model, x * (1e25 if bad == "buffer" else 1.0), y + 9 * (bad == "exception"))
            loss = loss * (math.nan if bad == "loss" else 1.0)
            loss = loss + torch.where(x > 9, (loss * (0 if bad == "gradient" else 1)).sqrt(), 0.0).sum()
            optimizer.param_groups[0]["lr"] = math.inf if bad == "parameter" else 0.1
            update(optimizer, loss)
    assert words in HEARD[0]


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("print(1)", 0, "torch was not imported"),
        ("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1))", 0, "forward passes but no backward pass"),
        ("import torch\nopen('missing')", 1, "ended with FileNotFoundError; no backward pass"),
    ],
)
def test_the_line_comes_last(
    script: str, code: int, words: str, start_reprokit: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    run = run_reprokit if "import torch" in script else start_reprokit
    result = run("capture", "train.py")
    assert result.returncode == code
    assert words in result.stderr.splitlines()[-1] and result.stderr.count("nothing was saved") == 1


def test_a_verbose_capture_shows_its_own_error_in_full(run_reprokit: Run, tmp_path: Path) -> None:
    """The folder is gone when the step is to be saved."""
    script = """
import os, torch
w = torch.zeros(1, requires_grad=True)
os.rmdir(os.getcwd())
(w / w).sum().backward()
w.data -= w.grad
"""
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text(script.replace("os.getcwd()", repr(str(tmp_path / "gone"))))
    result = run_reprokit("capture", "-v", "-o", "gone/x.pt", "train.py")
    assert result.returncode == 0 and "could not save the failing step" in result.stderr
    assert "Traceback" in result.stderr and "reprokit/capture/fidelity.py" in result.stderr
