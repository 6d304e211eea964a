"""``reprokit show``: what a snapshot holds, on one screen. ``reprokit export``: the state from before its step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.failure_text import can_be_shrunk, growth, what
from reprokit.cli.console import (
    FilePath,
    Verbosity,
    common_options,
    deadline,
    make_folder,
    max_time_option,
    print_json,
    say,
    shown_command,
    too_long,
)
from reprokit.errors import SnapshotError, UsageError
from reprokit.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from reprokit.snapshot.format import Snapshot

_MARGIN = 5  # the mark, and the gaps between columns
_LEAST_ROOM = 24
_MARK: dict[str, Any] = {"no_wrap": True}


@dataclass(frozen=True, slots=True)
class Show:
    """A snapshot to describe."""

    snapshot: Path
    json: bool
    verbosity: Verbosity
    max_time: float
    frames: int | None = None

    def execute(self) -> int:
        from reprokit.locate.failure import HEALTHY
        from reprokit.snapshot.format import load

        hint = f"--max-time {2 * self.max_time:g} waits longer; --json does not run it"
        snapshot = load(self.snapshot)
        summary = snapshot.summary()
        if self.json:
            print_json(summary)
        elif self.frames is not None:
            with deadline(self.max_time, too_long(self.max_time, hint)):
                print_frames(snapshot, self.frames)
        else:
            words = ("reprokit", "shrink", str(self.snapshot)) if can_be_shrunk(summary) else ()
            with deadline(self.max_time, too_long(self.max_time, hint)):
                is_healthy = snapshot.failure.kind == HEALTHY
                words = ("reprokit", "trace", str(self.snapshot)) if is_healthy else words
                headline = f"{what(summary)}{',' if is_healthy else ' at'} step {snapshot.step}"
                print_screen(snapshot, headline, next_command=shown_command(*words))
            if self.verbosity is Verbosity.VERBOSE:
                click.echo(f"\n{snapshot.environment.collect_env}", err=True)
        return 0


@click.command("show", short_help="Show what a snapshot holds.")
@click.argument("snapshot", type=FilePath(), metavar="FILE")
@max_time_option(30)
@click.option(
    "--frames",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the last N module calls up to the failure, with their tensors in numbers, and nothing else.",
)
@common_options
def command(**options: Any) -> Show:
    """Show what a snapshot holds: the failure, where it began, and what surrounded it."""
    return Show(**options)


def print_screen(snapshot: Snapshot, headline: str, next_command: str) -> None:
    """One screen on stderr: the failure, its line, the calls that led to it, and what surrounded the step."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(headline, style="bold"))
    for section in (_source(snapshot, console.width), _steps(snapshot, console.width), _facts(snapshot)):
        if section is not None:
            console.print()
            console.print(section)
    if next_command:
        console.print()
        console.print(Text(f"next: {next_command}"), soft_wrap=True)


def print_frames(snapshot: Snapshot, number: int) -> None:
    """The frames before the failure on stderr, the last one at the end."""
    from rich.console import Console

    from reprokit.locate.ranges import table
    from reprokit.render.module_ranges import recorded_rows

    rows = recorded_rows(snapshot, last=number)
    if rows:
        console = Console(stderr=True, highlight=False)
        console.print(table(rows, console.width))
    else:
        say("no module was called before the failure")


def _grid(*options: dict[str, Any]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for option in options:
        grid.add_column(**option)
    return grid


def _source(snapshot: Snapshot, width: int) -> Table | None:
    """The origin's line among its neighbours, marked, under the name of the file; code is cut before its number is."""
    from rich.text import Text

    from reprokit.render.survey import source_lines

    lines, site = source_lines(snapshot), snapshot.failure.site
    if site is None:
        return None
    room = width - max(len(str(line.number)) for line in lines) - _MARGIN
    number: dict[str, Any] = {"justify": "right", "style": "dim", "no_wrap": True}
    grid = _grid(_MARK, number, {"no_wrap": True, "overflow": "ellipsis", "max_width": max(_LEAST_ROOM, room)})
    grid.add_row("", "", Text(f"{site.file}:{site.line}", style="dim"))
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and line.number > before.number + 1:
            grid.add_row("", "", Text("...", style="dim"))  # the snapshot holds no call of the lines between
        style = "bold" if line.is_origin else ""
        grid.add_row(">" if line.is_origin else "", str(line.number), Text(line.code, style=style))
    return grid


def _steps(snapshot: Snapshot, width: int) -> Table | None:
    from rich.text import Text

    from reprokit.render.survey import steps

    found = steps(snapshot)
    if not found:
        return None
    room = width - max(len(step.range) for step in found) - _MARGIN
    text: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis", "max_width": max(_LEAST_ROOM, room)}
    grid = _grid(_MARK, text, {"overflow": "fold"})
    for step in found:
        style = "bold" if step.is_origin else ""
        grid.add_row(">" if step.is_origin else "", Text(step.text, style=style), Text(step.range))
    return grid


def _facts(snapshot: Snapshot) -> Table:
    from rich.text import Text

    from reprokit.render import facts

    failed = (fact for fact in facts.of_failure(snapshot) if fact[0] != "line")  # it is shown above
    story = [("story", facts.story(snapshot))] if facts.story(snapshot) else []
    event = snapshot.failure.event
    grown = growth(snapshot.timeline, event.quantity if event is not None else None)
    settings, capture = snapshot.settings, []
    if settings.watch is not None:
        kept = counted(settings.history_steps or 0, "step")
        size = f"{(settings.history_bytes or 0) / 2**20:,.1f} MiB"
        watched = f"{settings.watch}; {kept} kept since the last copy of the state, which takes {size}"
        capture = [("capture", watched)]
    rows = [*story, *failed, *grown, *facts.surroundings(snapshot), *capture, *facts.source(snapshot)]
    versions = dict(facts.versions(snapshot.environment))
    shown = (f"{name} {versions[name]}" for name in ("torch", "python", "devices") if name in versions)
    rows.append(("environment", ", ".join(shown)))
    grid = _grid({"style": "dim", "no_wrap": True}, {"overflow": "fold"})
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


@dataclass(frozen=True, slots=True)
class Export:
    """A snapshot whose state goes into a folder."""

    snapshot: Path
    output: Path
    overwrite: bool
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        import torch

        from reprokit.grammar import plain_of
        from reprokit.snapshot.files import replaced
        from reprokit.snapshot.format import load

        snapshot = load(self.snapshot)
        before = snapshot.before
        if before is None:
            raise SnapshotError(
                f"`{self.snapshot}` holds no state from before the step", hint="capture it again with this version"
            )
        make_folder(self.output, overwrite=self.overwrite)
        files = {"model.pt": before.model(), "optimizer.pt": before.optimizer(), "rng.pt": plain_of(snapshot.rng)}
        written = {name: content for name, content in files.items() if content}
        for name, content in written.items():
            with replaced(self.output / name) as file:
                torch.save(content, file)
        if self.json:
            print_json({"schema": 1, "step": snapshot.step, "files": [str(self.output / name) for name in written]})
        say(f"the state before step {snapshot.step} -> {self.output} ({', '.join(written)})", self.verbosity)
        if not before.optimizers and not before.left_out:
            say("  no optimizer had stepped before", self.verbosity)
        for note in before.left_out:
            say(f"  left out {note}", self.verbosity)
        if snapshot.fidelity != "exact":
            say(f"  the replay was {snapshot.fidelity}: {snapshot.fidelity_note}", self.verbosity)
        return 0


@click.command("export", short_help="Write the state from before the failing step.")
@click.argument("snapshot", type=FilePath(), metavar="FILE")
@click.option("--before", is_flag=True, help="The state with which the failing step began.")
@click.option("-o", "--output", type=FilePath(), metavar="DIR", help="Where to write; the snapshot's name by default.")
@click.option("-f", "--force", is_flag=True, help="Write into DIR if it is not empty.")
@common_options
def export_command(
    snapshot: Path, before: bool, output: Path | None, force: bool, json: bool, verbosity: Verbosity
) -> Export:
    """Write state dicts of model and optimizer, and the states of the generators, from a snapshot.

    `torch.load(..., weights_only=True)` reads the files.
    """
    if not before:
        raise UsageError("nothing to export was named", hint=f"reprokit export {snapshot} --before")
    folder = output or snapshot.with_name(f"{snapshot.name.removesuffix('.pt').removesuffix('.repro')}-before")
    return Export(snapshot, folder, force, json, verbosity)
