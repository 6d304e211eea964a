"""Test versions of torch: the demo, a corpus and the tests of capture, each in an environment made for it alone.

    python benchmarks/versions.py --torch 2.6.0 2.15.0 [--python PYTHON] [--corpus DIR] [--tests PATH ...]

Every environment is made in a temporary folder and removed afterwards: wheels with CUDA take about 5 GB. Packages other
than torch and what it pins itself have the versions of ``constraints.txt``. A table in Markdown goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED_BY_TORCH = ("torch==", "sympy==", "setuptools==")  # other versions of torch need other ones of these
CORPUS_COLUMNS = ("captured", "step", "phase", "blame", "exact", "repro")
HEAD = ("torch", "Python", "demo", "capture tests", "corpus")


def main() -> int:
    """Test all versions; 0 if everything passed everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION")
    parser.add_argument("--python", default=sys.executable, help="the Python to test with (default: this one)")
    parser.add_argument("--corpus", type=Path, help="a folder of failing scripts (default: no corpus)")
    parser.add_argument("--tests", nargs="*", default=["tests/capture"], help="the tests to run")
    plan = parser.parse_args()
    print(row(HEAD), row(["---"] * len(HEAD)), sep="\n", flush=True)
    all_passed = True
    for version in plan.torch:
        with tempfile.TemporaryDirectory() as folder:
            cells = list(test(version, plan, Path(folder)))
        print(row([version, *cells]), flush=True)
        all_passed &= not any("failed" in cell for cell in cells)
    return 0 if all_passed else 1


def test(version: str, plan: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The cells of a row behind the version."""
    python = make_environment(version, plan.python, folder)
    if python is None:
        yield "install failed"
        return
    yield output([python, "-c", "import platform; print(platform.python_version())"]).strip()
    started = time.monotonic()
    code = run([python, "-m", "reprokit", "demo", "--dir", str(folder / "demo")])
    yield f"{round(time.monotonic() - started)} s" if code == 0 else f"failed (exit code {code})"
    summary = output([python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *plan.tests])
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", summary.splitlines()[-1] if summary else "")
    yield ", ".join(f"{number} {word}" for number, word in found) or "failed to start"
    if plan.corpus is not None:
        yield of_corpus(python, plan.corpus, folder / "corpus.json")


def make_environment(version: str, python: str, folder: Path) -> str | None:
    """A Python that has this torch and reprokit with its development tools; ``None`` if they cannot be installed."""
    constraints = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith(PINNED_BY_TORCH)))
    own = str(folder / "venv" / "bin" / "python")
    if run([python, "-m", "venv", str(folder / "venv")]) != 0:
        return None
    install = [own, "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    return own if run([*install, f"torch=={version}", "-e", f"{ROOT}[dev]"]) == 0 else None


def of_corpus(python: str, corpus: Path, file: Path) -> str:
    """The columns of the corpus benchmark that show whether capture works."""
    output([python, str(ROOT / "benchmarks" / "corpus.py"), str(corpus), "--json", str(file)])
    if not file.exists():
        return "failed"
    counts = json.loads(file.read_text())["counts"]
    return ", ".join(f"{column} {counts[column]}" for column in CORPUS_COLUMNS)


def row(cells: Sequence[str]) -> str:
    """A line of the table."""
    return f"| {' | '.join(cells)} |"


def run(command: Sequence[str]) -> int:
    """Run a command whose output goes to stderr."""
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=environment()).returncode


def output(command: Sequence[str]) -> str:
    """What a command prints."""
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())
    return found.stdout


def environment() -> dict[str, str]:
    """The variables of this process with one thread for every process."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
