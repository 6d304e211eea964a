"""What ``reprokit shrink`` says of a result, on stderr: sizes, checks, passes, what matters, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.capture.block import shown_path
from reprokit.cli.console import Verbosity, say, shown_command
from reprokit.grammar import read
from reprokit.render.wording import nearest_words
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, replay_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table


def print_result(summary: dict[str, Any], folder: Path, verbosity: Verbosity = Verbosity.NORMAL) -> None:
    """What was reached, on stderr: the sizes, the passes (a table with ``-v``), what matters, and what to do next."""
    from reprokit.locate.diagnosis import Diagnosis
    from reprokit.render.diagnosis_text import one_line

    _print_sizes(summary)
    verdicts = ", ".join(f"{count} {name}" for name, count in summary["verdicts"].items() if count)
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
    from reprokit.shrink.parts import Nearest

    names = summary["repro"].get("names", {})
    free = [names.get(item["input"], item["input"]) for item in summary.get("explain", ()) if item["free"]]
    if free:
        yield f"any value fails: {', '.join(free)}"
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
