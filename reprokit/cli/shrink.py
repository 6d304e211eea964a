"""``reprokit shrink``: the smallest program that fails the same way, written as a repro, an issue text and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.block import shown_path
from reprokit.cli.console import Verbosity, common_options, print_json, say, shown_command
from reprokit.cli.outputs import make_folder
from reprokit.errors import Flaky, Interrupted, NotReproduced, ReprokitError

if TYPE_CHECKING:
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

VERDICTS = {NotReproduced: "not_reproduced", Flaky: "flaky"}


@dataclass(frozen=True, slots=True)
class Shrink:
    """A snapshot to shrink, where to write, and how much work to spend."""

    snapshot: Path
    output: Path | None
    overwrite: bool
    level: str
    max_time: float | None
    jobs: int
    resume: bool
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Shrink, render and say what came out; raises `NotReproduced`, `Flaky` or `Interrupted`."""
        from reprokit.snapshot.format import load

        snapshot = load(self.snapshot)
        folder = self.output or default_folder(self.snapshot)
        make_folder(folder, overwrite=self.overwrite or self.resume)
        try:
            reduction, was_interrupted = self._reduce(snapshot, folder)
        except (NotReproduced, Flaky) as error:
            self._print_verdict(error)
            raise
        summary = self._write(reduction, snapshot, folder)
        if self.json:
            print_json(summary)
        if self.verbosity is not Verbosity.QUIET:
            print_result(summary, folder)
        if was_interrupted:
            raise Interrupted("interrupted", hint=f"the best so far is in `{folder}`; `--resume` goes on from there")
        return 0

    def _reduce(self, snapshot: Snapshot, folder: Path) -> tuple[Reduction, bool]:
        """The reduction, and whether Ctrl-C ended it early."""
        from reprokit.shrink.reducer import shrink
        from reprokit.shrink.reduction import load

        best = folder / "reduction.pt"
        try:
            reduction = shrink(
                snapshot,
                out_dir=folder,
                level=self.level,
                max_time=self.max_time,
                jobs=self.jobs,
                resume=self.resume,
                on_event=self._view(),
            )
        except KeyboardInterrupt:
            if not best.exists():
                raise
            return load(best), True
        return reduction, False

    def _write(self, reduction: Reduction, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
        """Write all files; the contract's summary."""
        from reprokit.render import render_all

        reduction.save(folder / "reduction.pt")
        return {**reduction.summary(), "repro": render_all(reduction, snapshot, folder)}

    def _view(self) -> Callable[[object], None]:
        """A line of progress for every event, when asked for."""

        def show(event: object) -> None:
            if self.verbosity is Verbosity.VERBOSE:
                say(str(event))

        return show

    def _print_verdict(self, error: ReprokitError) -> None:
        if self.json:
            print_json({"schema": 1, "verdict": VERDICTS[type(error)], "message": error.message, "note": error.note})


@click.command("shrink", short_help="Find the smallest program that fails the same way.")
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="FILE")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results.")
@click.option("-f", "--force", is_flag=True, help="Write into DIR even if it holds something.")
@click.option(
    "--level",
    type=click.Choice(["op", "module", "step"]),
    default="op",
    show_default=True,
    help="What a piece of the result is.",
)
@click.option("--max-time", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Stop after S seconds.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Candidates to check at once.")
@click.option("--resume", is_flag=True, help="Go on from the reduction that is in DIR.")
@common_options
def command(
    snapshot: Path,
    output: Path | None,
    force: bool,
    level: str,
    max_time: float | None,
    jobs: int,
    resume: bool,
    verbosity: str | None,
    json: bool,
) -> Shrink:
    """Shrink a snapshot to the smallest program that fails the same way.

    DIR gets repro.py, issue.md, report.html, test_repro.py and reduction.pt.
    """
    return Shrink(snapshot, output, force, level, max_time, jobs, resume, json, Verbosity(verbosity or "normal"))


def default_folder(snapshot: Path) -> Path:
    """A folder in the current one with the snapshot's name: ``train-step7.repro.pt`` gives ``train-step7``."""
    stem = snapshot.name.removesuffix(".pt").removesuffix(".repro")
    return Path(stem if stem != snapshot.name else f"{stem}.shrunk")


def print_result(summary: dict[str, Any], folder: Path) -> None:
    """What was reached, as a table on stderr, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    before, repro = summary["before"], summary["repro"]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    table.add_row("torch calls", f"{before['calls']:,}", f"{summary['calls']:,}")
    table.add_row("input elements", f"{before['elements']:,}", f"{summary['elements']:,}")
    console = Console(stderr=True, highlight=False)
    console.print(table)
    verdicts = ", ".join(f"{count} {name}" for name, count in summary["verdicts"].items() if count)
    say(f"{summary['checks']} checks ({verdicts}) in {summary['seconds']:.1f} s; reproduces {summary['reproduces']}")
    if not summary["one_minimal"]:
        say("stopped early: the result may shrink further")
    say(f"{repro['lines']} lines, verified {repro['verified']} in clean processes -> {shown_path(folder)}")
    say(f"next: {shown_command('python', shown_path(Path(repro['path'])))}")
