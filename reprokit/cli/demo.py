"""``reprokit demo``: the public commands, one after the other, on a bundled training script that fails."""

from __future__ import annotations

import json as json_format
import os
import shutil
import subprocess
import sys
import time
from itertools import chain, count
from pathlib import Path
from typing import Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli.capture import EXIT_CAPTURED
from reprokit.cli.console import PATH, Verbosity, make_folder, planned, print_json, say, shown_command
from reprokit.errors import ReprokitError

EXAMPLE = "masked_attention.py"
SNAPSHOT = "snapshot.repro.pt"
RESULTS = "results"
_PACKAGE = Path(__file__).resolve().parent.parent


@click.command("demo", short_help="Capture, shrink and verify a bundled example.")
@click.option("--dir", "folder", type=PATH, metavar="DIR", help="A folder for the files.")
@planned
def command(folder: Path | None, json: bool, verbosity: Verbosity) -> int:
    """Capture, shrink, render and verify a bundled example, in under a minute."""
    started = time.perf_counter()
    names = (f"reprokit-demo{suffix}" for suffix in chain([""], (f"-{number}" for number in count(2))))
    folder = folder or next(free for name in names if not (free := Path(name)).exists())
    make_folder(folder, option="--dir", force="")
    shutil.copy(find_example(), folder / EXAMPLE)
    _run(folder, verbosity, EXIT_CAPTURED, "capture", "-o", SNAPSHOT, EXAMPLE)
    shrunk = _run(folder, verbosity, 0, "shrink", "-o", RESULTS, "--json", SNAPSHOT)
    verified = _run(folder, verbosity, 0, "verify", "--json", f"{RESULTS}/repro.py")
    seconds = time.perf_counter() - started

    results = {_short(path.name): path for path in sorted((folder / RESULTS).iterdir())}
    files = {"script": folder / EXAMPLE, "snapshot": folder / SNAPSHOT, **results}
    if json:
        paths = {name: str(path.absolute()) for name, path in files.items()}
        print_json({"schema": 1, **paths, "shrink": shrunk, "verify": verified, "seconds": round(seconds, 1)})
    if verbosity is not Verbosity.QUIET:
        click.echo("\n" + files["repro"].read_text(encoding="utf-8"), err=True)
    say(f"done in {seconds:.0f} s; the results:", verbosity)
    width = max(map(len, files))
    for name, path in files.items():
        say(f"  {name:<{width}} {shown_path(path)}", verbosity)
    return 0


def _run(folder: Path, verbosity: Verbosity, expected: int, *words: str) -> Any:
    """One command in a process of its own; its JSON if that was asked for."""
    say(f"$ {shown_command('reprokit', *(word for word in words if word != '--json'))}", verbosity)
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "reprokit", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if verbosity is Verbosity.QUIET else None,
        text=True,
    )
    if done.returncode != expected:
        raise ReprokitError(
            f"`reprokit {words[0]}` ended with exit code {done.returncode} instead of {expected}",
            hint=f"run it by hand in `{folder}`",
            note=done.stderr.strip() if done.stderr else None,
        )
    return json_format.loads(done.stdout.splitlines()[-1]) if "--json" in words else None


def _short(file: str) -> str:
    """A name for a file of results: ``repro`` for ``repro.py``, ``module`` for ``repro_module.py``."""
    return {"repro_inputs.pt": "tensors", "repro_module.py": "module", "test_repro.py": "test"}.get(
        file, file.partition(".")[0]
    )


def find_example() -> Path:
    """The bundled script: inside the installed package, or beside it in a checkout."""
    for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise ReprokitError(f"the example `{EXAMPLE}` is missing", hint="install torch-reprokit again")
