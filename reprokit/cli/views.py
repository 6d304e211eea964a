"""Views of a reduction or a what-if table while it runs: a live display, plain lines, JSON lines, or nothing.

All show the same events, on stderr. `Progress` adds the events up, and is all that the live display knows.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import click

from reprokit.cli.console import Verbosity, say
from reprokit.shrink.events import (
    Checked,
    Compared,
    Comparing,
    ContextChecked,
    ContextStarted,
    Event,
    Finished,
    Improved,
    PassEnded,
    PassStarted,
    Replayed,
    Resumed,
    Started,
    Varied,
    Writing,
    Written,
    as_plain,
    place_of,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CHOICES = ("auto", "live", "plain", "json", "none")
_ALWAYS_SAID = (Started, Replayed, Resumed, Comparing, Compared, Writing, Written)
_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BETWEEN_LINES = 5.0
_BAR_WIDTH = 32


progress_option = click.option(
    "--progress",
    type=click.Choice(CHOICES),
    default="auto",
    show_default=True,
    help="How to show the work on stderr; auto is live on a terminal, plain lines elsewhere.",
)


class View(Protocol):
    """Shows events."""

    def show(self, event: Event) -> None:
        """Show one event."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_view(choice: str, verbosity: Verbosity) -> View:
    """The view that was asked for; ``auto`` is live on a terminal, plain elsewhere and for ``-v``, none for ``-q``."""
    is_verbose = verbosity is Verbosity.VERBOSE
    if choice == "auto":
        choice = "none" if verbosity is Verbosity.QUIET else "plain" if is_verbose else "live"
    if choice == "live":
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        if console.is_terminal and not console.is_dumb_terminal:
            return LiveView(console)
    if choice == "none":
        return QuietView()
    return JsonLinesView() if choice == "json" else PlainView(is_verbose)


@dataclass
class Progress:
    """Where a reduction stands."""

    calls_before: int = 0
    elements_before: int = 0
    calls: int = 0
    elements: int = 0
    checks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    activity: str = "replay"
    max_time: float | None = None
    max_checks: int | None = None

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, Started):
            self.calls_before, self.elements_before = event.calls, event.elements
            self.max_time, self.max_checks = event.max_time, event.max_checks
        if isinstance(event, (Started, Resumed, Improved, PassStarted, Finished)):
            self.calls, self.elements = event.calls, event.elements
        if isinstance(event, Checked):
            self.checks += 1
            self.verdicts[event.verdict] += 1
        elif isinstance(event, Varied):
            self.checks += 1
            self.activity = "explain"
        elif isinstance(event, (ContextStarted, ContextChecked)):
            self.activity = "context"
        elif isinstance(event, PassStarted):
            self.activity = place_of(event)
        elif isinstance(event, (Comparing, Compared, Writing)):
            self.activity = str(event)

    def spent(self, seconds: float) -> float | None:
        """The part of the budget that is used up, from 0 to 1; ``None`` without a budget."""
        parts = [seconds / self.max_time] if self.max_time is not None else []
        parts += [self.checks / self.max_checks] if self.max_checks is not None else []
        return min(1.0, max(parts)) if parts else None


class QuietView:
    """Shows nothing."""

    def show(self, event: Event) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing of the terminal was taken."""


class JsonLinesView:
    """One JSON object a line for every event."""

    def show(self, event: Event) -> None:
        """Print the event."""
        print(json.dumps(as_plain(event)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing of the terminal was taken."""


class PlainView:
    """One line for what matters and every few seconds, or for every event."""

    def __init__(self, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._said = time.monotonic()

    def show(self, event: Event) -> None:
        """Say the event."""
        has_changed = isinstance(event, PassEnded) and (event.successes > 0 or event.is_over)
        is_due = time.monotonic() - self._said > _SECONDS_BETWEEN_LINES
        if self._is_verbose or has_changed or is_due or isinstance(event, _ALWAYS_SAID):
            say(str(event))
            self._said = time.monotonic()

    def close(self) -> None:
        """Nothing of the terminal was taken."""


class LiveView:
    """A few lines that are drawn over and over: what is left, checks by verdict, the pass, the budget."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._progress = Progress()
        self._started = self._drawn = time.monotonic()
        # No thread of its own: it would be in the way of candidates that run in forked processes.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def close(self) -> None:
        """Take the lines away and show the cursor again."""
        self._live.stop()

    def show(self, event: Event) -> None:
        """Draw, unless the last frame is fresh and this is one check among many."""
        self._progress.take(event)
        if isinstance(event, Written):
            self._live.console.print(f"reprokit: {event}", markup=False, soft_wrap=True)
        now = time.monotonic()
        if isinstance(event, (Checked, ContextChecked, Varied)) and now - self._drawn < _SECONDS_BETWEEN_FRAMES:
            return
        self._drawn = now
        self._live.update(draw(self._progress, now - self._started), refresh=True)


def draw(progress: Progress, seconds: float) -> Table:
    """One frame."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("calls left", f"{progress.calls:,} of {progress.calls_before:,}")
    table.add_row("elements left", f"{progress.elements:,} of {progress.elements_before:,}")
    verdicts = ", ".join(f"{count:,} {name}" for name, count in progress.verdicts.items())
    if progress.checks:
        table.add_row("checks", f"{progress.checks:,}" + (f" ({verdicts})" if verdicts else ""))
    table.add_row("now", progress.activity)
    spent = progress.spent(seconds)
    clock = f"{int(seconds) // 60}:{int(seconds) % 60:02}"
    table.add_row("time", clock if spent is None else f"{clock}   budget {_bar(spent)} {spent:.0%}")
    return table


def _bar(part: float) -> str:
    full = round(part * _BAR_WIDTH)
    return "━" * full + "╌" * (_BAR_WIDTH - full)
