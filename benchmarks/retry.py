"""`reprokit retry` on programs with a known cause, as they are and with that cause mended by hand.

    python benchmarks/retry.py FOLDER [--fresh FOLDER] [--only NAME[,NAME]] [--json FILE]

FOLDER is that of `mended.py`, which has the edits; the programs of `--fresh` have theirs beside them, in
`train_fixed.py` or in the folder `fixed`. Each program is captured, and retried as it is (exit code 1 is right) and
mended: 0 is right where the cause is in the code of the step, 1 where it is in the state from before it, 2 where only
the data were mended. A *false 0* is one of a script that still fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command import JSON, new_parser, print_json
from mended import ELSEWHERE, MENDED, case_of, write

ROOT = Path(__file__).parent.parent

# The exit codes that are right for the mended programs.
FRESH = {
    "audio_masked_scatter_bf16": 0,
    "balanced_loss_empty_class": 0,
    "deepspeed_clip_inf": 0,
    "horizon_boundary_1e9": 2,
    "kikiri_squeeze_last_batch": 0,
    "kornia_singular_h": 0,
    "nerf": 0,
    "node": 0,
    "pgd": 0,
    "proteina_motif_units": 2,
    "rqvae_empty_cluster": 0,
    "svgp": 0,
}


def reprokit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder of a program."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reprokit", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def write_fixed(program: Path, target: Path) -> None:
    """Write the mended copy of a program that has its mended files beside it."""
    shutil.copytree(program, target)
    if (program / "train_fixed.py").exists():
        shutil.copyfile(program / "train_fixed.py", target / "train.py")
    else:
        shutil.copytree(program / "fixed", target, dirs_exist_ok=True)


def row_of(program: Path, scratch: Path, *, is_fresh: bool) -> JSON:
    """The two exit codes for a program, and the last line that was printed each time."""
    case, plain, mended = case_of(program), scratch / "plain", scratch / "mended"
    shutil.copytree(program, plain)
    (write_fixed if is_fresh else write)(program, mended)
    script = case.get("run", ["train.py"])
    options = case.get("options", ["--on", "early"] if case["kind"] == "spike" else [])
    file = scratch / "step.pt"
    captured = reprokit(plain, "capture", *options, "--no-cause", "-o", str(file), *script)
    row: JSON = {"name": program.name, "captured": captured.returncode == 3}
    for name, folder in (("plain", plain), ("mended", mended)):
        done = reprokit(folder, "retry", str(file), *script)
        row[name], row[f"{name}_said"] = done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
    row["wanted"] = FRESH[program.name] if is_fresh else wanted_of(program.name)
    row["right"] = row["captured"] and row["plain"] == 1 and row["mended"] == row["wanted"]
    row["false"] = (row["plain"] == 0) + (row["mended"] == 0 != row["wanted"])
    return row


def wanted_of(name: str) -> int:
    """The exit code that is right for a program that `mended.py` edits."""
    if name not in ELSEWHERE:
        return 0
    return 2 if ELSEWHERE[name].startswith("data") else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture and retry the programs of a folder."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--fresh", type=Path, metavar="FOLDER", help="programs with their mended files")
    parser.add_argument("--only", help="names, separated by commas")
    options = parser.parse_args(arguments)
    programs = [(options.folder / name, False) for name in sorted(MENDED)]
    programs += [(options.fresh / name, True) for name in FRESH] if options.fresh else []
    chosen = options.only.split(",") if options.only else [program.name for program, _ in programs]
    rows = []
    for program, is_fresh in programs:
        if program.name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            row = row_of(program.resolve(), Path(scratch), is_fresh=is_fresh)
        rows.append(row)
        said = f"{row['plain_said']:.150} / {row['mended_said']:.150}" if row["captured"] else "not captured"
        mark = "" if row["right"] else f"  <- {said}"
        print(f"{row['name']:32} as it is {row['plain']}  mended {row['mended']}{mark}", file=sys.stderr, flush=True)
    num_fails, num_mended = sum(row["plain"] == 1 for row in rows), sum(row["mended"] == 0 for row in rows)
    num_right, num_false = sum(row["right"] for row in rows), sum(row["false"] for row in rows)
    words = f"{num_fails} fail as they are, {num_mended} are finite mended, {num_false} false 0"
    print(f"{words}, {num_right} of {len(rows)} as they should be", file=sys.stderr)
    print_json({"programs": rows}, options.json)
    return num_right < len(rows)


if __name__ == "__main__":
    sys.exit(main())
