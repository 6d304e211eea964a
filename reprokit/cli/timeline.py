"""``reprokit timeline``: steps of a snapshot or a healthy run in numbers, for people, programs and TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from reprokit import grammar
from reprokit.cli.console import FilePath, Verbosity, check_file, common_options, make_folder, print_text, say
from reprokit.errors import NotASnapshot, UsageError
from reprokit.words import counted, json_line

if TYPE_CHECKING:
    from reprokit.series.story import RecordedStep
    from reprokit.snapshot.format import Snapshot

Format = Literal["table", "jsonl", "csv", "tensorboard"]
FORMATS: tuple[Format, ...] = ("table", "jsonl", "csv", "tensorboard")
Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShowTimeline:
    """A snapshot whose steps are printed."""

    snapshot: Path
    to: Format
    output: Path | None
    overwrite: bool
    verbosity: Verbosity

    def execute(self) -> int:
        from reprokit.snapshot.format import load

        if self.snapshot.name.removesuffix(".1").endswith(".jsonl"):  # of `capture --numbers`; `.1` is the older one
            rows = rows_in(self.snapshot)
            recorded: Sequence[RecordedStep] = list(_recorded_in(rows))
        else:
            snapshot = load(self.snapshot)
            rows, recorded = list(steps_of(snapshot)), snapshot.recorded or ()
        if self.to == "tensorboard":
            return self._write_events(rows)
        text = _FORMATS[self.to](rows)
        if self.to == "table":
            text += "".join(f"{line}\n" for line in _recorded_lines(recorded))
        if self.output is not None:
            from reprokit.snapshot.files import write_text

            write_text(self.output, text)
            say(f"{len(rows)} steps -> {self.output}", self.verbosity)
        else:
            print_text(text)
        return 0

    def _write_events(self, rows: Sequence[Numbers]) -> int:
        try:
            tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise UsageError("TensorBoard is not installed", hint="pip install tensorboard") from None
        folder = self.output or self.snapshot.with_name(f"{self.snapshot.stem}-timeline")
        make_folder(folder, overwrite=self.overwrite)
        with tensorboard.SummaryWriter(str(folder)) as writer:
            for row in rows:
                for name, number in row.items():
                    if name != "step" and isinstance(number, float):
                        writer.add_scalar(name, number, row["step"])
        say(f"{len(rows)} steps -> {folder}; tensorboard --logdir {folder}", self.verbosity)
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
    row = grammar.of(dict)(json.loads(line.decode()))
    step = grammar.count(row.pop("step", None))
    return {"step": step, **{grammar.name(name): _number(value) for name, value in row.items()}}


def _number(value: Any) -> float:
    """A number, or the name of one that JSON does not have."""
    return float(_NO_JSON(value) if isinstance(value, str) else grammar.number(value))


_NO_JSON = grammar.one_of("nan", "inf", "-inf")


def _recorded_in(rows: Sequence[Numbers]) -> Iterator[RecordedStep]:
    from reprokit.series.story import RecordedStep

    for row in rows:
        weights, gradients, zeros = (
            {name.removeprefix(kind): row[name] for name in row if name.startswith(kind)}
            for kind in ("weight_norm/", "grad_norm/", "zeros/")
        )
        yield RecordedStep(row["step"], weights, gradients, zeros)


def _columns(rows: Sequence[Numbers]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _as_csv(rows: Sequence[Numbers]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _recorded_lines(recorded: Sequence[RecordedStep]) -> Iterator[str]:
    if recorded:
        steps = counted(len(recorded), "step")
        yield f"\n{counted(len(recorded[-1].weight_norm), 'parameter')} recorded in {steps}: --to csv prints them"


def _as_table(rows: Sequence[Numbers]) -> str:
    columns = [name for name in _columns(rows) if "/" not in name]
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line}\n" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_FORMATS = {"table": _as_table, "jsonl": lambda rows: "".join(f"{json_line(row)}\n" for row in rows), "csv": _as_csv}


@click.command("timeline", short_help="Print the steps before the failure in numbers.")
@click.argument("snapshot", type=FilePath(), metavar="FILE")
@click.option("--to", type=click.Choice(FORMATS), default="table", show_default=True, help="The format.")
@click.option("-o", "--output", type=FilePath(), metavar="FILE|DIR", help="Write there; of TensorBoard the log folder.")
@click.option("-f", "--force", is_flag=True, help="Overwrite it.")
@common_options
def command(
    snapshot: Path, to: Format, output: Path | None, force: bool, json: bool, verbosity: Verbosity
) -> ShowTimeline:
    """Print loss, learning rate, gradient norm, scale and seconds of the last steps, and what the loop noted.

    FILE is a snapshot, or what `reprokit capture --numbers FILE` wrote, whose name ends in .jsonl or .jsonl.1.
    """
    if output is not None and to != "tensorboard":
        check_file(output, overwrite=force)
    return ShowTimeline(snapshot, "jsonl" if json else to, output, force, verbosity)
