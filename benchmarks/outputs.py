"""Do two versions of reprokit write the same files and screens, but for times?

    python benchmarks/outputs.py record DIR SCRIPTS [...] [--project CHECKOUT] [--only NAME ...] [--jobs N]
    python benchmarks/outputs.py compare DIR DIR

``record`` runs every script with the reprokit of a checkout: capture, ``show``, ``show --json``, shrink. DIR gets a
folder for each script with the screens and every text that was written. SCRIPTS are files, or folders that are searched
for scripts (of cases in folders of their own ``train.py``). ``compare`` prints the first line that differs in each file
and ends with exit code 1 if there is one. Seconds, dates, memory sizes, folders and commits are replaced by words.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (".py", ".md", ".html", ".json", ".jsonl")
VOLATILE = (
    (re.compile(r"\b\d+(\.\d+)?(e-?\d+)?\s?(s|ms|µs|ns|seconds?|minutes?|min)\b"), "TIME"),
    (re.compile(r'("\w*(seconds|time|took)\w*": )[\d.e+-]+'), r"\1TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?)?"), "DATE"),
    (re.compile(r"\b\d+(\.\d+)? (KiB|MiB|GiB|kB|MB|GB)\b"), "SIZE"),
    (re.compile(r"\b[0-9a-f]{40}\b"), "COMMIT"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("scripts", type=Path, nargs="+")
    recording.add_argument("--project", type=Path, default=ROOT, help="the checkout whose reprokit runs")
    recording.add_argument("--only", nargs="+", metavar="NAME", help="scripts with one of these names or folders")
    recording.add_argument("--jobs", type=int, default=2)
    recording.add_argument("--timeout", type=float, default=600.0, help="seconds for each command")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    return compare(given.before, given.after) if given.command == "compare" else record(given)


def record(given: argparse.Namespace) -> int:
    """Run the scripts and write what came out."""
    scripts = [script for place in given.scripts for script in find_scripts(place)]
    if given.only:
        scripts = [script for script in scripts if {script.stem, script.parent.name} & set(given.only)]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        jobs = {pool.submit(record_one, script, given): script for script in scripts}
        for done in concurrent.futures.as_completed(jobs):
            print(f"{name_of(jobs[done])}: {done.result()} files", file=sys.stderr)
    return 0


def find_scripts(place: Path) -> Iterator[Path]:
    """The script itself, or those of a folder: `train.py` of each case, else every script in it."""
    if place.is_file():
        yield place.resolve()
        return
    cases = sorted(place.glob("*/train.py"))
    yield from (path.resolve() for path in cases or sorted(place.glob("*.py")))


def name_of(script: Path) -> str:
    """A folder's name for a script."""
    return script.parent.name if script.name == "train.py" else script.stem


def record_one(script: Path, given: argparse.Namespace) -> int:
    """Run the commands on one script; returns the number of files that were kept."""
    folder = given.out / name_of(script)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        screens = {"capture": run(given, work, "capture", "-o", "s.pt", str(script))}
        if (work / "s.pt").exists():
            screens["show"] = run(given, work, "show", "s.pt")
            screens["show-json"] = run(given, work, "show", "s.pt", "--json")
            screens["shrink"] = run(given, work, "shrink", "s.pt", "-o", "reduction")
        written = [path for path in work.rglob("*") if path.suffix in TEXTS]
        texts = {str(path.relative_to(work)).replace(os.sep, "."): path.read_text("utf-8") for path in written}
        for name, text in {**texts, **{f"screen.{name}.txt": text for name, text in screens.items()}}.items():
            (folder / name).write_text(without_volatile(text, {work: "WORK", script.parent: "SCRIPTS"}), "utf-8")
    return len(texts) + len(screens)


def run(given: argparse.Namespace, folder: Path, *words: str) -> str:
    """A command's exit code, stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(given.project.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reprokit", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=given.timeout
        )
    except subprocess.TimeoutExpired:
        return f"exit code: none after {given.timeout:g} seconds\n"
    return f"exit code: {done.returncode}\n{done.stdout}\n-- stderr --\n{done.stderr}"


def without_volatile(text: str, folders: dict[Path, str]) -> str:
    """The text with words in the place of what differs from run to run."""
    for folder, word in folders.items():
        text = text.replace(str(folder), word)
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    return text


def compare(before: Path, after: Path) -> int:
    """Print the files that differ, each with its first line that does."""
    names = sorted({str(p.relative_to(d)) for d in (before, after) for p in d.rglob("*") if p.is_file()})
    num_other = 0
    for name in names:
        paths = (before / name, after / name)
        lines = [path.read_text("utf-8").splitlines() if path.exists() else None for path in paths]
        if lines[0] == lines[1]:
            continue
        num_other += 1
        if None in lines:
            print(f"{name}: only {'after' if lines[0] is None else 'before'}")
            continue
        number, pair = next(item for item in enumerate(zip_longest(*lines), 1) if item[1][0] != item[1][1])
        print(f"{name}:{number}", f"    - {pair[0]}", f"    + {pair[1]}", sep="\n")
    print(f"{num_other} of {len(names)} files differ")
    return int(num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
