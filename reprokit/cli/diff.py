"""``reprokit diff``: two runs that should agree, and the first call that was given the same and made something else.

What is compared has a module of its own: two snapshots (`diff_steps`), one step run in other ways (`diff_ways`), two
logs of numbers (`diff_logs`). Each makes a `DiffRow` (`diff_rows`), which the command prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from reprokit.cli import console
from reprokit.cli.timeline import is_log
from reprokit.errors import UsageError

if TYPE_CHECKING:
    from reprokit.cli.diff_rows import DiffRow

DEFAULT_SECONDS = 600.0
_DTYPES = ("float64", "float32", "bfloat16", "float16")


@click.command("diff", short_help="Find the first call in which two runs part.")
@click.argument("first", type=console.PATH, metavar="FIRST")
@click.argument("second", type=console.PATH, metavar="[SECOND]", required=False)
@click.option("--python", multiple=True, metavar="PATH", help="Run the step with this Python, with another torch.")
@click.option("--dtype", multiple=True, type=click.Choice(_DTYPES), help="Run the step in this format.")
@click.option("--device", multiple=True, type=click.Choice(("cpu", "cuda")), help="Run the step on this device.")
@click.option(
    "--compile", "compilers", multiple=True, metavar="BACKEND|FILE.py:FUNCTION", help="Run the step compiled."
)
@click.option("-o", "--output", type=console.PATH, metavar="FILE", help="Save the difference for `reprokit shrink`.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
@console.max_time_option(DEFAULT_SECONDS, "Stop after S seconds.")
@console.planned
def command(
    first: Path,
    second: Path | None,
    python: tuple[str, ...],
    dtype: tuple[str, ...],
    device: tuple[str, ...],
    compilers: tuple[str, ...],
    output: Path | None,
    force: bool,
    max_time: float,
    json: bool,
    verbosity: console.Verbosity,
) -> int:
    """Compare the same step of two runs, saved by `reprokit capture --at-step N`, or the numbers of two runs.

    FIRST alone is run again here, and compared with what was recorded; with --python, --dtype, --device or --compile
    with a run in that way. The exit code is 1 if they differ by more than rounding.
    """
    options = {"python": python, "dtype": dtype, "device": device, "compile": compilers}
    ways = [(kind, value) for kind, values in options.items() for value in values]
    if second is not None and ways:
        raise UsageError("two files are compared as they are", hint="leave out SECOND, or the other ways to run")
    of_numbers = _are_logs(first, second, output)
    if output is not None:
        console.check_file(output, overwrite=force)
    with console.deadline(max_time):
        if of_numbers and second is not None:
            from reprokit.cli.diff_logs import of_logs

            rows = [of_logs(first, second)]
        else:
            rows = _rows_of_steps(first, second, ways, output)
    from reprokit.cli.diff_rows import exit_code

    if json:
        console.print_json({"schema": 1, "rows": [row.to_plain() for row in rows]})
    for row in rows:
        console.say(row.title, verbosity)
        for line in row.lines:
            console.say(f"  {line}", verbosity)
    return exit_code(rows)


def _are_logs(first: Path, second: Path | None, output: Path | None) -> bool:
    """True for two files of numbers; raises `UsageError` for one of them beside something else."""
    are_logs = [is_log(file) for file in (first, second) if file is not None]
    if not any(are_logs):
        return False
    if are_logs == [True, True] and output is None:
        return True
    hint = "name two .jsonl files and no -o, or snapshots only"
    raise UsageError("numbers of a run are compared with those of another, and hold no step", hint=hint)


def _rows_of_steps(first: Path, second: Path | None, ways: list[tuple[str, str]], output: Path | None) -> list[DiffRow]:
    """The rows of one or two snapshots; the first difference is saved as ``output``."""
    from reprokit.cli.diff_steps import as_recorded, as_trained, of_files, save_difference
    from reprokit.snapshot.format import load

    snapshot = load(first)
    if second is not None:
        other = load(second)
        rows = [as_trained(of_files(snapshot, other), {first: snapshot, second: other})]
    elif ways:
        from reprokit.cli.diff_ways import in_way

        rows = [in_way(first, snapshot, *way) for way in ways]
    else:
        rows = [as_trained(as_recorded(snapshot), {first: snapshot})]
    if output is not None:
        save_difference(snapshot, rows, output)
    return rows
