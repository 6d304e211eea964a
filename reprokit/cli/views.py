"""What a person sees of a reduction or a what-if table: its progress and its result, all on stderr."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.capture.block import shown_path
from reprokit.cli.console import Verbosity, say, shown_command
from reprokit.render.wording import listed, nearest_words
from reprokit.shrink.view import View
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, replay_words, verdict_words, visible_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from reprokit.shrink.reduction import Reduction

_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BETWEEN_LINES = 5.0  # a log shows that work goes on


def open_view(verbosity: Verbosity) -> View:
    """A line drawn over and over on a terminal, plain lines elsewhere and for ``-v``, nothing for ``-q``."""
    if verbosity is Verbosity.QUIET:
        return View()
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    is_live = console.is_terminal and not console.is_dumb_terminal and verbosity is Verbosity.NORMAL
    return LiveView(console) if is_live else PlainView(verbosity is Verbosity.VERBOSE)


class PlainView(View):
    """The lines that stay; the others every few seconds, or all of them."""

    def __init__(self, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._said = time.monotonic()

    def say(self, line: str) -> None:
        """Print the line."""
        say(line)
        self._said = time.monotonic()

    def show(self, line: str) -> None:
        """Print the line if one is due."""
        if self._is_verbose or time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self.say(line)


class LiveView(View):
    """The lines that stay, and below them the time and the latest of the others."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._started = self._drawn = time.monotonic()
        # No thread of its own: it would be in the way of candidates that run in forked processes.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def say(self, line: str) -> None:
        """Print the line above."""
        self._live.console.print(f"reprokit: {visible_line(line)}", markup=False, soft_wrap=True)

    def show(self, line: str) -> None:
        """Draw the line, unless the last one is fresh."""
        from rich.text import Text

        now = time.monotonic()
        if now - self._drawn >= _SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            seconds = int(now - self._started)
            self._live.update(Text(f"{seconds // 60}:{seconds % 60:02} {visible_line(line)}"), refresh=True)

    def close(self) -> None:
        """Take the line away and show the cursor again."""
        self._live.stop()


def print_result(reduction: Reduction, summary: dict[str, Any], folder: Path) -> None:
    """What was reached, on stderr: the sizes, what matters, and what to do next."""
    from reprokit.render.diagnosis_text import one_line

    before, repro, context = reduction.before, summary["repro"], summary["context"]
    if repro is not None:
        for words, was, now in (
            ("", "before", "after"),
            ("torch calls", f"{before.calls:,}", f"{summary['calls']:,}"),
            ("input elements", f"{before.elements:,}", f"{summary['elements']:,}"),
        ):
            say(f"{words:<14}{was:>12}{now:>9}")
        checks, seconds = counted(reduction.checks, "check"), reduction.seconds
        say(f"{checks} ({verdict_words(reduction.verdicts)}) in {seconds:.1f} s; reproduces {reduction.reproduces}")
    names = repro["names"] if repro is not None else {}
    for line in (*_stopped(reduction), *reduction.notes, *_matters(reduction, names)):
        say(line)
    if reduction.diagnosis is not None:
        say(f"diagnosis: {one_line(reduction.diagnosis)}")
    doubt = replay_words(summary.get("fidelity", "exact"), summary.get("fidelity_note"))
    if doubt:
        say(f"note that {redact_text(doubt)}")
    if repro is not None:
        lines = counted(repro["lines"], "line")
        say(f"{lines}, verified {repro['verified']} in clean processes -> {shown_path(folder)}")
    else:
        say(f"there is no repro.py: {reduction.no_repro}")
    if context:
        words = f"{context['lines']} lines, verified {context['verified']}"
        say(f"the piece of the model it comes from: {words} -> {shown_path(Path(context['path']))}")
    say(f"to read: {shown_path(folder / 'report.html')}; to post: {shown_path(folder / 'issue.md')}")
    if repro is not None:
        say(f"next: {shown_command('python', shown_path(Path(repro['path'])))}")


def _stopped(reduction: Reduction) -> Iterator[str]:
    """A line if the search ended early or may be incomplete."""
    if reduction.stopped:
        why = f" by --{reduction.stopped}" if reduction.stopped in ("max-time", "max-checks") else ""
        yield f"stopped early{why}: the result may shrink further"
    elif not (reduction.one_minimal or reduction.no_repro):
        yield "search incomplete: the result may shrink further"


def _matters(reduction: Reduction, names: Mapping[str, str]) -> Iterator[str]:
    """Which inputs are free, and the nearest variant that passes."""
    free = [names.get(item.input, item.input) for item in reduction.explain if item.free and item.input]
    if free:
        yield f"fails with every value that was tried for {listed(free)}"
    if reduction.nearest is not None:
        new, old = nearest_words(reduction.nearest, names)
        yield f"passes with {new} instead of {old}"
