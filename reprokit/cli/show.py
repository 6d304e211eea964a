"""``reprokit show``: what a snapshot holds, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.block import can_be_shrunk
from reprokit.capture.words import growth
from reprokit.cli.console import Verbosity, common_options, print_json, shown_command

if TYPE_CHECKING:
    from rich.table import Table

    from reprokit.snapshot.format import Snapshot


_MARGIN = 5  # the mark, and the gaps between columns
_LEAST_ROOM = 24


@dataclass(frozen=True, slots=True)
class Show:
    """A snapshot to describe."""

    snapshot: Path
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Print the summary."""
        from reprokit.snapshot.format import load

        snapshot = load(self.snapshot)
        summary = snapshot.summary()
        if self.json:
            print_json(summary)
        else:
            command = ("reprokit", "shrink", str(self.snapshot)) if can_be_shrunk(summary) else ()
            print_screen(snapshot, summary, next_command=shown_command(*command))
            if self.verbosity is Verbosity.VERBOSE:
                print_environment(summary["environment"])
        return 0


@click.command("show", short_help="Show what a snapshot holds.")
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="FILE")
@common_options
def command(snapshot: Path, verbosity: str | None, json: bool) -> Show:
    """Show what a snapshot holds: the failure, where it began, and what surrounded it."""
    return Show(snapshot, json, Verbosity(verbosity or "normal"))


def print_screen(snapshot: Snapshot, summary: dict[str, Any], next_command: str) -> None:
    """One screen on stderr: the failure, its line, the calls that led to it, and what surrounded the step."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(_headline(summary["failure"]), style="bold"))
    for section in (_source(snapshot), _steps(snapshot, console.width), _facts(summary)):
        if section is not None:
            console.print()
            console.print(section)
    if next_command:
        console.print()
        console.print(Text(f"next: {next_command}"), soft_wrap=True)


def _grid(*options: dict[str, Any]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for option in options:
        grid.add_column(**option)
    return grid


def _source(snapshot: Snapshot) -> Table | None:
    """The origin's line among its neighbours, marked."""
    from rich.text import Text

    from reprokit.render.screen import source_lines

    lines = source_lines(snapshot)
    if not lines:
        return None
    grid = _grid({}, {"justify": "right", "style": "dim", "no_wrap": True}, {"no_wrap": True, "overflow": "ellipsis"})
    for line in lines:
        style = "bold" if line.is_origin else ""
        grid.add_row(">" if line.is_origin else "", str(line.number), Text(line.code, style=style))
    return grid


def _steps(snapshot: Snapshot, width: int) -> Table | None:
    """The calls up to the origin with the ranges of their results, which are more worth their room than long calls."""
    from rich.text import Text

    from reprokit.render.screen import steps

    found = steps(snapshot)
    if not found:
        return None
    room = width - max(len(step.range) for step in found) - _MARGIN
    text: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis", "max_width": max(_LEAST_ROOM, room)}
    grid = _grid({}, text, {"overflow": "fold"})
    for step in found:
        style = "bold" if step.is_origin else ""
        grid.add_row(">" if step.is_origin else "", Text(step.text, style=style), Text(step.range))
    return grid


def _facts(summary: dict[str, Any]) -> Table:
    """Names and values."""
    from rich.text import Text

    grid = _grid({"style": "dim", "no_wrap": True}, {"overflow": "fold"})
    for name, value in _rows(summary):
        grid.add_row(name, Text(value))
    return grid


def print_environment(environment: dict[str, Any]) -> None:
    """The whole text of ``collect_env`` on stderr."""
    click.echo(f"\n{environment.get('collect_env', '')}", err=True)


def _headline(failure: dict[str, Any]) -> str:
    """One sentence on what failed, for example ``nan from softmax in layers.1 at step 7``."""
    what = failure["exception"]["type"] if failure["exception"] else failure["kind"]
    if failure["call"] is not None:
        return f"{what} from `{failure['call']}` ({failure['phase']}) at step {failure['step']}"
    if failure["input"] is not None:
        return f"{what} already in `{failure['input']}` at step {failure['step']}"
    return f"{what} at step {failure['step']}" + ("" if failure["exception"] else ", of unknown origin")


def _rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    failure = summary["failure"]
    if failure["call"] is None:
        yield "call", _without_call(failure)
    if failure["backward_node"]:
        yield "autograd node", failure["backward_node"]
    yield "module", failure["module"] or "the training loop itself"
    if failure["site"]:
        yield "line", f"{failure['site']['file']}:{failure['site']['line']}"
    if failure["exception"]:
        yield "exception", f"{failure['exception']['type']}: {failure['exception']['message']}"
    elif failure["num_elements"]:
        yield "bad elements", f"{failure['num_bad']:,} of {failure['num_elements']:,}, first at {failure['element']}"
    yield "noticed in", failure["observed_at"]
    yield "when", f"step {failure['step']}, micro-step {failure['micro_step']}, {failure['phase']}"
    note = f" ({summary['fidelity_note']})" if summary.get("fidelity_note") else ""
    yield "replay", f"{summary['fidelity']}{note}"
    yield "program", f"{summary['program']['calls']:,} calls, {summary['program']['elements']:,} input elements"
    yield from _surroundings(summary)


def _without_call(failure: dict[str, Any]) -> str:
    if failure["exception"]:
        return "none: raised by the training loop's own code"
    return "none: the value was bad before the step began" if failure["input"] is not None else "unknown"


def _surroundings(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from growth(summary["timeline"])
    capture = summary["capture"]
    if "rank" in capture:
        yield "process", f"rank {capture['rank']} of {capture['world_size']}"
    if "watch" in capture:
        size = f"{capture['history_bytes'] / 2**20:,.1f} MiB of state"
        yield "capture", f"{capture['watch']}, with {capture['history_steps']:,} earlier steps and {size}"
    environment = summary["environment"]
    if environment:
        devices = ", ".join(environment["devices"]) or "CPU"
        yield "environment", f"torch {environment['torch']}, python {environment['python']}, {devices}"
    git = summary["git"]
    if git.get("commit"):
        changed = ", uncommitted changes" if git["dirty"] else ""
        yield "git", f"{git['commit'][:12]} on {git['branch'] or 'no branch'}{changed}"
    if git.get("command"):
        yield "command", shown_command(*git["command"])
