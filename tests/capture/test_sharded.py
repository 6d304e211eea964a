"""`fully_shard` in several processes: all record the step in lockstep, the culprit saves, and nobody hangs.

Models that are spread in another way: the rank that fails saves what it was given.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from reprokit.capture.save import OPTIMIZERS_SPREAD
from reprokit.cli import main
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

MODEL = """
import os
import signal
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
talks = False

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 10), nn.Linear(10, width)
    def forward(self, x, how):
        h = self.down(F.gelu(self.up(self.norm(x))))
        if talks:
            dist.all_reduce(torch.zeros(1))
        if how == "forward":
            h = h / (h - h)
        if how in ("backward", "skip"):
            h = h + (h * 0).sqrt()
        if how == "raise":
            h = h @ self.up.weight
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return x + h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(2)])
        self.head = nn.Linear(5, 3)
    def forward(self, ids, how):
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, how if number == 1 else "")
        return self.head(x)

KINDS = {
    "plain": lambda: {},
    "foreach": lambda: {},
    "talks": lambda: {},
    "mixed": lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "hsdp": lambda: {"mesh": init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))},
}

def spread(model, kind):
    options = KINDS[kind]()
    for part in (*model.blocks, model):
        fully_shard(part, **options)

def train(how, culprit, kind):
    torch.manual_seed(0)
    model = Net()
    spread(model, kind)
    foreach = kind == "foreach"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=foreach)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(5):
        unseen = 2 if how.startswith("update") and step <= 3 else 0  # rows of the embedding, held by the last rank
        ids = torch.randint(0, 16 - unseen, (4, 6), generator=generator)
        if step == 3 and unseen:
            optimizer.param_groups[0]["eps"] = 0.0  # then a row without gradient is divided by zero
        if how == "updateend" and step == 4:
            break
        logits = model(ids, how if step == 3 and rank == culprit else "")
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten() % 3)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach).full_tensor()
        if how == "skip" and not norm.isfinite():
            continue
        if how == "late" and step == 3 and rank == culprit:
            with torch.no_grad():
                model.head.weight.mul_(float("inf"))
        optimizer.step()
        losses.append(loss.item().hex())
    return losses, [p.to_local().detach().clone() for p in model.parameters()]
"""
SEVERAL = (
    MODEL
    + """
import reprokit
for case in sys.argv[1:]:
    how, culprit, kind = case.split("-")
    talks = kind == "talks"
    with reprokit.capture(f"{case}.pt"):
        train(how, int(culprit), kind)
plain = train("", 0, "mixed")
with reprokit.capture("healthy.pt"):
    watched = train("", 0, "mixed")
assert plain[0] == watched[0] and all(map(torch.equal, plain[1], watched[1]))

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, step):
        h = torch.tanh(self.body(x))
        return h + (self.late(h) * 0.0 if step > 1 else 0.0)

torch.manual_seed(0)
with reprokit.capture("half.pt"):
    net = Half().half()
    for part in (net.body, net.late, net):
        fully_shard(part)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)  # whose `eps` is zero in float16
    for step in range(6):
        optimizer.zero_grad()
        net(torch.randn(8, 4).half(), step).float().square().sum().backward()  # large enough to be squared in float16
        optimizer.step()

from reprokit.capture import lockstep

lockstep.DEFAULT_STATE_BYTES = 8
with reprokit.capture("large.pt"):
    train("forward", 1, "plain")
dist.destroy_process_group()
open(f"healthy.{rank}", "w").close()
"""
)
APART = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import reprokit

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.is_bad = nn.Linear(4, 8), nn.Linear(8, 4), False
    def forward(self, x):
        h = self.down(torch.tanh(self.up(x)))
        return h + (h * 0).sqrt() if self.is_bad else h

def train(kind):
    torch.manual_seed(0)
    net = Net()
    model = net
    if kind == "tensor":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    if kind == "FSDP1":
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "pipeline":
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        schedule = ScheduleGPipe(PipelineStage(net, rank, size, torch.device("cpu")), 2, loss_fn=F.mse_loss)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        net.is_bad = step == 3 and rank == 1
        x = torch.randn(4, 4)
        optimizer.zero_grad()
        if kind == "pipeline":
            schedule.step(x) if rank == 0 else schedule.step(target=x)
        else:
            model(x).mean().backward()
        optimizer.step()

for kind in ("tensor", "FSDP1", "pipeline"):
    with reprokit.capture(f"{kind}.pt", after="continue"):
        train(kind)
    dist.barrier()
dist.destroy_process_group()
"""
ONE = MODEL + "train(*sys.argv[1:2], int(sys.argv[2]), sys.argv[3])\n"


def launch(folder: Path, script: str, num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun."""
    (folder / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_python_in(folder, *torchrun, *words)


def check(snapshot: Snapshot, phase: str, call: str) -> None:
    """The origin is in the second block or the update of the step that failed; the replay is that of training."""
    failure, module = snapshot.failure, "blocks.1" if phase != "optimizer" else None
    assert (snapshot.step, failure.phase, failure.call, failure.module) == (3, phase, call, module)
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)


CASES = {
    "forward-1-plain": ("forward", "torch.Tensor.div"),
    "forward-0-mixed": ("forward", "torch.Tensor.div"),
    "backward-1-mixed": ("backward", "torch.Tensor.sqrt"),
    "forward-1-offload": ("forward", "torch.Tensor.div"),
    "forward-1-talks": ("forward", "torch.Tensor.div"),
    "update-1-plain": ("optimizer", "torch.optim.Adam.step"),
    "updateend-1-mixed": ("optimizer", "torch.optim.Adam.step"),
    "late-1-plain": ("optimizer", "torch.Tensor.mul_"),
    "update-1-foreach": ("optimizer", "torch.optim.Adam.step"),
}


def test_the_step_of_the_culprit_becomes_a_program_of_one_process(tmp_path: Path) -> None:
    done = launch(tmp_path, SEVERAL, 2, "train.py", *CASES, "skip-0-plain")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("healthy.*")} == {"healthy.0", "healthy.1"}
    found = {path.name.replace(".rank", " ") for path in tmp_path.glob("*.pt")}
    (half,) = (path for path in tmp_path.glob("half.*"))
    assert found == {f"{case} {case.split('-')[1]}.pt" for case in CASES} | {
        "large 1.pt",
        half.name.replace(".rank", " "),
    }
    for case, (phase, call) in CASES.items():
        check(load(tmp_path / f"{case}.rank{case.split('-')[1]}.pt"), phase, call)
    before = load(tmp_path / "update-1-plain.rank1.pt").before
    assert before is not None and OPTIMIZERS_SPREAD in before.left_out
    mixed = load(tmp_path / "forward-0-mixed.rank0.pt")
    kinds = {mixed.tensors[item.value].dtype for item in mixed.program.inputs if item.role == "parameter"}
    assert kinds == {torch.bfloat16}  # as the units gather them
    snapshot = load(half)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (2, "optimizer", "torch.optim.Adam.step")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None), done.stderr
    large = load(tmp_path / "large.rank1.pt")  # a step without program says why
    assert (large.step, large.program.calls) == (3, ())
    assert "whole parameters take over 0 GiB" in str(large.fidelity_note)
    for case in ("backward-1-mixed", "update-1-foreach"):
        repro = tmp_path / case
        assert main(["shrink", "--no-whatif", str(tmp_path / f"{case}.rank1.pt"), "--output", str(repro)]) == 0
        assert "distributed" not in (repro / "repro.py").read_text()


def test_a_rank_of_a_model_that_is_spread_in_another_way_saves_what_it_was_given(tmp_path: Path) -> None:
    done = launch(tmp_path, APART, 2, "train.py")
    assert "only DDP, averaging by hand and `fully_shard` are followed" in done.stderr
    for kind in ("tensor", "FSDP1", "pipeline"):
        snapshot = load(tmp_path / f"{kind}.rank1.pt")
        assert (snapshot.step, snapshot.failure.phase, snapshot.program.calls) == (3, "backward", ())
        assert any(tensor.shape[-1] == 4 for tensor in snapshot.tensors.values())


def test_an_exception_finds_the_other_ranks_inside_a_collective(tmp_path: Path) -> None:
    done = launch(tmp_path, ONE, 4, "-m", "reprokit", "capture", "train.py", "raise", "1", "hsdp")
    assert done.returncode != 0
    (path,) = tmp_path.glob("*.pt")
    assert path.name == "train.rank1-step3.repro.pt"
    snapshot = load(path)
    assert (snapshot.step, snapshot.failure.kind, snapshot.program.calls) == (3, "exception", ())
    assert snapshot.failure.module == "blocks.1" and "an exception was raised on one rank" in str(
        snapshot.fidelity_note
    )


def test_a_rank_that_is_killed_stops_nobody(tmp_path: Path) -> None:
    done = launch(tmp_path, ONE, 2, "-m", "reprokit", "capture", "train.py", "kill", "1", "plain")
    assert done.returncode != 0 and list(tmp_path.glob("*.pt")) == []
    assert "terminate called" not in done.stderr
