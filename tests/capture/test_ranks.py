"""Several processes under torchrun: the guilty rank is named, all stop together, nobody hangs, nothing is changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from reprokit.cli import main
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import start_python_in

pytestmark = pytest.mark.slow

TRAINING = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
{spread}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=len(sys.argv) > 2)
generator = torch.Generator().manual_seed(rank)
for step in range(6):
    x = torch.randn(8, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    bad = step == 3 and rank == 1
    if how == "batch" and bad:
        x[0, 0] = float("nan")
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    if how == "loss":
        count = torch.full((), 0.0 if bad else 1.0)
        loss = loss * (count / count)
    if how == "gradient":
        energy = logits.pow(2) * (0.0 if bad else 1.0)
        loss = loss + torch.where(energy > 0, energy.sqrt(), energy).mean()
    if how == "exception" and bad:
        F.nll_loss(logits, y + 5)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with open(f"losses.{{rank}}", "a") as file:
        print(step, loss.item().hex(), file=file)
dist.destroy_process_group()
"""
AVERAGED = "model = nn.parallel.DistributedDataParallel(model)"
SHARDED = """
from torch.distributed.fsdp import fully_shard
for part in (model[0], model[2], model):
    fully_shard(part)
"""


def train(folder: Path, spread: str, *how: str, captured: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the script with two processes."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINING.format(spread=spread))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    capture = ["-m", "reprokit", "capture"] if captured else []
    return start_python_in(folder, *torchrun, *capture, "train.py", *how)


def losses(folder: Path) -> list[list[str]]:
    """What both ranks have written, line by line."""
    return [(folder / f"losses.{rank}").read_text().splitlines() for rank in range(2)]


def only_snapshot(folder: Path) -> Snapshot:
    """The snapshot of rank 1; there is no other file."""
    (path,) = folder.glob("*.pt")
    assert path.name == "train.rank1-step3.repro.pt"
    snapshot = load(path)
    assert (snapshot.settings.rank, snapshot.settings.world_size) == (1, 2)
    return snapshot


@pytest.mark.parametrize(
    ("how", "phase", "call"),
    [
        ("loss", "forward", "torch.Tensor.div"),
        ("gradient", "backward", "torch.Tensor.sqrt"),
        ("exception", "forward", "torch.nn.functional.nll_loss"),
    ],
)
def test_the_guilty_rank_saves_and_all_stop(how: str, phase: str, call: str, tmp_path: Path) -> None:
    done = train(tmp_path, AVERAGED, how)
    assert done.returncode != 0
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (3, phase, call)
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert all(len(lines) == 3 for lines in losses(tmp_path))
    if how != "exception":
        assert "rank 1, which saves its step" in done.stderr and "exitcode  : 3" in done.stderr
    assert main(["shrink", str(tmp_path / "train.rank1-step3.repro.pt"), "--output", str(tmp_path / "repro")]) == 0
    assert "distributed" not in (tmp_path / "repro" / "repro.py").read_text()


def test_a_healthy_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    for folder, captured in ((plain, False), (watched, True)):
        train(folder, AVERAGED, "healthy", captured=captured)  # torch itself may abort at the very end
    assert losses(plain) == losses(watched) and len(losses(plain)[0]) == 6
    assert list(watched.glob("*.pt")) == []


def test_a_sharded_model_says_that_it_could_not_be_replayed(tmp_path: Path) -> None:
    done = train(tmp_path, SHARDED, "batch")
    assert done.returncode != 0 and "rank 1, which saves its step" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.input_name) == (3, "forward", "x")
    assert snapshot.fidelity == "unfaithful"
    assert "spread over several processes" in (snapshot.fidelity_note or "")
    assert all(len(lines) == 3 for lines in losses(tmp_path))


def test_a_sharded_model_with_a_bad_gradient_trains_on(tmp_path: Path) -> None:
    """Its shards are not the same on all ranks, so nobody knows who else has seen it: stopping could hang the rest."""
    done = train(tmp_path, SHARDED, "gradient")
    assert "the training goes on, unwatched" in done.stderr
    assert all(len(lines) == 6 for lines in losses(tmp_path))
    assert {path.name for path in tmp_path.glob("*.pt")} == {f"train.rank{rank}-step3.repro.pt" for rank in range(2)}


def test_a_scaler_that_skips_the_step_of_a_bad_loss(tmp_path: Path) -> None:
    """The other rank takes it for one of the scaler's overflows and trains on, so the guilty one does as well."""
    done = train(tmp_path, AVERAGED, "loss", "scaled")
    assert "the training goes on, unwatched" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.failure.phase, snapshot.failure.call) == ("forward", "torch.Tensor.div")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert all(len(lines) == 6 for lines in losses(tmp_path))
