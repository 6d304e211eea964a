"""Several processes under torchrun: the guilty rank is named, all stop together, nobody hangs, nothing is changed."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

from reprokit.cli import main
from reprokit.program.interpreter import run
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in, start_python_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

TRAINING = """
import sys
import time
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
    if how.endswith("loss"):
        count = torch.full((), 0.0 if bad else 1.0)
        loss = loss * (count / count)
    if how in ("last layer", "one after the other"):
        count = torch.full((), 0.0 if bad or (step == 4 and rank == 0) else 1.0)
        reached = model.module[2].bias.sum() if how == "last layer" else logits.sum() if step == 4 else 1.0
        loss = loss + reached * (count / count - 1)
    if how in ("gradient", "busy"):
        energy = logits.pow(2) * (0.0 if bad else 1.0)
        loss = loss + torch.where(energy > 0, energy.sqrt(), energy).mean()
    if how == "one bias":
        loss = loss + (model.module[0].bias * (0.0 if bad else 1.0)).square().sum().sqrt()
    if how == "exception" and bad:
        F.nll_loss(logits, y + 5)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if how.startswith("manual"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    if how == "after averaging" and bad:
        next(model.parameters()).grad[0] = float("nan")
    if how == "busy" and bad or how == "busy update" and step == 1 and rank == 1:
        time.sleep(4)
    if how.endswith("update") and step == 3:
        optimizer.param_groups[0]["lr"] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    with open(f"losses.{{rank}}", "a") as file:
        print(step, loss.item().hex(), file=file)
dist.destroy_process_group()
"""
AVERAGED = "model = nn.parallel.DistributedDataParallel(model)"
SPREAD = "from torch.distributed.fsdp import fully_shard; fully_shard(model)"
KILLED = """
import os
import signal
import time
from reprokit.capture.failures import Failures
from reprokit.capture.ranks import Ranks

made = Failures._made

def slowly(*args):
    time.sleep(3)
    return made(*args)

Failures._made = slowly
announce = Failures._save_pending
Failures._save_pending = lambda self, verdict: time.sleep(1) or announce(self, verdict)
if rank == 0:
    Ranks._are_all_done = Failures._made = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
"""  # before the other rank has begun to replay its step
LATE = """
from reprokit.capture.judge import Flags
from reprokit.capture.loop import Loop

class Flag:
    def __init__(self):
        self.num_looks = 0
    def query(self):
        self.num_looks += 1
        return self.num_looks > 2
    def synchronize(self):
        pass

def add(self, tensors, step):
    self._sent += [(torch.isfinite(tensor.detach()).all(), Flag()) for tensor in tensors]

Flags.add = add
Loop._waits_for = lambda self, tensors: bool(tensors)
Loop.has_bad_gradients = lambda self, optimizer, are_scaled: False
"""  # values on an accelerator are checked there, and the results arrive two steps later


def train(
    folder: Path,
    spread: str,
    *how: str,
    captured: bool = True,
    num_steps: int = 6,
    ends_group: bool = True,
    num_ranks: int = 2,
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run the script with several processes."""
    folder.mkdir(exist_ok=True)
    script = TRAINING.format(spread=spread).replace("range(6)", f"range({num_steps})")
    (folder / "train.py").write_text(script if ends_group else script.replace("dist.destroy_process_group()", ""))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    capture = ["-m", "reprokit", "capture", *options] if captured else []
    return run_python_in(folder, *torchrun, *capture, "train.py", *how)


def losses(folder: Path) -> list[list[str]]:
    """What both ranks have written, line by line."""
    return [(folder / f"losses.{rank}").read_text().splitlines() for rank in range(2)]


def only_snapshot(folder: Path, num_ranks: int = 2) -> Snapshot:
    """The snapshot of rank 1; there is no other file."""
    (path,) = folder.glob("*.pt")
    assert path.name == "train.rank1-step3.repro.pt"
    snapshot = load(path)
    assert (snapshot.settings.rank, snapshot.settings.world_size) == (1, num_ranks)
    return snapshot


@pytest.mark.parametrize(
    ("spread", "how", "num_ranks", "phase", "call"),
    [
        (AVERAGED, "loss", 2, "forward", "torch.Tensor.div"),
        (AVERAGED, "last layer", 2, "forward", "torch.Tensor.div"),
        (AVERAGED, "gradient", 3, "backward", "torch.Tensor.sqrt"),
        (AVERAGED, "exception", 2, "forward", "torch.nn.functional.nll_loss"),
        ("", "manual loss", 2, "forward", "torch.Tensor.div"),
    ],
)
def test_the_guilty_rank_saves_and_all_stop(
    spread: str, how: str, num_ranks: int, phase: str, call: str, tmp_path: Path
) -> None:
    done = train(tmp_path, spread, how, num_ranks=num_ranks)
    assert done.returncode != 0
    snapshot = only_snapshot(tmp_path, num_ranks)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (3, phase, call)
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert all(len(lines) == 3 for lines in losses(tmp_path))
    if how != "exception":
        assert done.stderr.count("rank 1, which saves its step") == num_ranks - 1 and "exitcode  : 3" in done.stderr
    assert main(["shrink", str(tmp_path / "train.rank1-step3.repro.pt"), "--output", str(tmp_path / "repro")]) == 0
    assert "distributed" not in (tmp_path / "repro" / "repro.py").read_text()


ONE_SECOND = """
from reprokit.capture import ranks
ranks.TO_SEE = 1.0
"""


def test_a_gradient_that_is_bad_on_one_rank_after_averaging(tmp_path: Path) -> None:
    """The other rank waits for this one in the next step, until the launcher ends it."""
    done = train(tmp_path, f"{AVERAGED}{ONE_SECOND}", "after averaging")
    assert "bad on rank 1 at step 3, and not on every rank; rank 1 saves its step" in done.stderr
    assert "exitcode  : 3" in done.stderr
    assert only_snapshot(tmp_path).failure.call == "torch.Tensor.__setitem__"
    assert list(map(len, losses(tmp_path))) == [4, 3]


def test_a_culprit_that_is_busy_after_its_backward_pass(tmp_path: Path) -> None:
    """The other rank sees the averaged gradient long before; it knows that the culprit has not looked yet."""
    done = train(tmp_path, AVERAGED, "busy")
    assert "not on every rank" not in done.stderr and "rank 1, which saves its step" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (3, "backward", "torch.Tensor.sqrt")


NOTED_ON_ONE = """
from reprokit.capture.budget import Budget
Budget.notes = lambda self, step: rank == 1
"""  # each rank keeps to its budget by itself


def test_all_ranks_look_at_the_same_gradients(tmp_path: Path) -> None:
    """The bad one is of neither the first parameter nor the last one, which are looked at in a step with a past."""
    done = train(tmp_path, f"{AVERAGED}{NOTED_ON_ONE}", "one bias", options=("--history", "off"))
    assert "not on every rank" not in done.stderr and "rank 1, which saves its step" in done.stderr
    assert only_snapshot(tmp_path).failure.call == "torch.Tensor.sqrt"
    assert list(map(len, losses(tmp_path))) == [3, 3]


@pytest.mark.parametrize("how", ["update", "manual update"])
def test_the_ranks_go_back_together(how: str, tmp_path: Path) -> None:
    """The step of the update that ruined the parameters, which the losses show one step later, has its gradients."""
    done = train(tmp_path, AVERAGED if how == "update" else "", how)
    assert "the first bad value is that of rank 0, which saves its step" in done.stderr
    (path,) = tmp_path.glob("*.pt")
    snapshot = load(path)
    assert (snapshot.settings.rank, snapshot.step, snapshot.failure.phase) == (0, 3, "optimizer")
    assert snapshot.failure.call == "torch.optim.Adam.step"
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert main(["shrink", str(path), "--output", str(tmp_path / "repro")]) == 0


def test_after_a_copy_that_one_rank_has_missed_the_step_that_shows_it_is_saved(tmp_path: Path) -> None:
    done = train(tmp_path, f"{AVERAGED}{ONE_SECOND.replace('TO_SEE', 'AT_COPY')}", "busy update")
    late = "rank 1 did not answer within 1 seconds; rank {} has made 2 optimizer steps; late failures are saved without"
    assert late.format(0) in done.stderr and late.format(1) in done.stderr
    assert "the first bad value is that of rank 0, which saves its step" in done.stderr
    (path,) = tmp_path.glob("*.pt")
    snapshot = load(path)
    assert (snapshot.settings.rank, snapshot.step, snapshot.failure.is_given) == (0, 4, True)


def test_the_ranks_go_back_when_the_script_ends(tmp_path: Path) -> None:
    """The last update has ruined the parameters, and the script leaves the process group to the end."""
    done = train(tmp_path, AVERAGED, "update", num_steps=4, ends_group=False)
    assert "the first bad value is that of rank 0, which saves its step" in done.stderr
    assert "exitcode  : 3" in done.stderr
    (path,) = tmp_path.glob("*.pt")
    snapshot = load(path)
    assert (snapshot.step, snapshot.failure.phase, snapshot.failure.call) == (3, "optimizer", "torch.optim.Adam.step")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)


def test_all_ranks_go_back_to_a_loss_that_one_sees_late(tmp_path: Path) -> None:
    done = train(tmp_path, f"{AVERAGED}{LATE}", "loss", num_steps=8, ends_group=False)
    assert "rank 1, which saves its step" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.failure.phase, snapshot.failure.call) == ("forward", "torch.Tensor.div")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)


def test_a_late_loss_of_which_a_scaler_made_no_update(tmp_path: Path) -> None:
    done = train(tmp_path, f"{AVERAGED}{LATE}", "loss", "scaled")
    assert done.returncode == 0 and "the loop skipped it" in done.stderr
    assert list(tmp_path.glob("*.pt")) == []
    assert all(len(lines) == 6 for lines in losses(tmp_path))


def test_a_healthy_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    for folder, captured in ((plain, False), (watched, True)):
        train(folder, AVERAGED, "healthy", captured=captured)  # torch itself may abort at the very end
    assert losses(plain) == losses(watched) and len(losses(plain)[0]) == 6
    assert list(watched.glob("*.pt")) == []


def test_a_scaler_that_skips_the_step_of_a_bad_loss(tmp_path: Path) -> None:
    """The other rank takes it for one of the scaler's overflows and trains on, so the guilty one does as well."""
    done = train(tmp_path, AVERAGED, "loss", "scaled")
    assert "the training goes on, unwatched" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.failure.phase, snapshot.failure.call) == ("forward", "torch.Tensor.div")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert all(len(lines) == 6 for lines in losses(tmp_path))


def test_nobody_waits_for_a_rank_that_goes_on_unwatched(tmp_path: Path) -> None:
    """The first bad loss reaches no gradient, so the other rank trains on, and fails in the next step."""
    done = train(tmp_path, AVERAGED, "one after the other")
    assert done.stderr.count("the training goes on, unwatched") == 2
    assert {path.name for path in tmp_path.glob("*.pt")} == {"train.rank1-step3.repro.pt", "train.rank0-step4.repro.pt"}
    assert all(len(lines) == 6 for lines in losses(tmp_path))


@pytest.mark.parametrize(("spread", "how"), [(AVERAGED, "healthy"), ("", "manual"), (SPREAD, "healthy")])
def test_a_step_that_was_asked_for_is_played_by_all_ranks(spread: str, how: str, tmp_path: Path) -> None:
    """Its gradients are the averaged ones; where parameters are spread it ends with its backward pass."""
    done = train(tmp_path, spread, how, options=("--at-step", "2,5"))
    assert all(len(lines) == 6 for lines in losses(tmp_path))
    assert len(list(tmp_path.glob("*.pt"))) == 4, done.stderr
    for step in (2, 5):
        snapshots = [load(tmp_path / f"train.rank{rank}-step{step}.repro.pt") for rank in range(2)]
        assert [(snapshot.step, snapshot.failure.kind) for snapshot in snapshots] == [(step, "none")] * 2
        assert [(snapshot.fidelity, snapshot.fidelity_note) for snapshot in snapshots] == [("exact", None)] * 2
        if spread != SPREAD:
            one, other = (list(run(one.program, one.tensors).gradients.values()) for one in snapshots)
            assert len(one) == 4 and all(map(torch.equal, one, other))
        is_updated = any(call.target == "torch.optim.Adam.step" for call in snapshots[0].program.calls)
        assert is_updated == (spread != SPREAD)


UNWATCHED = """
import contextlib
import os
import reprokit
with reprokit.capture("out.pt") if os.environ["RANK"] == "0" else contextlib.nullcontext():
"""


def test_nobody_waits_for_a_rank_that_is_not_watched(tmp_path: Path) -> None:
    script = UNWATCHED.lstrip() + textwrap.indent(TRAINING.format(spread=AVERAGED), "    ")
    (tmp_path / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python_in(tmp_path, *torchrun, "train.py", "loss")
    assert done.returncode == 0 and "rank 1 is not watched; rank 0 has made 2 optimizer steps" in done.stderr
    assert "the training goes on, unwatched" in done.stderr and "not on every rank" not in done.stderr
    assert load(tmp_path / "out.rank0.pt").step == 3
    assert all(len(lines) == 6 for lines in losses(tmp_path))


RUINED_ON_ONE = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
table = nn.parallel.DistributedDataParallel(nn.Embedding(8, 4))
optimizer = (torch.optim.RMSprop if rank == 1 else torch.optim.Adam)(table.parameters(), lr=1e-2)
for step in range(8):
    optimizer.zero_grad()
    table(torch.arange(6 if step < 5 else 8)).square().mean().backward()
    if step == 3 and rank == 1:
        optimizer.param_groups[0]["eps"] = 0.0  # then a row that was never used is divided by zero
    optimizer.step()
dist.destroy_process_group()
"""


def test_an_optimizer_of_one_rank_that_ruins_a_parameter(tmp_path: Path) -> None:
    """Nothing shows that until a batch has the row, two steps later."""
    (tmp_path / "train.py").write_text(RUINED_ON_ONE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_python_in(tmp_path, *torchrun, "-m", "reprokit", "capture", "train.py")
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.failure.phase, snapshot.failure.call) == ("optimizer", "torch.optim.RMSprop.step")
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)


ACCUMULATING = """
import contextlib
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
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
dist.destroy_process_group()
"""


def test_gradients_that_are_averaged_after_several_backward_passes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCUMULATING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start_python_in(tmp_path, *torchrun, "-m", "reprokit", "capture", "train.py")
    assert "rank 1, which saves its step" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert (snapshot.failure.call, snapshot.micro_step) == ("torch.Tensor.div", 1)


@pytest.mark.parametrize("spread", [AVERAGED, SPREAD])
def test_a_rank_that_is_killed_while_another_one_saves(spread: str, tmp_path: Path) -> None:
    """Nobody waits for the dead rank; where parameters are spread, no step is played without it."""
    done = train(tmp_path, f"{spread}{KILLED}", "loss")
    assert "exitcode  : -9" in done.stderr
    snapshot = only_snapshot(tmp_path)
    assert snapshot.failure.phase == "forward"
    assert ("the launcher ends this process" in str(snapshot.fidelity_note)) == (spread == SPREAD)


def test_ranks_that_are_started_again(tmp_path: Path) -> None:
    """The second attempt ends well, and the file of the first one stays."""
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    again = "sys.argv[1] *= os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    script = TRAINING.format(spread=AVERAGED).replace("import sys", f"import os\nimport sys\n{again}")
    (tmp_path / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = start_python_in(tmp_path, *torchrun, "-m", "reprokit", "capture", "train.py", "loss", **new_store)
    assert done.returncode == 0, done.stderr
    assert only_snapshot(tmp_path).failure.call == "torch.Tensor.div"
    assert [len(lines) for lines in losses(tmp_path)] == [9, 9]


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
