"""``reprokit shrink``: the smallest program that fails the same way, written as a repro, an issue text and a report."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli import console
from reprokit.errors import Flaky, GivenInput, Interrupted, NotReproduced, ReprokitError, UsageError
from reprokit.own_work import ignored_warnings
from reprokit.shrink import View
from reprokit.shrink.spec import CHECKS, EXECUTORS, check_name, open_executor, parse
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, replay_words, verdict_words

if TYPE_CHECKING:
    from reprokit.render.sources import Opened
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot
    from reprokit.snapshot.source import Source

MAX_TIME = 120.0  # as in the reducer, which imports torch
_PAUSE = 5.0  # seconds
VERDICTS = {NotReproduced: "not_reproduced", Flaky: "flaky", GivenInput: "given"}


@click.command("shrink", short_help="Find the smallest program that fails the same way.")
@click.argument("file", type=console.PATH, metavar="FILE")
@console.output_options("DIR", "Folder for the results.")
@click.option("--check", metavar="SPEC", help=f"What counts as the failure: {CHECKS}. Default: what was captured.")
@console.max_time_option(MAX_TIME, "Search for S seconds at most, after the replays.")
@click.option("--max-checks", type=click.IntRange(min=1), metavar="N", help="Stop after N checks.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Candidates to check at once. Default: 1, or what the executor runs at once.",
)
@click.option("--executor", metavar="WHERE", help=f"Where to check candidates: {EXECUTORS}. Default: here.")
@click.option("--fast", is_flag=True, help="Write the minimum and summary.md only.")
@click.option("--no-whatif", is_flag=True, help="Do not run the result in other precisions, compiled and so on.")
@console.source_option("all")
@console.no_data_option
@console.gone("--resume", "name the result to go on from: `reprokit shrink DIR/reduction.pt`", is_flag=True)
@console.gone("--level", "the result is the minimum, with the piece of the model beside it in `repro_module.py`")
@console.planned
def command(
    file: Path,
    output: Path | None,
    force: bool,
    check: str | None,
    executor: str | None,
    jobs: int | None,
    fast: bool,
    no_whatif: bool,
    source: Source,
    no_data: bool,
    json: bool,
    verbosity: console.Verbosity,
    **limits: Any,
) -> int:
    """Shrink a snapshot to the smallest program that fails the same way.

    FILE may also be a reduction.pt to go on from, with its snapshot in the folder around. DIR gets repro.py,
    summary.md, issue.md, report.html, test_repro.py, reduction.pt and, where there is such a piece, repro_module.py.
    """
    own = parse(check).file if check is not None else None
    is_result = file.name == REDUCTION_FILE or os.path.isdir(file)
    beside = file if os.path.isdir(file) else file.parent
    folder = output or (beside if is_result else default_folder(file))
    executors = open_executor(check_name(executor)) if executor is not None else contextlib.nullcontext((None, 1))
    with ignored_warnings(), executors as (pool, num_slots):  # of calls in what is tried; training printed its own
        from reprokit.render.verify import CleanProcesses

        with CleanProcesses([own] if own is not None else []) as processes:
            processes.open()  # it loads torch while this process does
            snapshot, earlier = _opened(file, check, is_result=is_result)
            name = earlier.origin.file if earlier is not None else file.name
            rendering = {"source": source, "no_data": no_data, "check": own, "processes": processes, "fast": fast}
            work = _Work(name, snapshot, folder, open_view(verbosity), rendering, json, verbosity)
            with _made_folder(folder, overwrite=force or (is_result and output is None)):
                work.run(
                    earlier=earlier,
                    out_dir=folder if not no_data else None,
                    check=check,
                    jobs=jobs or num_slots,
                    executor=pool,
                    whatif=not no_whatif,
                    fast=fast,
                    **limits,
                )
    return 0


def default_folder(snapshot: Path) -> Path:
    """A folder in the current one with the snapshot's name: ``train-step7.repro.pt`` gives ``train-step7``."""
    stem = snapshot.name.removesuffix(".pt").removesuffix(".repro")
    return Path(stem if stem != snapshot.name else f"{stem}.shrunk")


def _opened(file: Path, check: str | None, *, is_result: bool) -> tuple[Snapshot, Reduction | None]:
    """The snapshot, and the reduction that was named; raises `UsageError` unless both are there and belong."""
    from reprokit.render.sources import open_source
    from reprokit.snapshot.format import load

    if not is_result:
        return load(file), None
    opened: Opened = open_source(file)
    try:
        snapshot = opened.whole(file)
    except UsageError as error:
        error.hint = "put the snapshot into the folder around, or shrink it again"
        raise
    made_with = opened.reduction.origin.check if opened.reduction is not None else None
    if (made_with or "") != (check or ""):
        what = f"the check `{made_with}`" if made_with else "no --check"
        raise UsageError(f"`{file}` was made with {what}", hint="give the same, or shrink the snapshot again")
    return snapshot, opened.reduction


@contextlib.contextmanager
def _made_folder(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """The folder for the results; after an error it is taken away again if it was made here and is empty."""
    was_there = os.path.isdir(folder)
    console.make_folder(folder, overwrite=overwrite)
    try:
        yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # something was written
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Work:
    """A snapshot to shrink, of the file ``name``, and where its results go."""

    name: str | None
    snapshot: Snapshot
    folder: Path
    view: View
    rendering: dict[str, Any]
    json: bool
    verbosity: console.Verbosity

    def run(self, **options: Any) -> None:
        """Shrink, render and print the result; raises `NotReproduced`, `Flaky` or `Interrupted`."""
        from reprokit.shrink.reducer import SearchStopped
        from reprokit.workflow import shrink

        try:
            with console.deadline(max(options["max_time"], console.SECONDS)) as has_run:
                reduction = shrink(
                    self.snapshot, view=self.view, on_replayed=has_run, on_minimum=self._write_first, **options
                )
        except (NotReproduced, Flaky) as error:
            self._tell_failed(error)
            raise
        except SearchStopped as stop:
            self.view.say("interrupted: writing the best so far")
            with contextlib.suppress(Exception):
                self._write(stop.best)
            raise self._interrupted(stop.best) from None
        except KeyboardInterrupt:
            raise Interrupted("interrupted before anything smaller was found") from None
        self.view.say("writing the results and verifying them in clean processes")
        try:
            summary = self._write(reduction)
        except KeyboardInterrupt:
            raise self._interrupted(reduction) from None
        if self.verbosity is not console.Verbosity.QUIET:
            print_result(reduction, summary, self.folder, self.snapshot)

    def _write_first(self, reduction: Reduction) -> None:
        """Write the repro before it is verified. An error comes up again when everything is written."""
        from reprokit.render.texts import begin

        with contextlib.suppress(ReprokitError, OSError):
            options = {name: self.rendering[name] for name in ("source", "no_data", "check")}
            script = begin(reduction, self.snapshot, self.folder, self.rendering["processes"], **options)
            path = shown_path(self.folder / REPRO_FILE)
            self.view.say(f"{counted(script.num_lines, 'line')}, verification has not run yet -> {path}")

    def _write(self, reduction: Reduction) -> dict[str, Any]:
        """Write every file; print and return the contract's summary."""
        from reprokit.render.texts import render_all

        # by the name of the snapshot `render` finds it again
        reduction = replace(reduction, origin=replace(reduction.origin, file=self.name))
        written = render_all(
            reduction,
            self.snapshot,
            self.folder,
            on_reason=lambda reason: self.view.say(f"there is no repro_module.py: {reason}"),
            **self.rendering,
        )
        fidelity = {"fidelity": self.snapshot.fidelity, "fidelity_note": self.snapshot.fidelity_note}
        summary = {**reduction.summary(), **fidelity, **written}
        if self.json:
            console.print_json(summary)
        return summary

    def _tell_failed(self, error: NotReproduced | Flaky) -> None:
        given = {"input": error.input} if isinstance(error, GivenInput) else {}
        if self.json:
            said = {**given, "message": error.message, "note": error.note}
            console.print_json({"schema": 1, "verdict": VERDICTS[type(error)], **said})
        if given:
            from reprokit.render.texts import write_given

            write_given(self.snapshot, self.folder, source=self.rendering["source"])
            console.say(f"what surrounds it -> {shown_path(self.folder)}", self.verbosity)

    def _interrupted(self, best: Reduction) -> Interrupted:
        summary = best.summary()
        size = f"{counted(summary['calls'], 'call')}, {counted(summary['elements'], 'element')}"
        hint = f"`reprokit shrink {shown_path(self.folder / REDUCTION_FILE)}` goes on from there"
        return Interrupted(f"interrupted; the best so far ({size}) is in `{self.folder}`", hint=hint)


def open_view(verbosity: console.Verbosity) -> View:
    """Nothing for ``-q``, else lines."""
    pause = 0.0 if verbosity is console.Verbosity.VERBOSE else _PAUSE
    return LineView(pause) if verbosity is not console.Verbosity.QUIET else View()


class LineView(View):
    """The lines that stay, and of the others one every few seconds, which shows that work goes on."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._said = time.monotonic()

    def say(self, line: str) -> None:
        console.say(line)
        self._said = time.monotonic()

    def show(self, line: str) -> None:
        if time.monotonic() - self._said >= self._pause:
            self.say(line)


def print_result(reduction: Reduction, summary: dict[str, Any], folder: Path, snapshot: Snapshot) -> None:
    """What was reached, on stderr: the sizes, the cause, and what to do next."""
    from reprokit.render.expectation import retry

    repro = summary["repro"]
    for line in (*_sizes(reduction, summary), *_completeness(reduction), *reduction.notes):
        console.say(line)
    for line in (*_findings(reduction, summary, snapshot), *_places(reduction, summary, folder)):
        console.say(line)
    if words := retry(snapshot, reduction):
        console.say(words)
    if repro is not None:
        console.say(f"next: {shlex.join(['python', shown_path(Path(repro['path']))])}")


def _sizes(reduction: Reduction, summary: dict[str, Any]) -> Iterator[str]:
    if summary["repro"] is None:
        return
    before = reduction.before
    calls, elements = counted(summary["calls"], "torch call"), counted(summary["elements"], "input element")
    yield f"{calls} of {before.calls:,}, {elements} of {before.elements:,}"
    checks, seconds = counted(reduction.checks, "check"), reduction.seconds
    yield f"{checks} ({verdict_words(reduction.verdicts)}) in {seconds:.1f} s; reproduces {reduction.reproduces}"


def _completeness(reduction: Reduction) -> Iterator[str]:
    if reduction.stopped:
        why = f" by --{reduction.stopped}" if reduction.stopped in ("max-time", "max-checks") else ""
        yield f"stopped early{why}: the result may shrink further"
    elif not (reduction.one_minimal or reduction.no_repro):
        yield "search incomplete: the result may shrink further"


def _findings(reduction: Reduction, summary: dict[str, Any], snapshot: Snapshot) -> Iterator[str]:
    from reprokit.render.findings import one_line

    found, cause = reduction.diagnosis, snapshot.cause
    if cause is not None and (found is None or not cause.text.startswith(found.title)):  # the rule says the same
        yield f"cause: {redact_text(cause.text)}"
    if found is not None and (found.is_known or cause is None):
        yield f"diagnosis: {one_line(found, cause)}"
    if doubt := replay_words(summary.get("fidelity", "exact"), summary.get("fidelity_note")):
        yield f"note that {redact_text(doubt)}"


def _places(reduction: Reduction, summary: dict[str, Any], folder: Path) -> Iterator[str]:
    """Where the results are."""
    repro, context = summary["repro"], summary["context"]
    if repro is None:
        yield f"there is no repro.py: {reduction.no_repro}"
    else:
        lines = counted(repro["lines"], "line")
        yield f"{lines}, verified {repro['verified']} in clean processes -> {shown_path(folder)}"
    if context:
        words = f"{context['lines']} lines, verified {context['verified']}"
        yield f"the piece of the model it comes from: {words} -> {shown_path(Path(context['path']))}"
    if (folder / "issue.md").is_file():
        yield f"to read: {shown_path(folder / 'report.html')}; to post: {shown_path(folder / 'issue.md')}"
    else:
        yield f"to read: {shown_path(folder / 'summary.md')}"
