"""Regenerates the results in this folder with the public commands: one failure per phase.

python examples/gallery/make.py [--into DIR] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = {"forward": "masked_attention.py", "backward": "where_gradient.py", "optimizer": "adam_eps.py"}
FILES = ("repro.py", "repro_module.py", "summary.md", "issue.md", "report.html", "test_repro.py")
CAPTURED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the results that are named, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--into", type=Path, default=HERE, help="the folder for the results")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SCRIPTS]
    if unknown:
        parser.error(f"unknown: {unknown[0]}")
    for name in options.names or SCRIPTS:
        make(name, options.into.resolve() / name)
    return 0


def make(name: str, folder: Path) -> None:
    """Capture and shrink one example, and keep what people read."""
    script = SCRIPTS[name]
    snapshot = f"{Path(script).stem}.repro.pt"
    with tempfile.TemporaryDirectory(prefix="gallery-") as scratch:
        work = Path(scratch)
        shutil.copy(HERE.parent / script, work)
        reprokit(work, "capture", "-q", "-o", snapshot, script, expected=CAPTURED)
        results = work / Path(script).stem
        reprokit(work, "shrink", "-q", "--no-whatif", "-o", results.name, snapshot, expected=0)
        reprokit(work, "whatif", "-q", "--keep", "--max-time", "300", results.name, expected=0)  # time for every row
        for text, file in (("issue", "issue.md"), ("report", "report.html")):
            output = f"{results.name}/{file}"
            reprokit(work, "render", "-q", "--as", text, "-f", "-o", output, results.name, expected=0)
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            (folder / file).unlink(missing_ok=True)
            if (results / file).is_file():
                shutil.copy(results / file, folder)
    print(f"{name}: {script} -> {folder}")


def reprokit(folder: Path, *arguments: str, expected: int) -> None:
    """Run one command; `SystemExit` with what it said if it ends in another way than expected."""
    root = HERE.parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "reprokit", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != expected:
        raise SystemExit(f"`{' '.join(command[1:])}` ended with {done.returncode}: {done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
