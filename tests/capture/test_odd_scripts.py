"""Scripts with generators in local variables, proxies, closed descriptors and code of their own making."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Run

OPTIONS = ("capture", "--after-capture", "continue")
TRAIN = """
import gc
import os
import random

import numpy
import torch
from torch import nn

torch.manual_seed(0)


def train(model, *given, steps=8, bad=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4), *given).pow(2).mean() * (float("nan") if step == bad else 1.0)
        loss.backward()
        optimizer.step()
        print(step, loss.item())
"""
GENERATORS = """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, of_torch, others):
        noise = torch.rand(x.shape, generator=of_torch["noise"])
        return self.layer(x + noise + others[0].random() + float(others[1].normal()) + float(others[2].rand()))


def main():
    of_torch = {"noise": torch.Generator().manual_seed(1)}
    others = [random.Random(3), numpy.random.default_rng(4), numpy.random.RandomState(5)]
    train(Noisy(), of_torch, others, bad=None)
    print(torch.rand(1, generator=of_torch["noise"]), others[0].random(), others[1].normal(), others[2].rand())


main()
"""
PROXY = """
class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("working outside of request context")


request = Proxy()
train(nn.Linear(4, 2))
"""
DESCRIPTORS = """
os.closerange(3, 256)
files = [open(f"{number}.bin", "wb", buffering=0) for number in range(6)]
train(nn.Linear(4, 2))
print([os.path.getsize(file.name) for file in files])
"""
NAMESPACES = """
class Batch:
    def __del__(self):
        print("freed")


source = "import torch; import torch.nn.functional as F; F.softmax(torch.ones(3)); torch.ones(3).add(1)"
code = compile(source, "generated", "exec")
for number in range(3):
    space = {"__name__": f"space{number}", "batch": Batch()}
    exec(code, space)
    del space
    gc.collect()
    print("after", number)
train(nn.Linear(4, 2), bad=None)
"""


def test_generators_in_local_variables_are_put_back_after_a_replay(
    tmp_path: Path, run_python: Run, run_reprokit: Run
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + GENERATORS)
    bare = run_python("train.py")
    watched = run_reprokit(*OPTIONS, "--at-step", "3", "train.py")
    assert "saved step 3" in watched.stderr
    assert watched.stdout == bare.stdout


def test_a_proxy_among_the_variables_does_not_lose_the_failure(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(TRAIN + PROXY)
    watched = run_reprokit("capture", "-o", "s.pt", "train.py")
    assert (watched.returncode, (tmp_path / "s.pt").exists()) == (3, True), watched.stderr


def test_no_line_goes_into_a_file_that_took_over_a_descriptor(
    tmp_path: Path, run_python: Run, run_reprokit: Run
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + DESCRIPTORS)
    watched = run_reprokit(*OPTIONS, "-o", "s.pt", "train.py")
    assert watched.stdout == run_python("train.py").stdout
    assert "captured nan" in watched.stderr


def test_namespaces_of_executed_code_are_freed_and_warn_by_themselves(
    tmp_path: Path, run_python: Run, run_reprokit: Run
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + NAMESPACES)
    bare, watched = run_python("train.py"), run_reprokit("capture", "train.py")
    assert bare.stdout.count("freed") == 3
    assert bare.stderr.count("UserWarning") == 3
    assert watched.stdout == bare.stdout
    assert watched.stderr.count("UserWarning") == 3
