"""``reprokit verify``: run a repro many times in clean processes and compare what they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from reprokit.cli.console import (
    SECONDS,
    FilePath,
    Seconds,
    Verbosity,
    common_options,
    deadline,
    print_json,
    say,
    too_long,
)


@dataclass(frozen=True, slots=True)
class Verify:
    """A repro to run, and how often; ``expect_fixed`` says that the failure should be gone."""

    path: Path
    times: int
    expect_fixed: bool
    json: bool
    verbosity: Verbosity
    max_time: float

    def execute(self) -> int:
        """Run it; 0 when all runs agree, and end well where the failure should be gone."""
        from reprokit.render.verify import verify

        with deadline(self.max_time, too_long(self.max_time)):
            result = verify(self.path, self.times)
        if self.json:
            print_json(result.summary())
        say(f"{result.agreed} of {result.times} runs agree: {result.signature}", self.verbosity)
        if self.expect_fixed and result.exit_code != 0:
            say(
                "the failure is still there" if result.fails else "this does not show whether the failure is gone",
                self.verbosity,
            )
            return 1
        return 0 if result.is_unanimous else 5


@click.command("verify", short_help="Run a repro in clean processes and compare.")
@click.argument("path", type=FilePath(), metavar="(FILE | DIR | repro.py)")
@click.option("--times", type=click.IntRange(min=1), default=20, show_default=True, help="How often to run it.")
@click.option(
    "--max-time", type=Seconds(), default=SECONDS, show_default=True, metavar="S", help="Give up after S seconds."
)
@click.option("--expect-fixed", is_flag=True, help="Exit code 1 unless the failure is gone.")
@common_options
def command(**options: Any) -> Verify:
    """Run a repro in clean processes and compare what they do.

    Exit code 0 when all runs end in the same way.
    """
    return Verify(**options)
