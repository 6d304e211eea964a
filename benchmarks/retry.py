"""`reprokit retry` on programs with a known cause, as they are and with that cause mended by hand.

    python benchmarks/retry.py FOLDER [--only NAME[,NAME]] [--json FILE]

FOLDER is that of `mended.py`, which has the edits. Each program is captured, and retried as it is (exit code 1 is
right) and mended (0). Where the bad value is in the captured state or batch, 1 is right for the mended one too.
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


def reprokit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder of a program."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reprokit", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def row_of(program: Path, scratch: Path) -> JSON:
    """The two exit codes for a program, and the last line that was printed each time."""
    case, plain, mended = case_of(program), scratch / "plain", scratch / "mended"
    shutil.copytree(program, plain)
    write(program, mended)
    file = scratch / "step.pt"
    captured = reprokit(plain, "capture", *case["options"], "--no-cause", "-o", str(file), *case["run"])
    row: JSON = {"name": program.name, "captured": captured.returncode == 3}
    for name, folder in (("plain", plain), ("mended", mended)):
        done = reprokit(folder, "retry", str(file), *case["run"])
        row[name], row[f"{name}_said"] = done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
    row["right"] = row["plain"] == 1 and row["mended"] == int(program.name in ELSEWHERE)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture and retry the programs of a folder."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", help="names, separated by commas")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.only.split(",") if options.only else sorted(MENDED):
        with tempfile.TemporaryDirectory() as scratch:
            row = row_of(options.folder.resolve() / name, Path(scratch))
        rows.append(row)
        mark = "" if row["right"] else f"  <- {row['plain_said']:.90} / {row['mended_said']:.90}"
        print(f"{name:32} as it is {row['plain']}  mended {row['mended']}{mark}", file=sys.stderr, flush=True)
    num_fails, num_mended = sum(row["plain"] == 1 for row in rows), sum(row["mended"] == 0 for row in rows)
    num_right = sum(row["right"] for row in rows)
    print(
        f"{num_fails} fail as they are, {num_mended} are finite mended, {num_right} of {len(rows)} as they should be",
        file=sys.stderr,
    )
    print_json({"programs": rows}, options.json)
    return num_right < len(rows)


if __name__ == "__main__":
    sys.exit(main())
