"""``reprokit timeline``: steps of a snapshot or a healthy run in numbers, for people, programs and TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import json as json_format
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from reprokit import grammar
from reprokit.cli import console
from reprokit.errors import NotASnapshot
from reprokit.words import counted, json_line

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot

Format = Literal["table", "jsonl", "csv", "html", "tensorboard"]
FORMATS: tuple[Format, ...] = get_args(Format)
Numbers = Mapping[str, Any]
_NO_JSON = grammar.one_of("nan", "inf", "-inf")


@click.command("timeline", short_help="Print the steps before the failure in numbers.")
@click.argument("file", type=console.PATH, metavar="FILE")
@click.option("--to", type=click.Choice(FORMATS), default="table", show_default=True, help="The format.")
@console.output_options("FILE|DIR", "Where to write; of TensorBoard the log folder.")
@console.planned
def command(file: Path, to: Format, output: Path | None, force: bool, json: bool, verbosity: console.Verbosity) -> int:
    """Print loss, learning rate, gradient norm, scale and seconds of the last steps, and what the loop noted.

    FILE is a snapshot, or what `reprokit capture --numbers FILE` wrote, whose name ends in .jsonl or .jsonl.1.
    """
    to = "jsonl" if json else to
    if output is not None and to != "tensorboard":
        console.check_file(output, overwrite=force)
    from reprokit.snapshot.files import write_text
    from reprokit.snapshot.format import load

    rows = rows_in(file) if is_log(file) else list(steps_of(load(file)))
    if to == "tensorboard":
        return _write_events(rows, output or file.with_name(f"{file.stem}-timeline"), force, verbosity)
    if to == "html":
        from reprokit.render.charts import run_page

        text = run_page(f"{len(rows):,} steps of {file.name}", rows)
    else:
        text = _FORMATS[to](rows)
    if to == "table":
        text += _recorded_words(rows)
    if output is None:
        console.print_text(text)
    else:
        write_text(output, text)
        console.say(f"{len(rows)} steps -> {output}", verbosity)
    return 0


def _write_events(rows: Sequence[Numbers], folder: Path, force: bool, verbosity: console.Verbosity) -> int:
    from reprokit.integrations.tensorboard import TensorBoardSink

    console.make_folder(folder, overwrite=force)
    sink = TensorBoardSink(folder)
    for row in rows:
        sink({name: number for name, number in row.items() if isinstance(number, (int, float))})
    sink.close()
    console.say(f"{len(rows)} steps -> {folder}; tensorboard --logdir {folder}", verbosity)
    return 0


def steps_of(snapshot: Snapshot) -> Iterator[Numbers]:
    """The steps as flat rows without what is unknown; those that were recorded before the timeline begins come
    first."""
    from reprokit.series.story import StepNumbers, flat

    recorded = {row.step: row for row in snapshot.recorded or ()}
    first = snapshot.timeline[0].step if snapshot.timeline else snapshot.step + 1
    for row in recorded.values():
        if row.step < first:
            yield flat(StepNumbers(row.step), row)
    for numbers in snapshot.timeline:
        named = {"optimizer": numbers.optimizer} if numbers.optimizer is not None else {}
        yield {**flat(numbers, recorded.pop(numbers.step, None)), **named}


def is_log(file: Path) -> bool:
    """True for a file of `capture --numbers`; ``.1`` is the older one."""
    return file.name.removesuffix(".1").endswith(".jsonl")


def rows_in(file: Path) -> list[Numbers]:
    """The steps in a file of `capture --numbers`, without a last line that is cut off.

    Raises `NotASnapshot` if something else is in it, `SnapshotError` if it is too large.
    """
    from reprokit.snapshot.files import require_file
    from reprokit.snapshot.limits import require_within

    require_file(file, "snapshot")
    require_within(file, "characters", file.stat().st_size)
    *whole, last = file.read_bytes().split(b"\n")
    rows: list[Numbers] = []
    with contextlib.suppress(ValueError, RecursionError):
        rows += map(_row, whole)
        rows += [_row(last)]
    if len(rows) < max(1, len(whole)):
        raise NotASnapshot(
            f"`{file}` was not written by reprokit", hint="give a snapshot, or a file of `capture --numbers`"
        )
    require_within(file, "items", len(rows) * len(_columns(rows)))
    return rows


def _row(line: bytes) -> Numbers:
    """The numbers of a step; raises `ValueError` or `RecursionError`."""
    row = grammar.of(dict)(json_format.loads(line.decode()))
    step = grammar.count(row.pop("step", None))
    numbers = (
        (name, _NO_JSON(value) if isinstance(value, str) else grammar.number(value)) for name, value in row.items()
    )
    return {"step": step, **{grammar.name(name): float(value) for name, value in numbers}}


def _recorded_words(rows: Sequence[Numbers]) -> str:
    """A line about the numbers of parameters, which no table has room for; empty without them."""
    from reprokit.series.story import PARAMETER_NUMBERS

    kinds = tuple(f"{kind}/" for kind in PARAMETER_NUMBERS)
    recorded = [row for row in rows if any(name.startswith(kinds) for name in row)]
    if not recorded:
        return ""
    names = {name.partition("/")[2] for row in recorded for name in row if name.startswith(kinds)}
    words = f"{counted(len(names), 'parameter')} recorded in {counted(len(recorded), 'step')}: --to csv or --to html"
    hint = "; `reprokit capture --record 1` records every step" if len(recorded) < len(rows) else ""
    return f"\n{words}{hint}\n"


def _columns(rows: Sequence[Numbers]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _as_csv(rows: Sequence[Numbers]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _as_table(rows: Sequence[Numbers]) -> str:
    columns = [name for name in _columns(rows) if "/" not in name]
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line}\n" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_FORMATS = {"table": _as_table, "jsonl": lambda rows: "".join(f"{json_line(row)}\n" for row in rows), "csv": _as_csv}
