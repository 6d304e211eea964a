"""``reprokit diff`` of two files of `capture --numbers`: the first step whose loss or norm differs in any bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from reprokit.cli.diff_rows import DIFFERENT, EQUAL, DiffRow
from reprokit.cli.timeline import Numbers, rows_in
from reprokit.errors import UsageError
from reprokit.words import counted, listed

_COMPARED = ("loss", "grad_norm", "update", "weight_norm")
Pair = tuple[Numbers, Numbers]


def of_logs(first: Path, second: Path) -> DiffRow:
    """The row of two runs by their numbers."""
    one, other = (_by_step(file) for file in (first, second))
    shared = [(one[key], row) for key, row in other.items() if key in one]
    names, names_other = ({name for pair in shared for name in pair[n] if name.startswith(_COMPARED)} for n in (0, 1))
    compared = names & names_other
    if not compared:
        what = "loss and no norm" if shared else "step"
        raise UsageError(f"the two files have no {what} in common", hint="measure the same steps, with `--record N`")
    steps = counted(len(shared), "step")
    more = []
    for which, only in (("first", names - compared), ("second", names_other - compared)):
        if only:
            more.append(f"only the {which} has {listed(sorted(only))}")
    for which, rows in (("first", one), ("second", other)):
        if len(rows) > len(shared):
            more.append(f"the {which} has {len(rows):,} steps, {steps} are in both")
    for pair in shared:
        name = _first_other(pair, compared)
        if name is not None:
            lines = [*_difference_lines(name, pair, (first, second)), *more]
            return DiffRow("", DIFFERENT, lines, {"step": int(pair[1]["step"]), "number": name})
    return DiffRow("", EQUAL, [f"{listed(sorted(compared))} of {steps} agree in all bits", *more])


def _first_other(pair: Pair, compared: set[str]) -> str | None:
    """The first number of a step that differs in any bit; two NaN are equal."""
    before, row = pair
    for name in row:
        if name not in compared or name not in before:
            continue
        one, other = before[name], row[name]
        if one != other and not (math.isnan(one) and math.isnan(other)):
            return name
    return None


def _by_step(file: Path) -> dict[tuple[int, str | None], Numbers]:
    """The rows of a file by step, and by optimizer where several take turns."""
    return {(row["step"], row.get("optimizer")): row for row in rows_in(file)}


def _difference_lines(name: str, pair: Pair, files: tuple[Path, Path]) -> Iterator[str]:
    """The first number that differs, and the commands that compare its step."""
    before, row = pair
    step = int(row["step"])
    yield f"step {step} is the first that differs: {name} {before[name]!r} and {row[name]!r}"
    at = f"{step - 1},{step}" if step else "0"
    stems = [str(path).removesuffix(".1").removesuffix(".jsonl") for path in files]
    for stem in stems:
        yield f"reprokit capture --at-step {at} -o {stem}.pt train.py ARGS of that run"
    yield f"reprokit diff {' '.join(f'{stem}-step{step}.pt' for stem in stems)}"
