"""`--on ranks`: a parameter that differs between ranks is named with its first step and the rank; else silence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from reprokit.capture.lockstep import ONE_PROCESS
from reprokit.capture.meeting import digest
from reprokit.cli import main
from reprokit.locate.failure import RankDifference
from reprokit.render import facts
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in

TRAINING = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
last = dist.get_world_size() - 1
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
is_manual = how.startswith("manual")
if how in ("more steps", "ends"):
    from reprokit.capture import ranks
    ranks.AT_COPY = ranks.AT_END = 3.0
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
    with open(f"losses.{rank}", "a") as file:
        print(step, loss.item().hex(), file=file)
    if how == "ends" and step == 9 and rank == last:
        sys.exit()
    if how == "broken" and step == 18 and rank == last:
        from reprokit.capture.meeting import Replicas

        Replicas.digest = None
dist.destroy_process_group()
"""


def train(
    folder: Path, how: str, *options: str, num_ranks: int = 2, captured: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the script with several processes."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    capture = ["-m", "reprokit", "capture", "--on", "ranks", *options] if captured else []
    return run_python_in(folder, *torchrun, *capture, "train.py", how)


def found_in(folder: Path) -> tuple[Snapshot, RankDifference]:
    """The only snapshot, and its difference."""
    (path,) = folder.glob("*.pt")
    snapshot = load(path)
    assert (snapshot.failure.kind, snapshot.failure.way) == ("mismatch", "ranks")
    assert snapshot.failure.difference is not None
    return snapshot, snapshot.failure.difference


def losses(folder: Path) -> list[list[str]]:
    """What both ranks have written, line by line."""
    return [(folder / f"losses.{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "step", "parameter", "cause"),
    [
        ("seed", 0, "3.weight", "they differ before the first step"),
        ("written", 13, "3.weight", ""),
        ("manual clip", 13, "0.weight", ""),
    ],
)
def test_the_first_step_is_named(how: str, step: int, parameter: str, cause: str, tmp_path: Path) -> None:
    done = train(tmp_path, how)
    assert f"`{parameter}` differs on rank 1, which saves its step" in done.stderr
    assert "exitcode  : 3" in done.stderr
    snapshot, difference = found_in(tmp_path)
    assert (snapshot.settings.rank, snapshot.step) == (1, step)
    assert (difference.parameter, difference.ranks, difference.reference) == (parameter, (1,), 0)
    assert (difference.began_at, difference.equal_after) == (step, step - 1 if step else None)
    assert facts.when(snapshot) == f"step {step}"
    assert difference.is_exact and difference.cause == cause and difference.cause in done.stderr
    assert snapshot.fidelity_note == ONE_PROCESS and snapshot.tensors
    assert snapshot.failure.call is None
    assert difference.largest is not None and 0 < difference.largest < 1
    if how == "written":
        assert difference.num_parameters == 1 and abs(difference.largest - 1e-3) < 1e-6


@pytest.mark.slow
def test_a_single_rank_among_three_and_what_the_commands_make_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "rate", num_ranks=3)
    _, difference = found_in(tmp_path)
    assert (difference.ranks, difference.reference, difference.num_alike) == ((2,), 0, 2)
    (path,) = tmp_path.glob("*.pt")
    assert main(["show", str(path), "--json"]) == 0
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert failure["event"]["quantity"] == "parameter" and failure["event"]["began_at"] == 13
    assert failure["difference"]["ranks"] == [2]
    assert main(["show", str(path)]) == 0
    assert "rank 2 differs from rank 0 and 1 other in `0.weight` and 5 more" in capsys.readouterr().err
    for command in ("shrink", "verify", "render", "whatif"):
        assert main([command, str(path)]) == 4
        assert "the parameters of the ranks differ, and one process cannot show that" in capsys.readouterr().err


@pytest.mark.slow
def test_without_copies_the_steps_between_two_comparisons_are_named(tmp_path: Path) -> None:
    train(tmp_path, "rate", "--history", "off")
    snapshot, difference = found_in(tmp_path)
    assert difference.equal_after is not None and difference.equal_after < 13 <= difference.began_at == snapshot.step
    assert not difference.is_exact and difference.cause == ""
    assert (snapshot.fidelity, snapshot.program.num_calls) == ("unfaithful", 0)


@pytest.mark.slow
def test_a_healthy_run_is_silent_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Statistics of the normalisation, and a parameter that DDP ignores, differ on purpose."""
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    train(plain, "healthy", captured=False)
    done = train(watched, "healthy", "--history", "1")  # which compares after every step
    assert losses(plain) == losses(watched) and len(losses(plain)[0]) == 20
    assert losses(plain)[0] != losses(plain)[1]
    assert list(watched.glob("*.pt")) == [] and "differ" not in done.stderr and "compared nothing" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_ends_early_stops_nobody(tmp_path: Path) -> None:
    done = train(tmp_path, "ends")  # or the time for the process is over
    assert (
        "rank 0 did not answer within 3 seconds; rank 1 has made 10 optimizer steps; `--on ranks` compares no more"
        in done.stderr
    )
    assert len(losses(tmp_path)[0]) == len(losses(tmp_path)[1]) == 10
    assert list(tmp_path.glob("*.pt")) == []


@pytest.mark.slow
def test_a_rank_that_makes_more_steps_stops_nobody(tmp_path: Path) -> None:
    """Its second step is the first one of the other rank, which then waits for its gradients."""
    done = train(tmp_path, "more steps")
    assert (
        "rank 1 did not answer within 3 seconds; rank 0 has made 2 optimizer steps; `--on ranks` compares no more"
        in done.stderr
    )
    assert "differ" not in done.stderr
    assert len(losses(tmp_path)[0]) == len(losses(tmp_path)[1]) == 20
    assert list(tmp_path.glob("*.pt")) == []


@pytest.mark.slow
def test_an_error_while_ranks_are_compared_stops_nobody(tmp_path: Path) -> None:
    """The last comparison is inside of `destroy_process_group()`, and the error must not come out of it."""
    done = train(tmp_path, "broken")
    assert done.returncode == 0 and len(losses(tmp_path)[0]) == len(losses(tmp_path)[1]) == 20
    assert "switched off after an error of its own (TypeError" in done.stderr
    assert (
        "rank 1 answers no more after 20 optimizer steps; rank 0 has made 20 optimizer steps; `--on ranks`"
        in done.stderr
    )


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
