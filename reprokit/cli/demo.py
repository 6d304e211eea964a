"""``reprokit demo``: the public commands, one after the other, on a bundled training script that fails."""

from __future__ import annotations

import json as json_format
import os
import shlex
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli import console
from reprokit.cli.capture import EXIT_CAPTURED
from reprokit.errors import ReprokitError

EXAMPLE = "masked_attention.py"
_PACKAGE = Path(__file__).resolve().parent.parent
_NAMES = {
    **{EXAMPLE: "script", "snapshot.repro.pt": "snapshot", "reduction.pt": "reduction", "repro.py": "repro"},
    **{"repro_module.py": "module", "summary.md": "summary", "issue.md": "issue", "report.html": "report"},
    "test_repro.py": "test",
}


@click.command("demo", short_help="Capture, shrink and verify a bundled example.")
@click.option("--dir", "folder", type=console.PATH, metavar="DIR", help="A folder for the files.")
@console.planned
def command(folder: Path | None, json: bool, verbosity: console.Verbosity) -> int:
    """Capture, shrink, render and verify a bundled example, in under a minute."""
    started = time.perf_counter()
    names = (Path(f"reprokit-demo-{number}" if number > 1 else "reprokit-demo") for number in count(1))
    folder = folder or next(name for name in names if not name.exists())
    console.make_folder(folder, option="--dir", force="")
    shutil.copy(find_example(), folder / EXAMPLE)
    _run(folder, verbosity, EXIT_CAPTURED, "capture", "-o", "snapshot.repro.pt", EXAMPLE)
    shrunk = _run(folder, verbosity, 0, "shrink", "-o", "results", "--json", "snapshot.repro.pt")
    verified = _run(folder, verbosity, 0, "verify", "--json", "results/repro.py")
    seconds = time.perf_counter() - started

    written = {path.name: path for path in folder.rglob("*")}
    files = {name: written[file] for file, name in _NAMES.items() if file in written}
    if json:
        paths = {name: str(path.absolute()) for name, path in files.items()}
        console.print_json({"schema": 1, **paths, "shrink": shrunk, "verify": verified, "seconds": round(seconds, 1)})
    if verbosity is not console.Verbosity.QUIET:
        click.echo("\n" + files["repro"].read_text(encoding="utf-8"), err=True)
    console.say(f"done in {seconds:.0f} s; the results:", verbosity)
    for name, path in files.items():
        console.say(f"  {name:<9} {shown_path(path)}", verbosity)
    return 0


def _run(folder: Path, verbosity: console.Verbosity, expected: int, *words: str) -> Any:
    """One command in a process of its own; its JSON if that was asked for."""
    console.say(f"$ {shlex.join(['reprokit', *(word for word in words if word != '--json')])}", verbosity)
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "reprokit", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if verbosity is console.Verbosity.QUIET else None,
        text=True,
    )
    if done.returncode != expected:
        raise ReprokitError(
            f"`reprokit {words[0]}` ended with exit code {done.returncode} instead of {expected}",
            hint=f"run it by hand in `{folder}`",
            note=done.stderr.strip() if done.stderr else None,
        )
    return json_format.loads(done.stdout.splitlines()[-1]) if "--json" in words else None


def find_example() -> Path:
    """The bundled script: inside the installed package, or beside it in a checkout."""
    for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise ReprokitError(f"the example `{EXAMPLE}` is missing", hint="install torch-reprokit again")
