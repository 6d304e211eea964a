"""`reprokit diff` between versions of torch: a corpus of failing scripts and the gallery, run again in other Pythons.

    python benchmarks/environments.py CORPUS --python PATH [--python PATH] [--there] [--case NAME ...] [--out DIR]

Of every script the failing step and the healthy one before it are captured here, and each file is run with every
Python. With ``--there`` the healthy step is captured with each Python as well, and `diff` compares both files, and the
numbers of both runs. The Pythons need torch and what reprokit depends on, not reprokit. A line a file and Python goes
to stderr, JSON to stdout.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command import JSON, find_cases, new_corpus_parser, print_json

ROOT = Path(__file__).resolve().parents[1]
GALLERY = {"masked_attention": 1, "where_gradient": 1, "adam_eps": 1}  # scripts, each with a healthy step


def reprokit(python: str, folder: Path, timeout: float, *words: str) -> tuple[JSON, str, float]:
    """The JSON of a command, all that it says on stderr, and its seconds."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started = time.monotonic()
    done = subprocess.run(
        [python, "-m", "reprokit", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    found = json.loads(done.stdout[done.stdout.index("{") :]) if words[0] == "diff" and "{" in done.stdout else {}
    return found, done.stderr.strip(), time.monotonic() - started


def rows_of(name: str, script: Path, step: int, work: Path, options: Any) -> list[JSON]:
    """All comparisons of one script."""
    work.mkdir(parents=True, exist_ok=True)
    for file in script.parent.glob("*.py") if script.name == "train.py" else (script,):
        shutil.copy(file, work / ("train.py" if file == script else file.name))
    save, said = ("capture", "-q", "--no-cause", "--at-step", str(step), "-f", "-o"), ""
    if not (work / f"new-step{step}.pt").exists():
        _, said, _ = reprokit(sys.executable, work, options.timeout, *save, "new.pt", "train.py")
    rows = []
    for kind in options.kinds:
        file = "new.pt" if kind == "failing" else f"new-step{step}.pt"
        if not (work / file).exists():
            rows.append({"case": name, "kind": kind, "verdict": "not saved", "lines": [said], "with": "all"})
            continue
        ways = [word for python in options.python for word in ("--python", python)]
        found, text, seconds = reprokit(sys.executable, work, options.timeout, "diff", "--json", file, *ways)
        rows += [_row(name, kind, row, seconds / len(options.python)) for row in found.get("rows", ())]
        if not found:
            rows.append({"case": name, "kind": kind, "verdict": "no result", "lines": [text], "with": "all"})
    for number, python in enumerate(options.python if options.there else ()):
        there = f"there{number}"
        reprokit(python, work, options.timeout, *save, f"{there}.pt", "train.py")
        for which, interpreter in (("here.jsonl", sys.executable), (f"{there}.jsonl", python)):
            words = ("capture", "-q", "-f", "--numbers", which, "-o", "unused.pt", "train.py")
            reprokit(interpreter, work, options.timeout, *words)
        for kind, pair in (
            ("two files", (f"{there}-step{step}.pt", f"new-step{step}.pt")),
            ("numbers", (f"{there}.jsonl", "here.jsonl")),
        ):
            found, text, seconds = reprokit(sys.executable, work, options.timeout, "diff", "--json", *pair)
            both = found.get("rows") or [{"verdict": "no result", "lines": [text]}]
            rows += [_row(name, kind, {**row, "with": python}, seconds) for row in both]
    return rows


def _row(name: str, kind: str, row: JSON, seconds: float) -> JSON:
    return {"case": name, "kind": kind, **row, "seconds": round(seconds, 1)}


def line(row: JSON) -> str:
    """A row of the table."""
    gap = row.get("gap") or {}
    size = f"{gap['units']:,} units" if gap.get("units") is not None else gap.get("why", "")
    relative = f"{gap['relative']:.1g}" if gap.get("relative") is not None else ""
    place = (
        f"{row.get('call', '')} in {row.get('module')} {row.get('site')} {row.get('phase')}" if "call" in row else ""
    )
    cells = (row["case"], row["kind"], row["with"], row["verdict"], place, size, relative, str(row.get("seconds", "")))
    return " | ".join(cells)


def main() -> int:
    parser = new_corpus_parser(__doc__, jobs=1)
    parser.add_argument("--python", action="append", required=True, metavar="PATH", help="a Python with another torch")
    parser.add_argument("--there", action="store_true", help="capture with these Pythons too, and compare the files")
    parser.add_argument("--kinds", nargs="*", default=["healthy", "failing"], help="the steps to compare")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the files here")
    options = parser.parse_args()
    cases = {f.name: (f / "train.py", _healthy_step(f)) for f in find_cases(options, "case.json")}
    gallery = {name: (ROOT / "examples" / f"{name}.py", step) for name, step in GALLERY.items()}
    cases |= {name: case for name, case in gallery.items() if not options.case or name in options.case}
    rows = []
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        out = options.out or Path(scratch)
        jobs = [pool.submit(rows_of, name, *case, (out / name).resolve(), options) for name, case in cases.items()]
        for job in jobs:
            for row in job.result():
                rows.append(row)
                print(line(row), *(row["lines"] if row["verdict"] != "equal" else ()), sep="\n    ", file=sys.stderr)
                sys.stderr.flush()
    print_json({"rows": rows}, options.json)
    return int(any(row["verdict"] in ("no result", "cannot be run", "not saved") for row in rows))


def _healthy_step(case: Path) -> int:
    return max(0, int(json.loads((case / "case.json").read_text())["first_bad_step"]) - 1)


if __name__ == "__main__":
    sys.exit(main())
