"""What a person sees of a reduction or a what-if table: while it runs (live, plain or JSON lines), and its result.

All views show the same events, on stderr. `ShrinkProgress` adds the events up, and is all that the live display knows.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.block import shown_path
from reprokit.cli.console import Verbosity, say, shown_command
from reprokit.grammar import read
from reprokit.render.wording import listed, nearest_words
from reprokit.shrink import events
from reprokit.shrink.events import Event
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, replay_words, verdict_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table


CHOICES = ("auto", "live", "plain", "json", "none")
_ALWAYS_SAID = (
    events.Started,
    events.Replayed,
    events.Resumed,
    events.ExecutorLost,
    events.Comparing,
    events.Compared,
    events.Writing,
    events.Written,
)
_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BETWEEN_LINES = 5.0  # a log shows that work goes on
_BAR_WIDTH = 32
progress_option = click.option(
    "--progress",
    type=click.Choice(CHOICES),
    default="auto",
    show_default=True,
    help="How to show the work on stderr; auto is live on a terminal, plain lines elsewhere.",
)


class View:
    """Shows events; this one shows none."""

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
        return View()
    return JsonLinesView() if choice == "json" else PlainView(is_verbose)


@dataclass
class ShrinkProgress:
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
        if isinstance(event, events.Started):
            self.calls_before, self.elements_before = event.calls, event.elements
            self.max_time, self.max_checks = event.max_time, event.max_checks
        if isinstance(event, (events.Started, events.Resumed, events.Improved, events.PassStarted, events.Finished)):
            self.calls, self.elements = event.calls, event.elements
        if isinstance(event, events.Checked):
            self.checks += 1
            self.verdicts[event.verdict] += 1
        elif isinstance(event, events.Varied):
            self.checks += 1
            self.activity = "explain"
        elif isinstance(event, (events.ContextStarted, events.ContextChecked)):
            self.activity = "context"
        elif isinstance(event, events.PassStarted):
            self.activity = events.place_of(event)
        elif isinstance(event, (events.Comparing, events.Compared, events.Writing)):
            self.activity = str(event)

    def spent(self, seconds: float) -> float | None:
        """The part of the budget that is used up, from 0 to 1; ``None`` without a budget."""
        parts = [seconds / self.max_time] if self.max_time is not None else []
        parts += [self.checks / self.max_checks] if self.max_checks is not None else []
        return min(1.0, max(parts)) if parts else None


class JsonLinesView(View):
    """One JSON object a line for every event."""

    def show(self, event: Event) -> None:
        """Print the event."""
        print(json.dumps(events.as_plain(event)), file=sys.stderr, flush=True)


class PlainView(View):
    """One line for what matters and every few seconds, or for every event."""

    def __init__(self, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._said = time.monotonic()

    def show(self, event: Event) -> None:
        """Say the event."""
        has_changed = isinstance(event, events.PassEnded) and (event.successes > 0 or event.is_over)
        is_due = time.monotonic() - self._said > _SECONDS_BETWEEN_LINES
        if self._is_verbose or has_changed or is_due or isinstance(event, _ALWAYS_SAID):
            say(str(event))
            self._said = time.monotonic()


class LiveView(View):
    """A few lines that are drawn over and over: what is left, checks by verdict, the pass, the budget."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._progress = ShrinkProgress()
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
        if isinstance(event, (events.Written, events.ExecutorLost)):
            self._live.console.print(f"reprokit: {event}", markup=False, soft_wrap=True)
        now = time.monotonic()
        if (
            isinstance(event, (events.Checked, events.ContextChecked, events.Varied))
            and now - self._drawn < _SECONDS_BETWEEN_FRAMES
        ):
            return
        self._drawn = now
        self._live.update(draw(self._progress, now - self._started), refresh=True)


def draw(progress: ShrinkProgress, seconds: float) -> Table:
    """One frame."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("calls left", f"{progress.calls:,} of {progress.calls_before:,}")
    table.add_row("elements left", f"{progress.elements:,} of {progress.elements_before:,}")
    verdicts = verdict_words(progress.verdicts)
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


def print_result(summary: dict[str, Any], folder: Path, verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """What was reached, on stderr: the sizes, the passes (a table with ``-v``), what matters, and what to do next."""
    from reprokit.locate.diagnosis import Diagnosis
    from reprokit.render.diagnosis_text import one_line

    _print_sizes(summary)
    verdicts = verdict_words(summary["verdicts"])
    checks, seconds = counted(summary["checks"], "check"), summary["seconds"]
    say(f"{checks} ({verdicts}) in {seconds:.1f} s; reproduces {summary['reproduces']}")
    if verbosity is Verbosity.VERBOSE:
        _print_passes(summary)
    elif removed := _removed(summary):
        say(f"removed by {removed}")
    for line in (*_stopped(summary), *summary.get("notes", ()), *_matters(summary)):
        say(line)
    if summary.get("diagnosis"):
        say(f"diagnosis: {one_line(read(Diagnosis, summary['diagnosis']))}")
    doubt = replay_words(summary.get("fidelity", "exact"), summary.get("fidelity_note"))
    if doubt:
        say(f"note that {redact_text(doubt)}")
    repro = summary["repro"]
    say(f"{counted(repro['lines'], 'line')}, verified {repro['verified']} in clean processes -> {shown_path(folder)}")
    context = summary.get("context")
    if context:
        words = f"{context['lines']} lines, verified {context['verified']}"
        say(f"the piece of the model it comes from: {words} -> {shown_path(Path(context['path']))}")
    say(f"to read: {shown_path(folder / 'report.html')}; to post: {shown_path(folder / 'issue.md')}")
    say(f"next: {shown_command('python', shown_path(Path(repro['path'])))}")


def _stopped(summary: dict[str, Any]) -> Iterator[str]:
    """A line if the search ended early or may be incomplete, with the parts that it left out."""
    if summary.get("stopped"):
        why = f" by --{summary['stopped']}" if summary["stopped"] in ("max-time", "max-checks") else ""
        yield f"stopped early{why}: the result may shrink further"
    elif not summary["one_minimal"] and summary.get("level", "op") == "op":  # other levels keep what could go
        yield "search incomplete: the result may shrink further"
    if summary.get("untried"):
        yield f"search incomplete in: {', '.join(summary['untried'])}"


def _matters(summary: dict[str, Any]) -> Iterator[str]:
    """Which inputs are free, and the nearest variant that passes."""
    from reprokit.shrink.explain import Nearest

    names = summary["repro"].get("names", {})
    free = [names.get(item["input"], item["input"]) for item in summary.get("explain", ()) if item["free"]]
    if free:
        yield f"fails with every value that was tried for {listed(free)}"
    if summary.get("nearest"):
        new, old = nearest_words(read(Nearest, summary["nearest"]), names)
        yield f"passes with {new} instead of {old}"


def _removed(summary: dict[str, Any]) -> str:
    """What each pass took away, in a few words; what a part of the step reads may be more than the step did."""
    words = []
    for row in summary.get("passes", ()):
        numbers = {unit: row[f"{unit}s"] for unit in ("call", "element")}
        taken = [counted(number, unit) for unit, number in numbers.items() if number > 0]
        given = [counted(-number, unit) for unit, number in numbers.items() if number < 0]
        added = f"({' and '.join(given)} added)" if given else ""
        if taken or added:
            words.append(f"{row['name']}: {' '.join(filter(None, (' and '.join(taken), added)))}")
    return "; ".join(words)


def _print_sizes(summary: dict[str, Any]) -> None:
    from rich.table import Table

    before = summary["before"]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    table.add_row("torch calls", f"{before['calls']:,}", f"{summary['calls']:,}")
    table.add_row("input elements", f"{before['elements']:,}", f"{summary['elements']:,}")
    _print_table(table)


def _print_passes(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("pass")
    for name in ("checks", "kept", "calls removed", "elements removed", "seconds"):
        table.add_column(name, justify="right")
    for row in summary.get("passes", ()):
        numbers = (row["checks"], row["successes"], row["calls"], row["elements"])
        table.add_row(row["name"], *(f"{number:,}" for number in numbers), f"{row['seconds']:.2f}")
    _print_table(table)


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(table)
