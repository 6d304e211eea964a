"""Several processes under torchrun: the guilty rank is named, all stop together, nobody hangs, nothing is changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from reprokit.cli import main
from reprokit.program.interpreter import run
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in, start_python_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

TRAINING = """
import contextlib
import json
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()

def train(how, spread, losses, num_steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    first, last = model[0], model[2]
    if spread == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if spread == "fsdp":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how.startswith("scaled"))
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_steps):
        x = torch.randn(8, 4, generator=generator)
        y = (x.sum(1) > 0).long()
        bad = step == 3 and rank == 1
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if how.endswith("loss"):
            count = torch.full((), 0.0 if bad else 1.0)
            loss = loss * (count / count)
        if how in ("last layer", "one after the other"):
            count = torch.full((), 0.0 if bad or (step == 4 and rank == 0) else 1.0)
            reached = last.bias.sum() if how == "last layer" else logits.sum() if step == 4 else 1.0
            loss = loss + reached * (count / count - 1)
        if how in ("gradient", "busy"):
            energy = logits.pow(2) * (0.0 if bad else 1.0)
            loss = loss + torch.where(energy > 0, energy.sqrt(), energy).mean()
        if how == "one bias":
            loss = loss + (first.bias * (0.0 if bad else 1.0)).square().sum().sqrt()
        if how == "exception" and bad:
            F.nll_loss(logits, y + 5)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if spread == "manual":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        if how == "after averaging" and bad:
            next(model.parameters()).grad[0] = float("nan")
        if how == "busy" and bad or how == "busy update" and step == 1 and rank == 1:
            time.sleep(2.5)
        if how.endswith("update") and step == 3:
            optimizer.param_groups[0]["lr"] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item().hex())

def ruined_on_one():
    torch.manual_seed(0)
    table = nn.parallel.DistributedDataParallel(nn.Embedding(8, 4))
    optimizer = (torch.optim.RMSprop if rank == 1 else torch.optim.Adam)(table.parameters(), lr=1e-2)
    for step in range(8):
        optimizer.zero_grad()
        table(torch.arange(6 if step < 5 else 8)).square().mean().backward()
        if step == 3 and rank == 1:
            optimizer.param_groups[0]["eps"] = 0.0  # then a row that was never used is divided by zero
        optimizer.step()

def accumulating():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        for part in range(3):
            x = torch.randn(8, 4)
            bad = step == 3 and rank == 1 and part == 1
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                count = torch.full((), 0.0 if bad else 1.0)
                (model(x).pow(2).mean() * (count / count)).backward()
        optimizer.step()
"""
ONE = TRAINING + "train(sys.argv[1], sys.argv[2], [])\ndist.destroy_process_group()\n"
SEVERAL = (
    TRAINING
    + """
from unittest.mock import patch
import reprokit
from reprokit.capture import ranks
from reprokit.capture.budget import Budget
from reprokit.capture.judge import Flags
from reprokit.capture.loop import Loop

class Flag:  # of values on an accelerator, which are checked there; the results arrive two steps later
    def __init__(self):
        self.num_looks = 0
    def query(self):
        self.num_looks += 1
        return self.num_looks > 2
    def synchronize(self):
        pass

def add(self, tensors, step):
    self._sent += [(torch.isfinite(tensor.detach()).all(), Flag()) for tensor in tensors]

ends = {}

def watched(name, work, *args, **options):
    ends[name] = losses = []
    with open(f"{name}.err.{rank}", "w") as said, contextlib.redirect_stderr(said):
        with reprokit.capture(f"{name}.pt", **options):
            work(*args, *([losses] if work is train else []))

for how, spread in (
    ("loss", "ddp"), ("last layer", "ddp"), ("gradient", "ddp"), ("busy", "ddp"), ("loss", "manual"),
    ("update", "ddp"), ("update", "manual"), ("scaled loss", "ddp"), ("one after the other", "ddp"), ("healthy", "ddp"),
):
    watched(f"{how} {spread}", train, how, spread)
train("healthy", "ddp", bare := [])
assert ends["healthy ddp"] == bare and len(bare) == 6
for spread in ("ddp", "manual", "fsdp"):
    watched(f"asked {spread}", train, "healthy", spread, at_step=[2, 5])
watched("ruined", ruined_on_one)
watched("accumulating", accumulating)
with patch.object(Budget, "notes", lambda self, step: rank == 1):  # each rank keeps to its budget by itself
    watched("noted on one", train, "one bias", "ddp", history=0)
with patch.object(ranks, "AT_COPY", 1.0):
    watched("missed", train, "busy update", "ddp")
late = {"_waits_for": lambda self, tensors: bool(tensors), "has_bad_gradients": lambda *args, **kwargs: False}
with patch.object(Flags, "add", add), patch.multiple(Loop, **late):
    watched("late", train, "loss", "ddp")
    watched("late and skipped", train, "scaled loss", "ddp")
with contextlib.nullcontext() if rank else reprokit.capture("unwatched.pt"):
    train("loss", "ddp", losses := [])
ends["unwatched"] = losses
with open(f"ends.{rank}", "w") as file:
    json.dump({name: len(losses) for name, losses in ends.items()}, file)
dist.destroy_process_group()
"""
)
KILLED = """
import signal
from reprokit.capture.failures import Failures

made, asked = Failures._made, Failures.save_asked
Failures._made = lambda *args: time.sleep(3) or made(*args)
Failures.save_asked = lambda *args: time.sleep(1) or asked(*args)
if rank == 0:  # before the other rank has begun to replay its step
    Failures._made = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
"""


def torchrun(folder: Path, script: str, *words: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script, or reprokit with it, with several processes."""
    (folder / "train.py").write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_python_in(folder, *launcher, *words)


def only_snapshot(folder: Path, num_ranks: int = 2) -> Snapshot:
    """The snapshot of rank 1; there is no other file."""
    (path,) = folder.glob("*.pt")
    assert path.name == "train.rank1-step3.repro.pt"
    snapshot = load(path)
    assert (snapshot.settings.rank, snapshot.settings.world_size) == (1, num_ranks)
    return snapshot


SAVED = {  # by which rank, in which step and phase, and the origin
    "loss ddp": (1, 3, "forward", "torch.Tensor.div"),
    "last layer ddp": (1, 3, "forward", "torch.Tensor.div"),
    "gradient ddp": (1, 3, "backward", "torch.Tensor.sqrt"),
    "busy ddp": (1, 3, "backward", "torch.Tensor.sqrt"),  # the other one sees the averaged gradient long before
    "loss manual": (1, 3, "forward", "torch.Tensor.div"),
    "update ddp": (0, 3, "optimizer", "torch.optim.Adam.step"),  # the losses show it one step later
    "update manual": (0, 3, "optimizer", "torch.optim.Adam.step"),
    "ruined": (1, 3, "optimizer", "torch.optim.RMSprop.step"),  # nothing shows that until a batch has the row
    "accumulating": (1, 3, "forward", "torch.Tensor.div"),
    "noted on one": (1, 3, "backward", "torch.Tensor.sqrt"),  # of neither the first parameter nor the last one
    "late": (1, 3, "forward", "torch.Tensor.div"),
}


def test_the_guilty_rank_saves_and_all_stop(tmp_path: Path) -> None:
    done = torchrun(tmp_path, SEVERAL, "train.py")
    assert done.returncode == 0, done.stderr

    def said(name: str) -> str:
        return "".join((tmp_path / f"{name}.err.{rank}").read_text() for rank in range(2))

    def at(name: str, rank: int, suffix: str = "") -> Snapshot:
        return load(tmp_path / f"{name}.rank{rank}{suffix}.pt")

    ends = [json.loads((tmp_path / f"ends.{rank}").read_text()) for rank in range(2)]
    for name, (rank, step, phase, call) in SAVED.items():
        assert [path.name for path in tmp_path.glob(f"{name}.*.pt")] == [f"{name}.rank{rank}.pt"]
        assert f"rank {rank}, which saves its step" in said(name) and "not on every rank" not in said(name)
        snapshot = at(name, rank)
        assert (snapshot.settings.rank, snapshot.step) == (rank, step)
        assert (snapshot.failure.phase, snapshot.failure.call) == (phase, call)
        if name != "noted on one":
            assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
        if phase != "optimizer" and name not in ("late", "accumulating"):
            assert [end[name] for end in ends] == [3, 3]
    assert at("accumulating", 1).micro_step == 1
    skipped = at("scaled loss ddp", 1)  # the other rank takes it for one of the scaler's overflows and trains on
    assert (skipped.step, skipped.failure.call, skipped.fidelity) == (3, "torch.Tensor.div", "exact")
    assert [end["scaled loss ddp"] for end in ends] == [6, 6] and "goes on, unwatched" in said("scaled loss ddp")
    assert at("one after the other ddp", 1).step == 3 and at("one after the other ddp", 0).step == 4
    assert said("one after the other ddp").count("the training goes on, unwatched") == 2
    missed = said("missed")
    assert missed.count("rank 1 did not answer within 1 seconds") == 2 and "late failures are saved without" in missed
    assert (at("missed", 0).step, at("missed", 0).failure.is_given) == (4, True)
    assert "the loop skipped it" in said("late and skipped") and not list(tmp_path.glob("late and*.pt"))
    assert not list(tmp_path.glob("healthy*.pt")) and said("healthy ddp") == ""
    assert "rank 1 is not watched; rank 0 has made 2 optimizer steps" in done.stderr
    assert load(tmp_path / "unwatched.rank0.pt").step == 3 and [end["unwatched"] for end in ends] == [6, 6]
    for spread in ("ddp", "manual", "fsdp"):
        assert [end[f"asked {spread}"] for end in ends] == [6, 6]
        for step in (2, 5):
            pair = [at(f"asked {spread}", rank, f"-step{step}") for rank in range(2)]
            assert [(one.step, one.failure.kind, one.fidelity) for one in pair] == [(step, "none", "exact")] * 2
            if spread != "fsdp":  # gradients are the averaged ones
                one, other = (list(run(one.program, one.tensors).gradients.values()) for one in pair)
                assert len(one) == 4 and all(map(torch.equal, one, other))
            is_updated = any(call.target == "torch.optim.Adam.step" for call in pair[0].program.calls)
            assert is_updated == (spread != "fsdp")  # where parameters are spread it ends with its backward pass


@pytest.mark.parametrize(("how", "num_ranks"), [("gradient", 3), ("exception", 2)])
def test_the_command_stops_all_ranks(how: str, num_ranks: int, tmp_path: Path) -> None:
    """The last update of the other ranks is that of step 2; the repro needs one process."""
    done = torchrun(tmp_path, ONE, "-m", "reprokit", "capture", "train.py", how, "ddp", num_ranks=num_ranks)
    snapshot = only_snapshot(tmp_path, num_ranks)
    call = {"gradient": "torch.Tensor.sqrt", "exception": "torch.nn.functional.nll_loss"}[how]
    assert (snapshot.step, snapshot.failure.call, snapshot.fidelity) == (3, call, "exact")
    if how == "gradient":
        assert done.stderr.count("rank 1, which saves its step") == 2 and "exitcode  : 3" in done.stderr
    path, output = tmp_path / "train.rank1-step3.repro.pt", tmp_path / "repro"
    assert main(["shrink", "--no-whatif", str(path), "--output", str(output)]) == 0
    assert "distributed" not in (output / "repro.py").read_text()


def test_a_gradient_that_is_bad_on_one_rank_after_averaging(tmp_path: Path) -> None:
    """The other rank waits for this one in the next step, until the launcher ends it."""
    short = "from reprokit.capture import ranks\nranks.TO_SEE = 1.0\n"
    done = torchrun(tmp_path, f"{short}{ONE}", "-m", "reprokit", "capture", "train.py", "after averaging", "ddp")
    assert "bad on rank 1 at step 3, and not on every rank; rank 1 saves its step" in done.stderr
    assert "exitcode  : 3" in done.stderr
    assert only_snapshot(tmp_path).failure.call == "torch.Tensor.__setitem__"


def test_the_ranks_go_back_when_the_script_ends(tmp_path: Path) -> None:
    """The last update has ruined the parameters, and the script leaves the process group to the end."""
    script = TRAINING + "train('update', 'ddp', [], num_steps=4)\n"
    done = torchrun(tmp_path, script, "-m", "reprokit", "capture", "train.py")
    assert "the first bad value is that of rank 0, which saves its step" in done.stderr
    assert "exitcode  : 3" in done.stderr
    snapshot = load(tmp_path / "train.rank0-step3.repro.pt")
    assert (snapshot.failure.phase, snapshot.fidelity, snapshot.fidelity_note) == ("optimizer", "exact", None)


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_a_rank_that_is_killed_while_another_one_saves(spread: str, tmp_path: Path) -> None:
    """Nobody waits for the dead rank; where parameters are spread, no step is played without it."""
    script = ONE.replace("def train(", f"{KILLED}\ndef train(")
    done = torchrun(tmp_path, script, "-m", "reprokit", "capture", "train.py", "loss", spread)
    assert "exitcode  : -9" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert snapshot.failure.phase == "forward"
    assert ("the launcher ends this process" in str(snapshot.fidelity_note)) == (spread == "fsdp")


LIGHTNING = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, number):
        bad = number == 2 and self.global_rank == 1
        return self.layer(batch[0] * (float("nan") if bad else 1.0)).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))
"""
ALONE = """
import torch
weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    (weight * (float("nan") if step == 2 else 1.0)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "name", "exit_code", "launcher"),
    [
        (LIGHTNING, "train.rank1-step2.repro.pt", 3, ()),
        (ALONE, "train-step2.repro.pt", 1, ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")),
    ],
    ids=["lightning", "accelerate"],
)
def test_launchers(script: str, name: str, exit_code: int, launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    start = start_python_in if launcher else run_python_in
    done = start(tmp_path, *launcher, "-m", "reprokit", "capture", "train.py")
    assert done.returncode == exit_code, done.stderr
    assert [path.name for path in tmp_path.glob("*.pt")] == [name]  # of the culprit alone
    assert load(tmp_path / name).failure.call == "torch.Tensor.mul"
