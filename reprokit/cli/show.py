"""``reprokit show``: what a snapshot holds, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from reprokit.capture.block import can_be_shrunk
from reprokit.cli.console import Verbosity, common_options, print_json, shown_command


@dataclass(frozen=True, slots=True)
class Show:
    """A snapshot to describe."""

    snapshot: Path
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Print the summary."""
        from reprokit.snapshot.format import load

        summary = load(self.snapshot).summary()
        if self.json:
            print_json(summary)
        else:
            command = ("reprokit", "shrink", str(self.snapshot)) if can_be_shrunk(summary) else ()
            print_summary(summary, next_command=shown_command(*command))
            if self.verbosity is Verbosity.VERBOSE:
                print_environment(summary["environment"])
        return 0


@click.command("show", short_help="Show what a snapshot holds.")
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="FILE")
@common_options
def command(snapshot: Path, verbosity: str | None, json: bool) -> Show:
    """Show what a snapshot holds: the failure, where it began, and what surrounded it."""
    return Show(snapshot, json, Verbosity(verbosity or "normal"))


def print_summary(summary: dict[str, Any], next_command: str) -> None:
    """The summary of a snapshot as a table of names and values on stderr."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, Text(value))
    console.print(Text(_headline(summary["failure"]), style="bold"))
    console.print()
    console.print(table)
    if next_command:
        console.print()
        console.print(Text(f"next: {next_command}"), soft_wrap=True)


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
    yield "call", failure["call"] or _without_call(failure)
    if failure["backward_node"]:
        yield "autograd node", failure["backward_node"]
    yield "module", failure["module"] or "the training loop itself"
    if failure["site"]:
        yield "line", f"{failure['site']['file']}:{failure['site']['line']}"
        yield "", failure["site"]["code"]
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
    losses = [entry["loss"] for entry in summary["timeline"] if entry.get("loss") is not None]
    if losses:
        yield "last losses", "  ".join(f"{loss:.4g}" for loss in losses[-5:])
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
