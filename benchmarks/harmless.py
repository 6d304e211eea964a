"""Is a script the same when it is watched? Bit for bit, over folders of scripts.

    OMP_NUM_THREADS=1 python benchmarks/harmless.py FOLDER... [--only NAME ...] [--jobs N] [--timeout S] [--json FILE]

A script is ``train.py`` in a folder of its own, or any other file with ``import torch`` in one of the folders; tests
and modules of a package are none. Each runs three times, in clean processes and in the same place: ``python X``,
``reprokit capture X`` and ``reprokit capture --on early X``, these two with ``--after-capture continue``, so that the
comparison covers a failure and all that comes after it. Compared are stdout, stderr without the lines that begin
``reprokit:``, the warnings (category, message, file, line and count), the exit code, the files that are written, and
the bits of what is left at the very end of the process: parameters, buffers, gradients, optimizers, grad scalers, the
variables of the script, version counters of tensors, generators of torch, NumPy and Python.

Where something differs the script runs without reprokit once more. What differs then too, such as a line with the
seconds that it took, is not compared, and printed. The exit code is 1 if anything else differs.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from command import JSON, new_parser, print_json

ROOT = Path(__file__).resolve().parent.parent
HOOK = Path(__file__).with_name("harmless_hook.py")  # it is `sitecustomize` of every process
CAPTURE = ("-m", "reprokit", "capture", "--after-capture", "continue")
WAYS: dict[str, tuple[str, ...]] = {"capture": CAPTURE, "early": (*CAPTURE, "--on", "early")}
UNWATCHED = "it goes on unwatched"  # what capture prints when it could not begin: then nothing would be compared
OWN_ERROR = "an error of its own"
MOST_SHOWN = 4  # differences of a script that are printed, each on a line
_IMPORTS = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, which no run has again
_NO_SCRIPT = re.compile(r"^(test_.*|conftest|__init__|__main__)$")


@dataclass(frozen=True)
class Run:
    """What one run did. Fields are compared by their names."""

    stdout: list[str]
    stderr: list[str]
    exit_code: int
    warnings: Counter[str]
    files: list[str]
    left: Counter[str]  # what is alive at the end: one text for each thing, with a digest of its bits
    died: Counter[str]  # what things that died before left
    said: list[str] = field(default_factory=list)  # lines of reprokit
    captured: int = 0

    @property
    def num_tensors(self) -> int:
        """The tensors of all things together."""
        return sum(json.loads(entry)["tensors"] for entry in (self.left + self.died).elements())


COMPARED = [item.name for item in fields(Run) if item.name not in ("said", "captured")]


@dataclass
class Row:
    """The comparison of a script: what differs in each way of watching, and what is not compared."""

    script: str
    different: dict[str, list[str]] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    num_tensors: int = 0
    exit_code: int | None = None
    captured: int = 0
    reason: str = ""  # why it did not run

    @property
    def is_same(self) -> bool:
        """True if every run was like the bare one."""
        return not self.different


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 when nothing differs."""
    parser = new_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of scripts, or scripts")
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="scripts with this in their path")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at once (default 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each process (default 300)")
    options = parser.parse_args(argv)
    scripts = [script for folder in options.folders for script in find_scripts(folder)]
    scripts = [script for script in scripts if not options.only or any(name in str(script) for name in options.only)]
    if not scripts:
        print("no scripts in these folders", file=sys.stderr)
        return 2
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="harmless-") as scratch,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        places = [Path(scratch) / str(number) for number in range(len(scripts))]
        for row in pool.map(compare_script, scripts, places, [options.timeout] * len(scripts)):
            rows.append(row)
            print("\n".join(lines_of(row)), file=sys.stderr, flush=True)
    summary = summarise(rows)
    print(f"{summary['same']} of {summary['scripts']} scripts are the same, {summary['captured']} captured,"
          f" {len(summary['not_run'])} did not run", file=sys.stderr)  # fmt: skip
    print_json(summary, options.json)
    return 0 if all(row.is_same for row in rows) else 1


def find_scripts(folder: Path) -> Iterator[Path]:
    """The scripts of a folder, in a fixed order."""
    if folder.is_file():
        yield folder.resolve()
        return
    for file in sorted(folder.resolve().rglob("*.py")):
        is_train = (file.parent / "train.py").exists()  # then the other files beside it are its modules
        if (is_train and file.name != "train.py") or _NO_SCRIPT.match(file.stem):
            continue
        if is_train or _IMPORTS.search(file.read_text(encoding="utf-8", errors="replace")):
            yield file


def compare_script(script: Path, place: Path, timeout: float) -> Row:
    """Run a script in every way and compare."""
    row = Row(f"{script.parent.name}/{script.name}")
    try:
        bare = run(script, place, (), timeout)
        row.exit_code, row.num_tensors = bare.exit_code, bare.num_tensors
        watched = {way: run(script, place, words, timeout) for way, words in WAYS.items()}
        if any(differences(bare, one) for one in watched.values()):
            bare, row.not_compared = settled(bare, run(script, place, (), timeout))
        for way, one in watched.items():
            found = [f"{name}: {text}" for name, text in differences(bare, one, row.not_compared)]
            found += [line for line in one.said if UNWATCHED in line or OWN_ERROR in line]
            if found:
                row.different[way] = found
        row.captured = sum(one.captured for one in watched.values())
    except subprocess.TimeoutExpired:
        row.reason = f"no end within {timeout:.0f} s"
    return row


def settled(first: Run, second: Run) -> tuple[Run, list[str]]:
    """The first run, and what of it is not the same in a second one without reprokit."""
    unsettled = []
    for name, _ in differences(first, second):
        one, other = getattr(first, name), getattr(second, name)
        if name in ("stdout", "stderr") and len(one) == len(other):
            unsettled += [
                f"{name} {number}" for number, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
            ]
        else:
            unsettled.append(name)
    return first, unsettled


def differences(bare: Run, watched: Run, without: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """The names of what differs, each with the first difference in words."""
    for name in COMPARED:
        one, other = getattr(bare, name), getattr(watched, name)
        if name in without:
            continue
        if name in ("stdout", "stderr"):
            masked = {int(item.split()[1]) for item in without if item.startswith(f"{name} ")}
            one = [line for number, line in enumerate(one) if number not in masked]
            other = [line for number, line in enumerate(other) if number not in masked]
        if name == "died":  # copies that a capture has made and let go of are its own business
            other = other & one
        if one != other:
            yield name, _words(one, other)


def _words(one: Any, other: Any) -> str:
    if isinstance(one, Counter):
        missing, added = one - other, other - one
        left, right = _shown(map(_short, missing.elements())), _shown(map(_short, added.elements()))
        return f"only bare: {left}; only watched: {right}"
    if isinstance(one, list):
        for number, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                return f"{number + 1}: `{left[:100]}` bare, `{right[:100]}` watched"
        return f"{len(one)} bare, {len(other)} watched: {_shown(one[len(other) :] or other[len(one) :])}"
    return f"{one} bare, {other} watched"


def _shown(texts: Any) -> str:
    counts = Counter(str(text)[:200] for text in texts)
    found = [f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()]
    return " | ".join(found[:MOST_SHOWN]) + f" and {len(found) - MOST_SHOWN} more" * (len(found) > MOST_SHOWN) or "-"


def _short(text: str) -> str:
    """A warning by its place, a thing that was left by its name."""
    entry = json.loads(text)
    if isinstance(entry, dict):
        return f"{entry['kind']} {entry['name']}"
    category, message, file, line = entry
    return f"{category} {Path(file).name}:{line} {message:.60}"


def run(script: Path, place: Path, words: Sequence[str], timeout: float) -> Run:
    """Run a script once; ``words`` are those between the interpreter and the script."""
    shutil.rmtree(place, ignore_errors=True)  # every run has the same path, as tracebacks have it
    hooks, work = place / "hooks", place / "work"
    shutil.copytree(script.parent, work, ignore=shutil.ignore_patterns("__pycache__", "*.pt"))
    hooks.mkdir()
    shutil.copy(HOOK, hooks / "sitecustomize.py")
    before = {path.relative_to(work) for path in work.rglob("*")}
    report = place / "report.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(hooks), str(ROOT)]),
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "always",  # each time, so that their number is compared
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HARMLESS_REPORT": str(report),
    }
    done = subprocess.run(
        [sys.executable, *words, script.name],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
    )
    found = json.loads(report.read_text()) if report.exists() else {"alive": [], "died": [], "warnings": []}
    stderr = _ADDRESS.sub("0x", done.stderr.decode(errors="replace")).splitlines()
    new = [path for path in work.rglob("*") if path.relative_to(work) not in before]
    texts: Callable[[str], Counter[str]] = lambda name: Counter(json.dumps(one, sort_keys=True) for one in found[name])  # noqa: E731
    return Run(
        stdout=done.stdout.decode(errors="replace").splitlines(),
        stderr=[line for line in stderr if not line.startswith("reprokit:")],
        exit_code=done.returncode,
        warnings=texts("warnings"),
        files=sorted(str(path.relative_to(work)) for path in new if not _is_ours(path)),
        left=texts("alive"),
        died=texts("died"),
        said=[line for line in stderr if line.startswith("reprokit:")],
        captured=sum(path.name.endswith(".repro.pt") for path in new),
    )


def _is_ours(path: Path) -> bool:
    """True for a snapshot, and the log that `--on early` writes beside one."""
    return ".repro.pt" in path.name or path.name.endswith(".events.jsonl")


def lines_of(row: Row) -> list[str]:
    """A row in words; one line if nothing differs."""
    state = "same" if row.is_same else "DIFFERS"
    if row.reason:
        state = "NOT RUN"
    lines = [f"{state:8} {row.script}  exit {row.exit_code}, {row.num_tensors} tensors, {row.captured} captured"]
    lines += [f"    {row.reason}"] * bool(row.reason)
    for way, found in row.different.items():
        lines += [f"    {way}: {text}" for text in found[:MOST_SHOWN]]
    if row.not_compared:
        lines.append(f"    not compared, since it differs without reprokit: {', '.join(row.not_compared[:8])}")
    return lines


def summarise(rows: Sequence[Row]) -> JSON:
    """Counts and all rows."""
    return {
        "scripts": len(rows),
        "same": sum(row.is_same and not row.reason for row in rows),
        "different": [row.script for row in rows if not row.is_same],
        "not_run": [row.script for row in rows if row.reason],
        "captured": sum(row.captured > 0 for row in rows),
        "tensors": sum(row.num_tensors for row in rows),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
