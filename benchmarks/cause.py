"""The cause of a failure: is its class right, what does it say, and what does finding it cost?

    python benchmarks/cause.py [--programs FOLDER] [--only NAME[,NAME]] [--shrink] [--time] [--texts] [--json FILE]

Captures the programs of `causes/`, pairs that fail in the same call for different reasons, and with --programs those of
a folder that has one in each of its folders. The truth is the first line of a program, or its `case.json`: the classes
that are right, what the output should say, and what would be untrue. Exit code 1 if a class is wrong, or a program was
not captured as it should be. The table goes to stderr, JSON to stdout.

columns   class    claimed; allowed: those that are right; right, wrong, unknown (not decided), none (no cause)
          control  yes if the unchanged play failed as training did, no if it did not, - if there was none
          says     facts found in `show` (with --shrink: and in the summary), of those asked for
          untrue   sentences that should not be there
          seconds  from the first line about the failure to that with the file, and the peak memory; with --no-cause
                   behind both (--time: the median of 3, in turns)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from command import JSON, new_parser, print_json

HERE = Path(__file__).resolve().parent
_ROUNDS = 3
_BEGINS = re.compile(r"reprokit: .*; (replaying the step|going back)")
_ENDS = re.compile(r"reprokit: (captured|saved) .* -> ")
# Captures, and notes how the unchanged play ended; a name of another version leaves it out.
_CHILD = """
import json, os, sys
from reprokit.capture import experiments

runner = getattr(experiments, "Experiments", None)
play = getattr(runner, "_play", None)
def noted(self, plan, *rest):
    played = play(self, plan, *rest)
    if plan is None:
        with open(os.environ["CONTROL"], "w") as file:
            json.dump(played is not None and played.is_alike and played.is_bad, file)
    return played
if play is not None:
    runner._play = noted
from reprokit.cli import main
sys.exit(main())
"""


class Program(NamedTuple):
    """A program and the truth about it."""

    name: str
    folder: Path | None  # a copy of it is where the program runs
    run: list[str]
    truth: JSON


class Captured(NamedTuple):
    """One run of a program: its exit code, the seconds from the failure to the file, the peak memory in MB."""

    code: int
    seconds: float | None
    memory: float


def find_programs(folder: Path | None, only: Sequence[str]) -> Iterator[Program]:
    """Those of `causes/`, and those of a folder."""
    for path in sorted((HERE / "causes").glob("*.py")):
        truth = json.loads(path.read_text().partition("\n")[0].removeprefix("#"))
        yield Program(path.stem, None, [str(path)], truth)
    for path in sorted(folder.glob("*/case.json")) if folder is not None else ():
        truth = json.loads(path.read_text())
        yield Program(path.parent.name, path.parent, truth["run"], truth)


def capture(program: Program, scratch: Path, *options: str, command: Sequence[str] = ("-m", "reprokit")) -> Captured:
    """Run a program in a fresh copy of its folder, with the file at `scratch/snapshot.pt`."""
    place = scratch / "run"
    shutil.rmtree(place, ignore_errors=True)
    if program.folder is None:
        place.mkdir()
    else:
        shutil.copytree(program.folder, place, ignore=shutil.ignore_patterns("__pycache__"))
    snapshot = scratch / "snapshot.pt"
    snapshot.unlink(missing_ok=True)
    line = [sys.executable, *command, "capture", *program.truth.get("options", ()), *options, "-o", str(snapshot)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CONTROL": str(scratch / "control.json"), "COLUMNS": "200"}
    child = subprocess.Popen(
        [*line, *program.run], cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    began = ended = None
    for text in child.stderr:
        if began is None and _BEGINS.match(text):
            began = time.monotonic()
        elif ended is None and _ENDS.match(text):
            ended = time.monotonic()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = ended - began if began is not None and ended is not None else None
    return Captured(child.returncode, seconds, used.ru_maxrss / 1024)


def reprokit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of reprokit on wide lines."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "reprokit", *map(str, arguments)], env=environment, capture_output=True, text=True
    )


def judge(program: Program, scratch: Path, *, shrinks: bool) -> JSON:
    """Capture a program, and compare what is claimed with what is true."""
    truth, control = program.truth, scratch / "control.json"
    control.unlink(missing_ok=True)
    captured = capture(program, scratch, command=("-c", _CHILD))
    row: JSON = {
        "name": program.name,
        "allowed": truth["class"],
        "class": None,
        "verdict": "none",
        "is_captured": False,
    }
    row["control"] = {True: "yes", False: "no", None: "-"}[
        json.loads(control.read_text()) if control.exists() else None
    ]
    if captured.code != 3:
        return row | {"verdict": "-", "says": [], "missing": list(truth["says"]), "untrue": []}
    snapshot, text = scratch / "snapshot.pt", reprokit("show", scratch / "snapshot.pt").stderr
    if shrinks:
        shutil.rmtree(scratch / "smaller", ignore_errors=True)
        reprokit("shrink", snapshot, "-o", scratch / "smaller")
        summary = scratch / "smaller" / "summary.md"
        text += summary.read_text() if summary.exists() else ""
    data, text = json.loads(reprokit("show", "--json", snapshot).stdout), re.sub(r"\s+", " ", text)
    cause, failure = data.get("cause"), data["failure"]
    row["is_captured"] = _accepts(truth["step"], failure["step"]) and (
        not truth.get("call") or str(failure["call"]).rpartition(".")[2].strip("_") == truth["call"]
    )
    row |= {"step": failure["step"], "call": failure["call"], "cause": cause}
    if cause is not None:
        row["class"] = cause["class"]
        known = "right" if cause["class"] in truth["class"] else "wrong"
        row["verdict"] = "unknown" if cause["class"] == "unknown" else known
    row["says"] = [fact for fact in truth["says"] if re.search(fact, text, re.IGNORECASE)]
    row["missing"] = [fact for fact in truth["says"] if fact not in row["says"]]
    row["untrue"] = [line for line in truth["says_not"] if re.search(line, text, re.IGNORECASE)]
    return row


def _accepts(wanted: object, got: int) -> bool:
    """A step is one number, several, or a range."""
    if isinstance(wanted, dict):
        return wanted["from"] <= got <= wanted["to"]
    return got in wanted if isinstance(wanted, list) else got == wanted


def costs(program: Program, scratch: Path) -> JSON:
    """Seconds and memory with and without the cause, in turns."""
    with_cause, without = [], []
    for _ in range(_ROUNDS):
        with_cause.append(capture(program, scratch))
        without.append(capture(program, scratch, "--no-cause"))
    return {"seconds": _median(with_cause), "seconds_without": _median(without)} | {
        "memory": statistics.median(run.memory for run in with_cause),
        "memory_without": statistics.median(run.memory for run in without),
    }


def _median(runs: Sequence[Captured]) -> float | None:
    known = [run.seconds for run in runs if run.seconds is not None]
    return statistics.median(known) if known else None


def line_of(row: JSON) -> str:
    """A row of the table."""
    num_facts = len(row["says"]) + len(row["missing"])
    allowed = ",".join(row["allowed"])
    text = f"{row['name']:32} {row['class'] or '-':9} {allowed:24} {row['verdict']:8} {row['control']:7} "
    text += f"{len(row['says'])}/{num_facts}  {len(row['untrue']) or '-'}"
    if "memory" in row:
        seconds = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("seconds", "seconds_without")]
        text += f"      {seconds[0]:>6} {seconds[1]:>6}  {row['memory']:6.0f} {row['memory_without']:6.0f}"
    return text if row["is_captured"] else text + "   NOT CAPTURED AS IT SHOULD BE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="these as well")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--shrink", action="store_true", help="look for the facts in the summary as well")
    parser.add_argument("--time", action="store_true", help="measure seconds and memory, 6 runs more of each")
    parser.add_argument("--texts", action="store_true", help="print the sentence under each row")
    options = parser.parse_args(arguments)
    only = options.only.split(",") if options.only else []
    heading = f"{'program':32} {'class':9} {'allowed':24} {'':8} control says untrue"
    print(heading + ("  seconds  no cause     MB  no cause" if options.time else ""), file=sys.stderr)
    rows: list[JSON] = []
    with tempfile.TemporaryDirectory() as folder:
        for program in find_programs(options.programs, only):
            if only and program.name not in only:
                continue
            row = judge(program, Path(folder), shrinks=options.shrink)
            if options.time and row["is_captured"]:
                row |= costs(program, Path(folder))
            rows.append(row)
            print(line_of(row), file=sys.stderr, flush=True)
            if options.texts and row.get("cause"):
                print(f"    {row['cause']['text']}", file=sys.stderr, flush=True)
    verdicts = Counter(row["verdict"] for row in rows)
    num_says, num_missing = sum(len(row["says"]) for row in rows), sum(len(row["missing"]) for row in rows)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    total = f"{len(rows)} programs: {counts}; {num_says} of {num_says + num_missing} facts said, "
    print(total + f"{sum(len(row['untrue']) for row in rows)} untrue", file=sys.stderr)
    print_json({"programs": rows, "verdicts": verdicts}, options.json)
    return int(bool(verdicts["wrong"]) or not all(row["is_captured"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
