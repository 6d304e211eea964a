"""A model of `fully_shard` over the limit: the culprit's step is replayed from one unit on, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprokit.capture.save.build_snapshot import PARTS_NOT_GATHERED
from reprokit.cli import main
from reprokit.snapshot.format import Snapshot, load
from tests.capture.test_sharded import launch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
KINDS = {
    "plain": {},
    "twice": {},
    "nested": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(5, 10), nn.Dropout(0.3), nn.Linear(10, 5)
    def forward(self, x, how):
        h = self.down(self.drop(F.gelu(self.up(x))))
        if how == "forward":
            h = h / (h - h)
        if how == "backward":
            h = h + (h * 0).sqrt()
        if how == "raise":
            h = h @ self.up.weight
        return x + h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 5)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(5, 3)
    def forward(self, ids, how, where):
        first = x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, how if number == where else "")
            x += 0.1
        if how == "loss":
            x = x / (x - x)
        return self.head(x + first)

def train(how, where, culprit, kind):
    torch.manual_seed(0)
    model = Net()
    inner = [part for block in model.blocks for part in (block.up, block.down)] if kind == "nested" else []
    for part in (*inner, *model.blocks, model):
        fully_shard(part, **KINDS[kind])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for micro_step in range(2 if kind == "twice" else 1):
            ids = torch.randint(0, 16, (4, 6), generator=generator)
            is_bad = step == 2 and rank == culprit and micro_step == where // 4
            logits = model(ids, how if is_bad else "", where % 4)
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten() % 3)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item().hex())
    return losses

import reprokit
from reprokit.capture.save import choose_step

whole = sum(parameter.numel() * 4 for parameter in Net().parameters())
block = sum(parameter.numel() * 4 for parameter in Block().parameters())
for case in sys.argv[1:]:
    how, where, culprit, kind, num_left_out = case.split("-")
    choose_step.DEFAULT_STATE_BYTES = whole - int(num_left_out) * block
    with reprokit.capture(f"{case}.pt"):
        train(how, int(where), int(culprit), kind)
plain = train("", 0, 0, "mixed")
with reprokit.capture("healthy.pt"):
    watched = train("", 0, 0, "mixed")
assert plain == watched
dist.destroy_process_group()
"""
CASES = {
    "forward-1-1-plain-1": ("forward", "torch.Tensor.div", "blocks.1"),
    "forward-2-0-mixed-1": ("forward", "torch.Tensor.div", "blocks.2"),
    "backward-1-1-plain-1": ("backward", "torch.Tensor.sqrt", "blocks.1"),
    "backward-2-0-mixed-2": ("backward", "torch.Tensor.sqrt", "blocks.2"),
    "backward-3-1-offload-3": ("backward", "torch.Tensor.sqrt", "blocks.3"),
    "forward-5-1-twice-1": ("forward", "torch.Tensor.div", "blocks.1"),
    "backward-6-0-twice-2": ("backward", "torch.Tensor.sqrt", "blocks.2"),
}


def test_a_step_is_replayed_from_the_culprit_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = launch(tmp_path, SCRIPT, 2, "train.py", *CASES)
    assert done.returncode == 0, done.stderr
    for case, (phase, call, module) in CASES.items():
        _, where, rank, *_ = case.split("-")
        path = tmp_path / f"{case}.rank{rank}.pt"
        snapshot = load(path)
        failure, settings, number = snapshot.failure, snapshot.settings, int(where)
        assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None), case
        assert (snapshot.step, failure.phase, failure.call, failure.module) == (2, phase, call, module), case
        last = f"blocks.{(number - 1) % 4}"
        assert (settings.num_recorded_units, settings.last_recorded_unit) == (number, last), case
        assert parameters_of(snapshot) == {f"blocks.{kept}" for kept in range(number % 4, 4)} | {"head"}
        assert snapshot.before is not None and PARTS_NOT_GATHERED in snapshot.before.left_out
        assert any(item.name == f"{last}_output" for item in snapshot.program.inputs)
        assert main(["shrink", str(path), "--output", str(tmp_path / case)]) == 0
    assert main(["show", str(tmp_path / "backward-2-0-mixed-2.rank0.pt")]) == 0
    assert "2 units up to `blocks.1` were not replayed; their outputs are" in capsys.readouterr().err


def test_a_failure_outside_of_units_needs_none(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT, 2, "train.py", "loss-0-1-plain-3", "forward-1-0-nested-1")
    assert done.returncode == 0, done.stderr
    snapshot = load(tmp_path / "loss-0-1-plain-3.rank1.pt")
    failure = snapshot.failure
    assert (failure.call, failure.module, snapshot.fidelity) == ("torch.Tensor.div", "<Net>", "exact")
    assert parameters_of(snapshot) == {"head"} and snapshot.settings.last_recorded_unit == "blocks.3"
    between = load(tmp_path / "forward-1-0-nested-1.rank0.pt")
    failure, settings = between.failure, between.settings
    assert (failure.call, failure.module, between.fidelity) == ("torch.Tensor.div", "blocks.1", "exact")
    assert (settings.num_recorded_units, settings.last_recorded_unit) == (4, "blocks.1.down")
    assert parameters_of(between) == {"blocks.2", "blocks.3", "head"}


def test_an_exception_is_raised_again(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT, 2, "train.py", "raise-2-0-plain-2")
    assert done.returncode != 0
    snapshot = load(tmp_path / "raise-2-0-plain-2.rank0.pt")
    failure = snapshot.failure
    assert (failure.call, failure.module, snapshot.fidelity) == ("torch.Tensor.matmul", "blocks.2", "exact")
    assert parameters_of(snapshot) == {"blocks.2"}


def test_a_culprit_too_far_from_the_loss_says_so(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT, 2, "train.py", "backward-0-1-plain-2")
    assert done.returncode == 0, done.stderr
    snapshot = load(tmp_path / "backward-0-1-plain-2.rank1.pt")
    assert snapshot.program.calls == ()
    assert "the parameters of 3 units and those outside of units take over 0 GiB" in str(snapshot.fidelity_note)


def parameters_of(snapshot: Snapshot) -> set[str]:
    """The modules whose parameters a program has: blocks, and others in the model."""
    names = [item.name for item in snapshot.program.inputs if item.role == "parameter"]
    return {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in names}
