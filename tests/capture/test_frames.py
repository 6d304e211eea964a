"""Code of the user's finds the frames of a bare run around it: in a forward, in warnings, in caught exceptions."""

from __future__ import annotations

import pytest

from tests.conftest import Run

SCRIPT = """
import inspect
import sys
import threading
import traceback
import warnings

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        for level in range(1, 9):
            warnings.warn(f"level {level}", stacklevel=level)
        print([(frame.name, frame.lineno) for frame in traceback.extract_stack()[-6:]])
        print([frame.function for frame in inspect.stack()[:5]], sys._getframe(1).f_code.co_qualname)
        return self.linear(x)

class Inherited(Net):
    pass

class Outer(Net):
    def __init__(self):
        super().__init__()
        self.inner = Inherited()

    def forward(self, x):
        return super().forward(x) + self.inner(x)

def call(model, x):
    return model(x)

def train(models):
    for step in range(5):
        loss = sum(call(model, torch.randn(4, 3)).pow(2).mean() for model in models)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    try:
        call(models[0], torch.randn(4, 5))
    except RuntimeError:
        traceback.print_exc()

torch.manual_seed(0)
models = [Net(), Inherited(), Outer()]
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)
train(models)
thread = threading.Thread(target=models[0], args=(torch.randn(4, 3),))
thread.start()
thread.join()
warnings.warn("out of the script", stacklevel=2)
"""


@pytest.mark.parametrize("options", [(), ("--watch", "every-step")])
def test_frames_and_warnings_are_those_of_a_bare_run(
    options: tuple[str, ...],
    start_python: Run,
    run_reprokit: Run,
    tmp_path,  # type: ignore[no-untyped-def]
) -> None:
    (tmp_path / "train.py").write_text("import warnings\nwarnings.simplefilter('always')\n" + SCRIPT)
    bare, watched = start_python("train.py"), run_reprokit("capture", *options, "train.py")
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert watched.stdout == bare.stdout
    stderr = "".join(line for line in watched.stderr.splitlines(True) if not line.startswith("reprokit:"))
    assert stderr == bare.stderr


def test_an_excepthook_that_raises(start_python: Run, start_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = "import sys, torch\ndef hook(*given): raise ValueError('hook')\nsys.excepthook = hook\n1 / 0\n"
    (tmp_path / "train.py").write_text(script)
    bare, watched = start_python("train.py"), start_reprokit("capture", "--quiet", "train.py")
    assert (bare.returncode, bare.stderr) == (watched.returncode, watched.stderr)
