"""`--on ranks`: a parameter that differs between ranks is named with its first step and the rank; else silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reprokit.capture.lockstep import ONE_PROCESS
from reprokit.capture.meeting import digest
from reprokit.cli import main
from reprokit.render import facts
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in

TRAINING = """
import contextlib
import sys
from unittest.mock import patch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1

def train(how, losses=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    is_manual = how.startswith("manual")
    if how == "healthy":
        model.register_parameter("own", nn.Parameter(torch.ones(2)))
        model._ddp_params_and_buffers_to_ignore = ["own"]
    net = model if is_manual else nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    if how == "seed" and rank == last:
        torch.manual_seed(1)
        model[3].reset_parameters()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(8, 4, generator=generator)
        y = (x.sum(1) > 0).long()
        if how == "written" and step == 13 and rank == last:
            with torch.no_grad():
                model[3].weight[0, 0] += 1e-3
        loss = F.cross_entropy(net(x), y)
        if how == "healthy":
            loss = loss + (rank + 1) * model.own.sum()
        optimizer.zero_grad()
        loss.backward()
        if is_manual:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= last + 1
        if how.endswith("clip") and step == 13 and rank == last:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if how == "rate" and step == 13:
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + (rank == last))
        optimizer.step()
        if how == "more steps" and rank == 0:
            optimizer.step()
        if losses is not None:
            losses.append(loss.item())
    return losses
"""
ONE = TRAINING + "train(sys.argv[1])\ndist.destroy_process_group()\n"
SEVERAL = (
    TRAINING
    + """
import reprokit
from reprokit.capture import ranks
from reprokit.capture.meeting import Replicas

def watched(how, **options):
    with open(f"{how}.err.{rank}", "w") as said, contextlib.redirect_stderr(said):
        losses = []
        with reprokit.capture(f"{how}.pt", on=("nonfinite", "ranks"), **options):
            train(how, losses)
        return losses

for how in ("seed", "written", "manual clip"):
    watched(how)
watched("rate", history=0)
assert watched("healthy", history=1) == train("healthy", [])  # which compares after every step
with patch.object(ranks, "AT_COPY", 1.0), patch.object(ranks, "AT_END", 1.0):
    assert len(watched("more steps")) == 20
    digest, calls = Replicas.digest, []
    def broken(self):
        calls.append(1)
        return None() if rank == last and len(calls) > 1 else digest(self)
    with patch.object(Replicas, "digest", broken):
        assert len(watched("broken")) == 20
dist.destroy_process_group()
"""
)


def launch(folder: Path, script: str, *words: str, num_ranks: int = 2) -> str:
    """Run the script with several processes; what they said."""
    (folder / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_python_in(folder, *torchrun, *words).stderr


@pytest.mark.slow
def test_the_first_step_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, SEVERAL, "train.py")
    assert "Error" not in done, done

    def said(how: str) -> str:
        return "".join((tmp_path / f"{how}.err.{rank}").read_text() for rank in range(2))

    def found(how: str) -> Snapshot:
        (path,) = tmp_path.glob(f"{how}.*.pt")
        return load(path)

    for how, step, parameter, cause in (
        ("seed", 0, "3.weight", "they differ before the first step"),
        ("written", 13, "3.weight", ""),
        ("manual clip", 13, "0.weight", ""),
    ):
        snapshot = found(how)
        difference = snapshot.failure.difference
        assert difference is not None and f"`{parameter}` differs on rank 1, which saves its step" in said(how)
        assert (snapshot.failure.kind, snapshot.failure.way, snapshot.failure.call) == ("mismatch", "ranks", None)
        assert (snapshot.settings.rank, snapshot.step, facts.when(snapshot)) == (1, step, f"step {step}")
        assert (difference.parameter, difference.ranks, difference.reference) == (parameter, (1,), 0)
        assert (difference.began_at, difference.equal_after) == (step, step - 1 if step else None)
        assert difference.is_exact and difference.cause == cause and difference.cause in said(how)
        assert snapshot.fidelity_note == ONE_PROCESS and snapshot.tensors
        assert difference.largest is not None and 0 < difference.largest < 1
        if how == "written":
            assert difference.num_parameters == 1 and abs(difference.largest - 1e-3) < 1e-6
    snapshot = found("rate")  # without copies the steps between two comparisons are named
    difference = snapshot.failure.difference
    assert difference is not None and difference.equal_after is not None and not difference.is_exact
    assert difference.equal_after < 13 <= difference.began_at == snapshot.step and difference.cause == ""
    assert (snapshot.fidelity, snapshot.program.num_calls) == ("unfaithful", 0)
    assert said("healthy") == ""  # statistics of the normalisation, and a parameter that DDP ignores, differ on purpose
    late = "rank 1 did not answer within 1 seconds; rank 0 has made 2 optimizer steps; `--on ranks` compares no more"
    assert late in said("more steps") and "differ" not in said("more steps")
    assert "switched off after an error of its own (TypeError" in said("broken")
    assert len(list(tmp_path.glob("*.pt"))) == 4


@pytest.mark.slow
def test_a_single_rank_among_three_and_what_the_commands_make_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = ("-m", "reprokit", "capture", "--on", "ranks", "train.py", "rate")
    assert "exitcode  : 3" in launch(tmp_path, ONE, *capture, num_ranks=3)
    (path,) = tmp_path.glob("*.pt")
    difference = load(path).failure.difference
    assert difference is not None
    assert (difference.ranks, difference.reference, difference.num_alike) == ((2,), 0, 2)
    assert main(["show", str(path), "--json"]) == 0
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert failure["event"]["quantity"] == "parameter" and failure["event"]["began_at"] == 13
    assert failure["difference"]["ranks"] == [2]
    assert main(["show", str(path)]) == 0
    assert "rank 2 differs from rank 0 and 1 other in `0.weight` and 5 more" in capsys.readouterr().err
    for command in ("shrink", "verify", "render", "whatif"):
        assert main([command, str(path)]) == 4
        assert "the parameters of the ranks differ, and one process cannot show that" in capsys.readouterr().err


def test_one_process_is_told_that_nothing_is_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
    )
    done = run_python_in(tmp_path, "-m", "reprokit", "capture", "--on", "ranks", "train.py")
    assert done.returncode == 0
    assert "`--on ranks` has compared nothing: this process trains by itself" in done.stderr


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.uint8, torch.bool]
)
def test_a_hash_sees_every_kind_of_change(dtype: torch.dtype) -> None:
    x = (torch.arange(1, 65).reshape(8, 8) % 2 if dtype == torch.bool else torch.arange(1, 65).reshape(8, 8)).to(dtype)
    swapped = x.clone()
    swapped[0, 0], swapped[1, 1] = x[0, 1], x[1, 0]
    one = x.clone()
    one[3, 4] = 0 if x[3, 4] else 1
    others = [one, torch.zeros_like(x), torch.ones_like(x), x.flip(0) if dtype != torch.bool else x.logical_not()]
    others += [-x] if dtype.is_floating_point else []
    others += [swapped] if dtype != torch.bool else []
    hashes = [digest([tensor]) for tensor in (x, *others)]
    assert len(set(hashes)) == len(hashes)
    assert digest([x.t().contiguous().t()]) == hashes[0]  # strides are no difference
