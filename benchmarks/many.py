"""Failures in training of several processes: is the right rank, step and origin found, and does one process show it?

    OMP_NUM_THREADS=1 python benchmarks/many.py [--kinds ddp fsdp] [--ranks 2 4] [--failures late] [--json FILE]
    OMP_NUM_THREADS=1 python benchmarks/many.py --parts overhead [--rounds 40]

The trainings are in `many_trainings.py`. All cells of a kind and a number of ranks run one after another in one group
of gloo processes; what a group that hangs or breaks off has left is run by another group. Each snapshot is
reduced and its repro verified in one process. With `--json` the cells that the file has already are not run again. Exit
code 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command import JSON, new_parser, print_json

from reprokit.cli import main as reprokit
from reprokit.snapshot.format import load

FOLDER = Path(__file__).resolve().parent
KINDS = ("ddp", "manual", "fsdp", "fsdp-offload", "fsdp-mixed", "fsdp-clip", "hsdp")
FAILURES = {  # the failure's phase and the origin
    "healthy": ("", ""),
    "forward": ("forward", "torch.Tensor.div"),
    "backward": ("backward", "torch.Tensor.sqrt"),
    "optimizer": ("optimizer", "torch.optim.Adam.step"),
    "late": ("optimizer", "torch.Tensor.mul_"),
}
STEP = 6  # of the failure, as in `many_trainings.py`
SECONDS = (90.0, 15.0)  # for a group, and for each of its cells; after that it hangs
LIMIT = 1.02  # times the step without capture


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
    def cell(self) -> str:
        """The cell's name in its group."""
        return f"{self.failure}-{self.culprit}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when an aim is missed."""
    options = _parse(argv)
    result: JSON = {}
    if options.json is not None and options.json.exists():
        result = json.loads(options.json.read_text(encoding="utf-8"))
    if "matrix" in options.parts:
        known = [Row(**row) for row in result.get("matrix", {}).get("rows", [])]
        result["matrix"] = _matrix(options, known, result)
    if "overhead" in options.parts:
        result["overhead"] = _overhead(options)
    print_json(result, options.json)
    return 1 if any(part["missed"] for part in result.values()) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("matrix", "overhead"), default=["matrix"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--failures", nargs="+", choices=FAILURES, default=list(FAILURES))
    parser.add_argument("--culprits", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--rounds", type=int, default=60, help="quadruples of steps for the overhead (default 60)")
    parser.add_argument("--again", action="store_true", help="run the chosen cells even if the file has them")
    return parser.parse_args(argv)


# -- the matrix -------------------------------------------------------------------------------------------------------


def _matrix(options: argparse.Namespace, known: list[Row], result: JSON) -> JSON:
    rows = list(known)
    for kind in options.kinds:
        for ranks in options.ranks:
            if kind == "hsdp" and ranks == 2:
                continue
            chosen = [Row(kind, ranks, *cell) for cell in _cells(options)]
            if not options.again:
                chosen = [row for row in chosen if _place(row) not in map(_place, rows)]
            for row in _measured(chosen):
                rows = [other for other in rows if _place(other) != _place(row)] + [row]
                print(_line(row), file=sys.stderr, flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps({**result, "matrix": _summary(rows)}), encoding="utf-8")
    summary = _summary(rows)
    print(_table(summary), file=sys.stderr)
    return summary


def _cells(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for failure in options.failures:
        for culprit in options.culprits if failure != "healthy" else (0,):
            yield failure, culprit


def _place(row: Row) -> tuple[str, int, str, int]:
    return row.kind, row.ranks, row.failure, row.culprit


def _measured(rows: Sequence[Row]) -> Iterator[Row]:
    """Run the cells of one kind and one number of ranks, and judge them."""
    left = list(rows)
    while left:
        with tempfile.TemporaryDirectory(prefix="many-") as scratch:
            folder = Path(scratch)
            problem = _group(folder, left[0].ranks, "cells", left[0].kind, *(row.cell for row in left))
            done = [row for row in left if len(list(folder.glob(f"{row.cell}.*.done"))) == row.ranks]
            for row in done:
                _judge(row, folder)
                yield row
        left = [row for row in left if row not in done]
        if left:
            row = left.pop(0)
            row.hangs, row.problem = problem == "hangs", problem
            yield row


def _group(folder: Path, ranks: int, *words: str) -> str:
    """Run the trainings in a group of processes; its problem, if it had one."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, str(FOLDER / "many_trainings.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    seconds = SECONDS[0] + SECONDS[1] * len(words)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, text=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, which are no children of this process
            process.wait()
            return "hangs"
        log.seek(0)
        errors = [line.strip() for line in log if "Error" in line]
    return "" if process.returncode == 0 else (errors or [f"exit code {process.returncode}"])[0]


def _judge(row: Row, folder: Path) -> None:
    """Compares the saved snapshots with what was planted."""
    paths = sorted(folder.glob(f"{row.cell}.*pt"))
    if row.failure == "healthy":
        answers = {file.read_text() for file in folder.glob(f"{row.cell}.*.done")}
        row.rank_ok = row.step_ok = row.origin_ok = row.verified = answers == {"same"} and not paths
        row.problem = "" if row.verified else f"not the same as a bare run, {len(paths)} snapshots"
        return
    if len(paths) != 1:
        row.problem = f"{len(paths)} snapshots"
        return
    snapshot = load(paths[0])
    failure = snapshot.failure
    rank = snapshot.settings.rank
    row.found = f"rank {rank} step {snapshot.step} {failure.phase} {failure.call} {snapshot.fidelity}"
    row.rank_ok = rank == row.culprit
    row.step_ok = snapshot.step == STEP
    row.origin_ok = (failure.phase, failure.call) == FAILURES[row.failure]
    if not row.origin_ok:
        row.problem = str(snapshot.fidelity_note or "")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        options = ["--json", "-q", "--no-whatif", "--max-time", "60", "-o", str(folder / row.cell)]
        code = reprokit(["shrink", str(paths[0]), *options])
    verified = json.loads(out.getvalue())["repro"]["verified"] if code == 0 else None
    row.verified = verified is not None and len(set(verified.split("/"))) == 1


def _line(row: Row) -> str:
    marks = "".join("." if ok else "x" for ok in (row.rank_ok, row.step_ok, row.origin_ok, row.verified))
    return f"{row.kind:13} {row.ranks} {row.failure:10} {row.culprit}  {marks}  {row.found} {row.problem}".rstrip()


def _summary(rows: Sequence[Row]) -> JSON:
    """The shares of the cells that failed on purpose, each with its aim, and the aims that were missed."""
    failed = [row for row in rows if row.failure != "healthy"]
    healthy = [row for row in rows if row.failure == "healthy"]
    aims = {
        "right rank": (_share(row.rank_ok for row in failed), 1.0),
        "right step": (_share(row.step_ok for row in failed), 0.9),
        "right origin": (_share(row.origin_ok for row in failed), 0.9),
        "verified in one process": (_share(row.verified for row in failed), 0.9),
        "healthy runs with the same bits": (_share(row.verified for row in healthy), 1.0),
        "without a hang": (_share(not row.hangs for row in rows), 1.0),
    }
    missed = [name for name, (share, aim) in aims.items() if share is not None and share < aim]
    shares = {name: {"share": share, "aim": aim} for name, (share, aim) in aims.items()}
    hangs = sum(row.hangs for row in rows)
    return {
        "cells": len(rows),
        "hangs": hangs,
        "shares": shares,
        "missed": missed,
        "rows": [asdict(row) for row in rows],
    }


def _share(answers: Iterator[bool]) -> float | None:
    all_answers = list(answers)
    return sum(all_answers) / len(all_answers) if all_answers else None


def _table(summary: JSON) -> str:
    """The shares beside their aims, then a line for each kind: cells with everything right, of all."""
    lines = [f"{summary['cells']} cells, {summary['hangs']} hangs"]
    for name, found in summary["shares"].items():
        share = "-" if found["share"] is None else f"{found['share']:.0%}"
        lines.append(f"{name:38} {share:>5}   aim {found['aim']:.0%}")
    for kind in KINDS:
        rows = [Row(**row) for row in summary["rows"] if row["kind"] == kind]
        right = sum(row.rank_ok and row.step_ok and row.origin_ok and row.verified for row in rows)
        lines += [f"{kind:13} {right} of {len(rows)}"] if rows else []
    return "\n".join(lines)


# -- overhead ---------------------------------------------------------------------------------------------------------


def _overhead(options: argparse.Namespace) -> JSON:
    """Ratios of step times with and without capture on each of two ranks, in quadruples of steps of one process."""
    kinds = [kind for kind in options.kinds if kind in ("ddp", "fsdp")]
    result: JSON = {"kinds": {}, "missed": []}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="many-") as scratch:
            problem = _group(Path(scratch), 2, "overhead", kind, str(options.rounds))
            ranks = [json.loads(file.read_text()) for file in sorted(Path(scratch).glob("overhead.*.json"))]
        result["kinds"][kind] = {"problem": problem, "ranks": ranks}
        medians = [rank["variants"]["reprokit"]["wall"]["median"] for rank in ranks]
        if len(medians) < 2 or max(medians) > LIMIT:
            result["missed"].append(kind)
        print(_overhead_lines(kind, ranks) or f"{kind}: {problem}", file=sys.stderr, flush=True)
    return result


def _overhead_lines(kind: str, ranks: Sequence[JSON]) -> str:
    lines = []
    for rank in ranks:
        for name, race in rank["variants"].items():
            texts = [f"{kind:5} rank {rank['rank']} {name:9}"]
            for clock in ("wall", "cpu"):
                found = race[clock]
                texts.append(f"{clock} {found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})")
            texts.append(f"mean {race['wall']['mean']:.3f}, step {race['wall']['plain_ms']:.1f} ms")
            lines.append("  ".join(texts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
