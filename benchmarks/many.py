"""Failures in training of several processes: is the right rank, step and origin found, and does one process show it?

    OMP_NUM_THREADS=1 python benchmarks/many.py [--kinds ddp manual fsdp] [--ranks 2 4] [--quick] [--json FILE]

Every cell of kind x failure x culprit is a script that gloo processes run under `reprokit capture`; the snapshot is
reduced and its repro verified in one process. Of each kind and number of ranks a healthy run is compared bit for bit
with a bare one. With `--json` the cells that the file already has are not run again. Exit code 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command import JSON, new_parser, print_json

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model)",
    "manual": "",
    "fsdp": "shard(fully_shard)",
    "fsdp-offload": "shard(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))",
    "fsdp-mixed": "shard(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
    "fsdp-clip": "shard(fully_shard)",
    "hsdp": 'shard(fully_shard, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "shard")))',
}
FAILURES = {  # the failure's phase and the origin
    "forward": ("forward", "torch.Tensor.div"),
    "backward": ("backward", "torch.Tensor.sqrt"),
    "optimizer": ("optimizer", "torch.optim.Adam.step"),
    "late": ("optimizer", "torch.Tensor.mul_"),
}
REPLICATED = ("optimizer", "late")  # every rank makes the same update: any of them may save it
STEP = 6  # of the failure
SECONDS = 240.0  # for one run, after which it counts as a hang
SHARE = 0.9  # of the cells: the least for step, origin and repro
SCRIPT = """\
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
kind, how, culprit = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
inner = model


def shard(function, **options):
    for part in (model[0], model[2], model):
        function(part, **options)


{spread}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(10):
    x = torch.randn(8, 8, generator=generator)
    y = (x.sum(1) > 0).long()
    is_bad = step == {step} and rank == culprit
    logits = model(x).float()
    loss = F.cross_entropy(logits, y)
    if how == "forward":
        count = torch.full((), 0.0 if is_bad else 1.0)
        loss = loss * (count / count)
    if how == "backward":
        energy = logits.pow(2) * (0.0 if is_bad else 1.0)
        loss = loss + torch.where(energy > 0, energy.sqrt(), energy).mean()
    optimizer.zero_grad()
    loss.backward()
    if kind == "manual":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
    if kind == "fsdp-clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step == {step} and how == "optimizer":
        optimizer.param_groups[0]["lr"] = float("inf")
    if step == {step} and how == "late":
        with torch.no_grad():
            inner[2].bias.mul_(float("inf"))
    optimizer.step()
    with open(f"losses.{{rank}}", "a") as file:
        print(step, loss.item().hex(), file=file)
dist.destroy_process_group()
"""


@dataclass
class Row:
    """The answer for one cell; ``found`` is what was saved. ``problem``: there was no answer."""

    kind: str
    ranks: int
    failure: str
    culprit: int
    rank_ok: bool = False
    step_ok: bool = False
    origin_ok: bool = False
    verified: bool = False
    hangs: bool = False
    found: str = ""
    problem: str = ""

    @property
    def cell(self) -> tuple[str, int, str, int]:
        """The row's place in the matrix."""
        return self.kind, self.ranks, self.failure, self.culprit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when an aim is missed."""
    options = _parse(argv)
    known = _known(options.json)
    rows: list[Row] = []
    for cell in _cells(options):
        rows.append(known.get(cell) or _measured(*cell))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(_summary(rows)), encoding="utf-8")
    summary = _summary(rows)
    print_json(summary, options.json)
    return 1 if summary["missed"] else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="two cells of each kind with 2 ranks")
    options = parser.parse_args(argv)
    options.ranks = [2] if options.quick else options.ranks
    return options


def _cells(options: argparse.Namespace) -> Iterator[tuple[str, int, str, int]]:
    failures = ["healthy", "optimizer"] if options.quick else ["healthy", *FAILURES]
    for kind, ranks, failure in itertools.product(options.kinds, options.ranks, failures):
        for culprit in (0, 1) if failure not in ("healthy", *REPLICATED) else (0,):
            yield kind, ranks, failure, culprit


def _known(file: Path | None) -> dict[tuple[str, int, str, int], Row]:
    if file is None or not file.exists():
        return {}
    rows = [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return {row.cell: row for row in rows}


def _measured(kind: str, ranks: int, failure: str, culprit: int) -> Row:
    row = Row(kind, ranks, failure, culprit)
    with tempfile.TemporaryDirectory(prefix="many-") as scratch:
        folder = Path(scratch)
        try:
            _run(row, folder, captured=True)
            _compare(row, folder) if failure == "healthy" else _judge(row, folder)
        except subprocess.TimeoutExpired:
            row.hangs, row.problem = True, "a run did not end"
    return row


def _run(row: Row, folder: Path, *, captured: bool) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.format(spread=KINDS[row.kind], step=STEP), encoding="utf-8")
    capture = ["-m", "reprokit", "capture"] if captured else []
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    _python(folder, *launch, *capture, "train.py", row.kind, row.failure, str(row.culprit))


def _python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


def _compare(row: Row, folder: Path) -> None:
    """A healthy run has the losses of a bare one, and saves nothing."""
    bare = folder / "bare"
    _run(row, bare, captured=False)
    names = [f"losses.{rank}" for rank in range(row.ranks)]
    is_same = all((folder / name).read_bytes() == (bare / name).read_bytes() for name in names)
    row.rank_ok = row.step_ok = row.origin_ok = row.verified = is_same and not list(folder.glob("*.pt"))
    row.problem = "" if row.verified else "not the same as a bare run"


def _judge(row: Row, folder: Path) -> None:
    """Compares the saved snapshots with what was planted."""
    phase, call = FAILURES[row.failure]
    paths = sorted(folder.glob("*.pt"))
    if len(paths) != 1:
        row.problem = f"{len(paths)} snapshots"
        return
    failure = json.loads(_python(folder, "-m", "reprokit", "show", paths[0].name, "--json").stdout)["failure"]
    row.found = f"{paths[0].name.removesuffix('.repro.pt')} {failure['phase']} {failure['call']}"
    row.rank_ok = row.failure in REPLICATED or f".rank{row.culprit}-" in paths[0].name
    row.step_ok = failure["step"] == STEP
    row.origin_ok = (failure["phase"], failure["call"]) == (phase, call)
    shrunk = _python(folder, "-m", "reprokit", "shrink", paths[0].name, "--json", "-o", "out", "--max-time", "60")
    verified = json.loads(shrunk.stdout)["repro"]["verified"] if shrunk.returncode == 0 else None
    row.verified = verified is not None and len(set(verified.split("/"))) == 1


def _line(row: Row) -> str:
    marks = "".join("." if ok else "x" for ok in (row.rank_ok, row.step_ok, row.origin_ok, row.verified))
    return f"{row.kind:13} {row.ranks} {row.failure:10} {row.culprit}  {marks}  {row.found} {row.problem}".rstrip()


def _summary(rows: Sequence[Row]) -> JSON:
    """The shares of all cells that failed on purpose, and the aims that were missed."""
    failed = [row for row in rows if row.failure != "healthy"]
    names = ("rank_ok", "step_ok", "origin_ok", "verified")
    shares = {name: sum(getattr(row, name) for row in failed) / max(len(failed), 1) for name in names}
    missed = [name for name in names if shares[name] < (1.0 if name == "rank_ok" else SHARE)]
    missed += ["healthy"] if any(row.failure == "healthy" and not row.verified for row in rows) else []
    missed += ["hangs"] if any(row.hangs for row in rows) else []
    return {"cells": len(rows), "shares": shares, "missed": missed, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    sys.exit(main())
