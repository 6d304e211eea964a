"""``reprokit show``: what a snapshot holds, on one screen. ``reprokit export``: the state from before its step."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reprokit.capture.failure_text import can_be_shrunk, growth, what
from reprokit.cli import console
from reprokit.errors import SnapshotError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from reprokit.snapshot.format import Snapshot

_MARGIN = 5  # the mark, and the gaps between columns
_LEAST_ROOM = 24


@click.command("show", short_help="Show what a snapshot holds.")
@click.argument("file", type=console.PATH, metavar="(FILE | DIR)")
@console.max_time_option(30)
@click.option(
    "--frames",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the last N module calls up to the failure, with their tensors in numbers, and nothing else.",
)
@console.planned
def command(file: Path, max_time: float, frames: int | None, json: bool, verbosity: console.Verbosity) -> int:
    """Show what a snapshot holds: the failure, where it began, and what surrounded it.

    DIR is a folder with one snapshot in it, or one that `reprokit shrink` wrote, with the snapshot beside it.
    """
    file, snapshot = _found(file)
    if json:
        console.print_json(snapshot.summary())
        return 0
    from rich.console import Console

    screen = Console(stderr=True, highlight=False)
    with console.deadline(max_time, f"--max-time {2 * max_time:g} waits longer; --json does not run it"):
        if frames is not None:
            _print_frames(snapshot, frames, screen)
        else:
            _print_screen(snapshot, file, screen)
    if verbosity is console.Verbosity.VERBOSE and frames is None:
        click.echo(f"\n{snapshot.environment.collect_env}", err=True)
    return 0


def _found(path: Path) -> tuple[Path, Snapshot]:
    """The snapshot at a path, and its file or the folder that it was reduced into."""
    from reprokit.render.sources import open_source
    from reprokit.snapshot.files import REDUCTION_FILE, snapshots_in
    from reprokit.snapshot.format import load

    if os.path.isdir(path):
        if (path / REDUCTION_FILE).is_file():
            return path, open_source(path).whole(path)
        inside = snapshots_in(path)
        path = inside[0] if len(inside) == 1 else path
    return path, load(path)


def _print_frames(snapshot: Snapshot, number: int, screen: Console) -> None:
    """The module calls before the failure, the last one at the end."""
    from reprokit.locate.ranges import table
    from reprokit.render.module_ranges import recorded_rows

    if rows := recorded_rows(snapshot, last=number):
        screen.print(table(rows, screen.width))
    else:
        console.say("no module was called before the failure")


def _print_screen(snapshot: Snapshot, file: Path, screen: Console) -> None:
    """The failure, its line, the calls that led to it, what surrounded the step, and the next command."""
    from rich.text import Text

    from reprokit.words import sentence

    summary, is_healthy = snapshot.summary(), not snapshot.failure.kind.is_failure
    screen.print(Text(f"{what(summary)}{',' if is_healthy else ' at'} step {snapshot.step}", style="bold"))
    if snapshot.cause is not None:
        for text in filter(None, [snapshot.cause.text, sentence(snapshot.cause.why_not)]):
            screen.print(Text(text))
    for section in (_source(snapshot, screen.width), _steps(snapshot, screen.width), _facts(snapshot)):
        if section.row_count:
            screen.print()
            screen.print(section)
    if is_healthy or can_be_shrunk(summary):
        words = shlex.join(["reprokit", "trace" if is_healthy else "shrink", str(file)])
        screen.print(Text(f"\nnext: {words}"), soft_wrap=True)


def _grid(rows: Iterable[tuple[bool, str, str]], *, cut: int | None = None, room: int = 0) -> Table:
    """A mark and two columns, rows with a mark in bold; the column ``cut`` has at most ``room`` characters."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for column in (1, 2):
        if column == cut:
            grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(_LEAST_ROOM, room))
        else:
            grid.add_column(overflow="fold", justify="right" if cut == 2 else "left")
    for is_marked, left, right in rows:
        style = "bold" if is_marked else ""
        grid.add_row(">" if is_marked else "", Text(left, style=style), Text(right, style=style))
    return grid


def _source(snapshot: Snapshot, width: int) -> Table:
    """The origin's line among its neighbours, marked, under the name of the file; code is cut before its number is."""
    from reprokit.render.survey import source_lines

    lines, site = source_lines(snapshot), snapshot.failure.site
    rows = [(False, "", f"{site.file}:{site.line}")] if site is not None else []
    for before, line in zip([None, *lines], lines if rows else [], strict=False):
        if before is not None and line.number > before.number + 1:
            rows.append((False, "", "..."))  # the snapshot holds no call of the lines between
        rows.append((line.is_origin, str(line.number), line.code))
    return _grid(rows, cut=2, room=width - max((len(row[1]) for row in rows), default=0) - _MARGIN)


def _steps(snapshot: Snapshot, width: int) -> Table:
    from reprokit.render.survey import steps

    rows = [(step.is_origin, step.text, step.range) for step in steps(snapshot)]
    return _grid(rows, cut=1, room=width - max((len(row[2]) for row in rows), default=0) - _MARGIN)


def _facts(snapshot: Snapshot) -> Table:
    from rich.table import Table
    from rich.text import Text

    from reprokit.render import facts

    failed = (fact for fact in facts.of_failure(snapshot) if fact[0] != "line")  # it is shown above
    story = [("story", facts.story(snapshot))] if facts.story(snapshot) else []
    event = snapshot.failure.event
    grown = growth(snapshot.timeline, event.quantity if event is not None else None)
    versions = dict(facts.versions(snapshot.environment))
    shown = (f"{name} {versions[name]}" for name in ("torch", "python", "devices") if name in versions)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [*story, *failed, *grown, *facts.surroundings(snapshot), *facts.source(snapshot)]
    for name, value in (*rows, ("environment", ", ".join(shown))):
        grid.add_row(name, Text(value))
    return grid


@click.command("export", short_help="Write the state from before the failing step.")
@click.argument("file", type=console.PATH, metavar="FILE")
@click.option("--before", is_flag=True, help="The state with which the failing step began.")
@console.output_options("DIR", "Where to write; the snapshot's name by default.")
@console.planned
def export_command(
    file: Path, before: bool, output: Path | None, force: bool, json: bool, verbosity: console.Verbosity
) -> int:
    """Write state dicts of model and optimizer, and the states of the generators, from a snapshot.

    `torch.load(..., weights_only=True)` reads the files.
    """
    if not before:
        raise UsageError("nothing to export was named", hint=f"reprokit export {file} --before")
    import torch

    from reprokit.grammar import plain_of
    from reprokit.snapshot.files import replaced
    from reprokit.snapshot.format import load

    snapshot = load(file)
    state = snapshot.before
    if state is None:
        raise SnapshotError(f"`{file}` holds no state from before the step", hint="capture it again with this version")
    folder = output or file.with_name(f"{file.name.removesuffix('.pt').removesuffix('.repro')}-before")
    console.make_folder(folder, overwrite=force)
    contents = {"model.pt": state.model(), "optimizer.pt": state.optimizer(), "rng.pt": plain_of(snapshot.rng)}
    written = {folder / name: content for name, content in contents.items() if content}
    for path, content in written.items():
        with replaced(path) as stream:
            torch.save(content, stream)
    if json:
        console.print_json({"schema": 1, "step": snapshot.step, "files": [str(path) for path in written]})
    console.say(
        f"the state before step {snapshot.step} -> {folder} ({', '.join(path.name for path in written)})", verbosity
    )
    for note in state.left_out or () if state.optimizers else ("optimizers: none had stepped before",):
        console.say(f"  left out {note}", verbosity)
    if snapshot.fidelity != "exact":
        console.say(f"  the replay was {snapshot.fidelity}: {snapshot.fidelity_note}", verbosity)
    return 0
