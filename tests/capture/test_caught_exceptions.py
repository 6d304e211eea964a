"""An exception that the script catches has the traceback of a bare run, without a frame of reprokit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run

SCRIPT = """
import sys
import traceback

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in a custom backward")


def forward(x):
    model(x[:, :3])


def call(x):
    torch.randn(3) + torch.randn(4)


def read(x):
    x.item()


def write(x):
    model[0].weight += 1


def backward(x):
    model(x).backward()


def custom_backward(x):
    Failing.apply(model(x)).sum().backward()


def clip(x):
    nn.utils.clip_grad_norm_(3, 4)


def step(x):
    optimizer.step(lambda: 1 / 0)


def transformed(x):
    torch.func.grad(lambda y: y.missing)(x)


def compiled(x):
    torch.compile(lambda y: y @ torch.randn(3), backend="eager")(x)


def loader(x):
    for _ in torch.utils.data.DataLoader([x[0], x[1], "text"], batch_size=3):
        pass


FAILING = [forward, call, read, write, backward, custom_backward, clip, step, transformed, compiled, loader]


def train(fail, catches=True):
    for number in range(4):
        x = torch.rand(5, 4)
        if number == 2:
            try:
                fail(x)
            except Exception as error:
                if not catches:
                    raise
                frames = traceback.extract_tb(error.__traceback__)
                # A function of torch that is written in Python asks every mode first, and is called again by it.
                asks = [n for n, frame in enumerate(frames) if frame.name == "handle_torch_function"]
                shown = [frame for n, frame in enumerate(frames) if n not in asks and n + 1 not in asks]
                print(fail.__name__, type(error).__name__)
                for frame in shown:
                    print("   ", frame.filename.rpartition("/")[2], frame.lineno, frame.name)
                print("   ", error.__context__, error.__cause__)
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if len(sys.argv) > 1:
    train(globals()[sys.argv[1]], catches=False)
else:
    for fail in FAILING:
        train(fail)
"""


def test_frames_of_a_caught_exception(run_python: Run, run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--after-capture", "continue", "train.py")
    assert bare.returncode == 0, bare.stderr
    assert watched.stdout == bare.stdout
    assert watched.returncode == 0, watched.stderr
    assert bare.stdout.count("train.py") >= 11


@pytest.mark.parametrize("fail", ["backward", "custom_backward", "step"])
def test_frames_of_the_exception_that_ends_the_script(
    fail: str, run_python: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    """A function that has asked the mode first is shown once, although the frames between are gone already."""
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = run_python("train.py", fail)
    watched = run_reprokit("capture", "train.py", fail)
    assert bare.stderr.startswith("Traceback") and bare.stderr in watched.stderr
