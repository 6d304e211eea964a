"""``reprokit demo``: the public commands, one after the other, on a bundled training script that fails."""

from __future__ import annotations

import json as json_format
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli.capture import EXIT_CAPTURED
from reprokit.cli.console import FilePath, Verbosity, common_options, make_folder, print_json, say, shown_command
from reprokit.errors import ReprokitError

EXAMPLE = "masked_attention.py"
SNAPSHOT = "snapshot.repro.pt"
RESULTS = "results"
NAMES = {
    "repro.py": "repro",
    "repro_inputs.pt": "tensors",
    "repro_module.py": "module",
    "issue.md": "issue",
    "report.html": "report",
    "test_repro.py": "test",
    "reduction.pt": "reduction",
}
_PACKAGE = Path(__file__).resolve().parent.parent
_START = "import sys; sys.path.append(sys.argv.pop(1)); from reprokit.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Demo:
    """Where the demonstration is to take place."""

    folder: Path | None
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Capture, shrink, render and verify; says every command and, in the end, every path."""
        started = time.perf_counter()
        names = (f"reprokit-demo{suffix}" for suffix in chain([""], (f"-{number}" for number in count(2))))
        folder = self.folder or next(free for name in names if not (free := Path(name)).exists())
        make_folder(folder, option="--dir", force="")
        shutil.copy(find_example(), folder / EXAMPLE)
        self._run(folder, EXIT_CAPTURED, "capture", "-o", SNAPSHOT, EXAMPLE)
        shrunk = self._run(folder, 0, "shrink", "-o", RESULTS, "--json", SNAPSHOT)
        verified = self._run(folder, 0, "verify", "--json", f"{RESULTS}/repro.py")
        self._tell(folder, shrunk, verified, time.perf_counter() - started)
        return 0

    def _run(self, folder: Path, expected: int, *words: str) -> dict[str, Any]:
        """One command in a process of its own; its JSON, empty when it was not asked for."""
        shown = [word for word in words if word != "--json"]
        say(f"$ {shown_command('reprokit', *shown)}", self.verbosity)
        done = subprocess.run(
            [sys.executable, "-c", _START, str(_PACKAGE.parent), *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self.verbosity is Verbosity.QUIET else None,
            text=True,
        )
        if done.returncode != expected:
            raise ReprokitError(
                f"`reprokit {words[0]}` ended with exit code {done.returncode} instead of {expected}",
                hint=f"run it by hand in `{folder}`",
                note=done.stderr.strip() if done.stderr else None,
            )
        if "--json" in words:
            result: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
            return result
        if done.stdout and self.verbosity is not Verbosity.QUIET:
            click.echo(done.stdout, err=True, nl=False)
        return {}

    def _tell(self, folder: Path, shrunk: dict[str, Any], verified: dict[str, Any], seconds: float) -> None:
        results = found_results(folder / RESULTS)
        files = {"script": folder / EXAMPLE, "snapshot": folder / SNAPSHOT, **results}
        if self.json:
            paths = {name: str(path.absolute()) for name, path in files.items()}
            print_json({"schema": 1, **paths, "shrink": shrunk, "verify": verified, "seconds": round(seconds, 1)})
        if self.verbosity is not Verbosity.QUIET:
            click.echo("\n" + files["repro"].read_text(encoding="utf-8"), err=True)
        say(f"done in {seconds:.0f} s; the results:", self.verbosity)
        width = max(map(len, files))
        for name, path in files.items():
            say(f"  {name:<{width}} {shown_path(path)}", self.verbosity)


@click.command("demo", short_help="Capture, shrink and verify a bundled example.")
@click.option("--dir", "folder", type=FilePath(), metavar="DIR", help="A folder for the files.")
@common_options
def command(**options: Any) -> Demo:
    """Capture, shrink, render and verify a bundled example, in under a minute."""
    return Demo(**options)


def find_example() -> Path:
    """The bundled script: inside the installed package, or beside it in a checkout."""
    for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise ReprokitError(f"the example `{EXAMPLE}` is missing", hint="install torch-reprokit again")


def found_results(folder: Path) -> dict[str, Path]:
    """Every file of a folder of results by a short name, the best known first."""
    files = sorted(folder.iterdir())
    known = {name: folder / file for file, name in NAMES.items() if folder / file in files}
    return {**known, **{path.name: path for path in files if path.name not in NAMES}}
