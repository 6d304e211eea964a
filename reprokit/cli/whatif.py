"""``reprokit whatif``: a failing program in other precisions, on the other device, compiled, in anomaly mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reprokit.cli import console
from reprokit.cli.shrink import open_view
from reprokit.errors import UsageError
from reprokit.grammar import plain_of
from reprokit.own_work import ignored_warnings
from reprokit.shrink import View
from reprokit.snapshot.files import REDUCTION_FILE

if TYPE_CHECKING:
    from reprokit.render.sources import Opened
    from reprokit.shrink.reduction import WhatIfResult
    from reprokit.whatif import Trial, Variant

DEFAULT_SECONDS = 60.0
SECONDS_FOR_ALL = 60.0  # to open the file, to start processes, and for the first run


@click.command("whatif", short_help="Run a failing program in other precisions, compiled and so on.")
@click.argument("file", type=console.PATH, metavar="(FILE | DIR)")
@console.max_time_option(DEFAULT_SECONDS, "Stop after S seconds.")
@click.option("--keep", is_flag=True, help="Keep the table in the reduction, for `reprokit render`.")
@console.planned
def command(file: Path, max_time: float, keep: bool, json: bool, verbosity: console.Verbosity) -> int:
    """Run the program of a snapshot or a reduction in other ways.

    Other precisions, the other device, torch.compile, deterministic algorithms, one thread, anomaly mode.
    """
    from reprokit.render.sources import open_source

    with console.deadline(2 * max_time + SECONDS_FOR_ALL, f"--max-time {2 * max_time:g} waits longer"):
        opened = open_source(file)
        if keep and opened.reduction is None:
            raise UsageError("a snapshot keeps no table", hint="leave out `--keep`, or name a folder of results")
        with ignored_warnings():  # of the calls in the table
            table = _table(opened, max_time, open_view(verbosity))
    if keep and opened.reduction is not None:
        replace(opened.reduction, whatif=table).save(file / REDUCTION_FILE if file.is_dir() else file)
    if json:
        console.print_json({"schema": 1, **plain_of(table)})
    if verbosity is not console.Verbosity.QUIET:
        _print_table(table)
    console.say(f"{table.seconds or 0:.1f} s" + (", kept in the reduction" if keep else ""), verbosity)
    return 0


def _print_table(table: WhatIfResult) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from reprokit.render.findings import plain_rows

    header, *body = plain_rows(table)
    shown = Table(box=None, pad_edge=False)
    for name in header:
        shown.add_column(name, justify="right" if name == "time" else "left", overflow="fold")
    for row in body:
        shown.add_row(*map(Text, row))
    Console(stderr=True, highlight=False).print(shown)


def _table(opened: Opened, seconds: float, view: View) -> WhatIfResult:
    """The table; every answer is shown as soon as it is there."""
    from reprokit.program.interpreter import Settings
    from reprokit.program.step import Step
    from reprokit.render.findings import WORDS
    from reprokit.whatif import of_reduction, of_snapshot

    def show_trial(program: str, variant: Variant, trial: Trial) -> None:
        view.say(f"{program}, {variant.name.replace('`', '')}: {WORDS[trial.answer.value]}")

    subject = opened.reduction or opened.snapshot
    assert subject is not None, "a source holds one or the other"
    if opened.reduction is not None:
        settings = opened.snapshot.settings if opened.snapshot is not None else Settings()
        step = Step.of(opened.snapshot) if opened.snapshot is not None else None
        return of_reduction(opened.reduction, settings, step=step, seconds=seconds, on_trial=show_trial)
    assert opened.snapshot is not None, "a source holds one or the other"
    return of_snapshot(opened.snapshot, seconds=seconds, on_trial=show_trial)
