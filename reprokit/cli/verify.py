"""``reprokit verify``: run a repro many times in clean processes and compare what they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from reprokit.cli.console import Verbosity, common_options, print_json, say


@dataclass(frozen=True, slots=True)
class Verify:
    """A repro to run, and how often."""

    path: Path
    times: int
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Run it; 0 when all runs agree on the failure."""
        from reprokit.render.verify import verify

        result = verify(self.path, self.times)
        if self.json:
            print_json(result.summary())
        say(f"{result.agreed} of {result.times} runs agree: {result.signature}", self.verbosity)
        return 0 if result.agreed == result.times else 5


@click.command("verify", short_help="Run a repro in clean processes and compare.")
@click.argument("path", type=click.Path(path_type=Path), metavar="(FILE | repro.py)")
@click.option("--times", type=click.IntRange(min=1), default=20, show_default=True, help="How often to run it.")
@common_options
def command(path: Path, times: int, verbosity: str | None, json: bool) -> Verify:
    """Run a repro in clean processes and compare what they do.

    Exit code 0 when all runs fail in the same way.
    """
    return Verify(path, times, json, Verbosity(verbosity or "normal"))
