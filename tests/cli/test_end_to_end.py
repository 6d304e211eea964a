"""The whole tool through its public commands, on scripts nobody prepared for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import run_python_in

pytestmark = pytest.mark.slow

HEALTHY = """
import random, sys
import torch
from torch import nn

torch.manual_seed(0); random.seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for step in range(20):
    x = torch.randn(8, 6) * random.random()
    y = torch.randint(0, 2, (8,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            print("eval", model(x).sum().item())
        model.train()
    print(step, loss.item(), random.random())
torch.save([*model.state_dict().values(), *average.state_dict().values(), torch.get_rng_state()], "end.pt")
torch.save(model, "model.pt")
sys.exit(7)
"""


def reprokit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python_in(folder, "-m", "reprokit", *arguments)


def test_a_healthy_script_ends_with_the_same_bits(tmp_path: Path) -> None:
    folders = [tmp_path / "plain", tmp_path / "watched"]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(HEALTHY)
    plain = run_python_in(folders[0], "train.py")
    watched = reprokit(folders[1], "capture", "train.py")
    assert plain.returncode == watched.returncode == 7, watched.stderr
    assert plain.stdout == watched.stdout
    one, two = (torch.load(folder / "end.pt", weights_only=True) for folder in folders)
    assert len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert b"reprokit" not in (folders[1] / "model.pt").read_bytes()
    assert {path.name for path in folders[1].iterdir()} == {"train.py", "end.pt", "model.pt"}
    assert watched.stderr.splitlines() == [line for line in watched.stderr.splitlines() if line.startswith("reprokit:")]


def test_opening_a_snapshot_executes_nothing(tmp_path: Path) -> None:
    bait = tmp_path / "executed"

    class Bait:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.system, (f"touch {bait}",))

    path = tmp_path / "evil.pt"
    torch.save({"format": "reprokit", "kind": "snapshot", "version": 1, "program": Bait()}, path)
    for command in ("show", "shrink", "verify"):
        done = reprokit(tmp_path, command, str(path))
        assert done.returncode != 0 and not bait.exists()
        assert "Traceback" not in done.stderr and "hint:" in done.stderr


DETERMINISTIC = """
import torch

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    if step == 3:
        loss = loss + torch.empty(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0])).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OVERFLOWING_NORM = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(6):
    loss = model(torch.randn(8, 4).half()).float().square().mean() * (1.0 if step != 3 else 1e5)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "origin", "line"),
    [
        (DETERMINISTIC, "torch.Tensor.put_", "torch.use_deterministic_algorithms(True)"),
        (OVERFLOWING_NORM, "torch.linalg.vector_norm", "torch.linalg.vector_norm("),
    ],
    ids=["raised in deterministic mode only", "the norm of clipping overflows"],
)
def test_what_a_switch_or_a_bound_has_caused_is_found_and_fails_alone(
    script: str, origin: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    captured = json.loads(reprokit(tmp_path, "capture", "--json", "train.py").stdout)
    assert (captured["failure"]["call"], captured["failure"]["step"], captured["fidelity"]) == (origin, 3, "exact")
    assert reprokit(tmp_path, "shrink", captured["path"], "-o", "out").returncode == 0
    assert line in (tmp_path / "out" / "repro.py").read_text()
    assert run_python_in(tmp_path / "out", "repro.py").returncode == 1
