"""``reprokit diff`` of one step beside itself: in another format, on another device, compiled, by another Python.

`in_way` makes the row of ``--dtype bfloat16`` and the like.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import reprokit
from reprokit.cli.diff_rows import DIFFERENT, IMPOSSIBLE, ROUNDING, DiffRow, call_words, described, place_of
from reprokit.compare.compiled import Compiled
from reprokit.compare.difference import first_difference
from reprokit.compare.imprints import Imprint, Run, Version
from reprokit.compare.runs import Comparison
from reprokit.errors import ReprokitError, UsageError
from reprokit.program.convert import default_dtype, in_dtype, on_device
from reprokit.program.interpreter import determinism
from reprokit.program.step import Step
from reprokit.shrink import spec
from reprokit.snapshot.format import Snapshot
from reprokit.whatif import one_line

_CHILD = """
import sys
if sys.version_info < (3, 11):
    sys.exit("this is Python %d.%d, and reprokit needs 3.11 or newer" % sys.version_info[:2])
sys.path.insert(0, sys.argv[1])
import torch
from reprokit.compare.imprints import answer
from reprokit.snapshot.format import load
try:
    snapshot = load(sys.argv[2])
    answer(snapshot, snapshot.settings, sys.stdin.read(), sys.argv[3])
except Exception as error:
    while error.__cause__ is not None:  # a file that is whole here may name what another torch lacks
        error = error.__cause__
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    sys.exit(f"torch {torch.__version__}: {kind}{error}".splitlines()[0])
"""


def in_way(path: Path, snapshot: Snapshot, kind: str, value: str) -> DiffRow:
    """The row of a step beside itself in another way; an error of that way is its row."""
    name = f"--{kind} {value}"
    try:
        if kind == "compile":
            return _compiled(name, snapshot, value)
        if kind == "python":
            found, version = _in_python(path, snapshot, value)
            return described(f"{name} (torch {version})", found)
        return described(name, _converted(snapshot, kind, value))
    except UsageError:
        raise
    except Exception as error:  # what cannot be converted, compiled or moved fails in as many ways
        return DiffRow(name, IMPOSSIBLE, [str(error) if isinstance(error, ReprokitError) else one_line(error)])


def _converted(snapshot: Snapshot, kind: str, value: str) -> Comparison:
    if value == "cuda" and not torch.cuda.is_available():
        raise ReprokitError("torch sees no GPU")
    with determinism(snapshot.settings):
        one = Run.of(snapshot)
        if kind == "device":
            return Comparison.of_runs(one, Run.of(on_device(snapshot, value), snapshot.tensors))
        dtype = getattr(torch, value)
        with default_dtype(dtype):
            return Comparison.of_runs(one, Run.of(in_dtype(snapshot, dtype), snapshot.tensors))


def _compiled(name: str, snapshot: Snapshot, backend: str) -> DiffRow:
    check = spec.parse(f"mismatch:compile:{backend}")
    found = first_difference(snapshot, Compiled(check.option, check.file.resolve() if check.file is not None else None))
    if found is None:
        return DiffRow(
            name, ROUNDING, ["no result differs by more than the tolerances of `torch.testing.assert_close`"]
        )
    where, place = "only the whole step shows it", {}
    if found.call_index is not None:
        call = snapshot.program.calls[found.call_index]
        where, place = call_words(call), place_of(call)
    differ = f"{found.num_bad:,} of {found.num_elements:,} elements differ"
    lines = [f"first different call: {where}: {differ}"]
    lines.append(f"to reduce it: `reprokit shrink FILE --check {check.text}`")
    return DiffRow(name, DIFFERENT, lines, place)


def _in_python(path: Path, snapshot: Snapshot, python: str) -> tuple[Comparison, str]:
    """The comparison with the run of another Python, and its version of torch."""
    with tempfile.TemporaryDirectory(prefix="reprokit-diff-") as folder, determinism(snapshot.settings):
        package, written = Path(folder, "package"), Path(folder, "run.pt")
        package.mkdir()
        (package / "reprokit").symlink_to(Path(reprokit.__file__).parent)  # and nothing else of this environment
        words = [python, "-c", _CHILD, str(package), str(path.resolve()), str(written)]

        def ask(versions: Collection[Version]) -> Any:
            written.unlink(missing_ok=True)
            asked = json.dumps([*versions])
            try:
                done = subprocess.run(words, input=asked, capture_output=True, text=True, check=False, cwd=folder)
            except OSError as error:
                raise ReprokitError(f"`{python}` cannot be started: {error.strerror}") from error
            if not written.exists():
                said = done.stderr.strip().splitlines() if done.returncode > 0 else []
                raise ReprokitError((said or [f"it ended with {done.returncode}"])[-1])
            with torch.serialization.safe_globals([Imprint, Version]):
                return torch.load(written, weights_only=True)

        step, (version, (marks, made, error, loss)) = Step.of(snapshot), ask([])
        there = Run(step, step, marks, made, error, loss, ask=lambda versions: ask(versions)[2:])
        return Comparison.of_runs(Run.of(snapshot), there), version
