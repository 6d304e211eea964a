"""``reprokit shrink``: the smallest program that fails the same way, written as a repro, an issue text and a report."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli.console import (
    FilePath,
    Verbosity,
    common_options,
    deadline,
    gone,
    make_folder,
    max_time_option,
    print_json,
    remove_unfinished,
    say,
    shown_command,
    too_long,
)
from reprokit.errors import Flaky, GivenInput, Interrupted, NotReproduced, ReprokitError, UsageError
from reprokit.render.wording import listed, nearest_words
from reprokit.shrink import View
from reprokit.shrink.spec import CHECKS, EXECUTORS, Spec, check_name, open_executor, parse
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE
from reprokit.snapshot.redact import redact_text
from reprokit.snapshot.source import SOURCES
from reprokit.words import counted, replay_words, verdict_words, visible_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Executor

    from rich.console import Console

    from reprokit.render.sources import Opened
    from reprokit.render.verify import CleanProcesses
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.source import Source as SourcePolicy

MAX_TIME = 120.0  # as in the reducer, which imports torch
FIRST_SECONDS = 900.0  # for the first run of the step; the others get limits that follow from it
VERDICTS = {NotReproduced: "not_reproduced", Flaky: "flaky", GivenInput: "given"}


@dataclass(frozen=True, slots=True)
class Shrink:
    """A snapshot to shrink, or a reduction to go on from, where to write, and how much work to spend."""

    file: Path
    output: Path | None
    force: bool
    max_time: float
    max_checks: int | None
    jobs: int | None
    executor: str | None
    json: bool
    verbosity: Verbosity
    check: Spec | None
    no_whatif: bool
    source: SourcePolicy
    no_data: bool

    @property
    def is_result(self) -> bool:
        """True for a reduction, or a folder with one, to go on from."""
        return self.file.name == REDUCTION_FILE or os.path.isdir(self.file)

    @property
    def folder(self) -> Path:
        """Where the results go: of a reduction, those that lie beside it are replaced."""
        beside = self.file if os.path.isdir(self.file) else self.file.parent
        return self.output or (beside if self.is_result else default_folder(self.file))

    def execute(self) -> int:
        """Shrink, render and print the result; raises `NotReproduced`, `Flaky` or `Interrupted`."""
        executors = open_executor(self.executor) if self.executor is not None else contextlib.nullcontext((None, 1))
        with warnings.catch_warnings(), executors as (executor, num_slots):
            warnings.simplefilter("ignore")  # of calls in what is tried and rendered; training printed its own
            from reprokit.render.verify import CleanProcesses

            file = self.check.file if self.check is not None else None
            with CleanProcesses([file] if file is not None else []) as processes:
                processes.open()  # it loads torch while this process does
                opened = self._opened()
                with self._made_folder(), contextlib.closing(open_view(self.verbosity)) as view:
                    try:
                        return self._run(opened, view, processes, executor, num_slots)
                    except (NotReproduced, Flaky) as error:
                        if self.json:
                            given = {"input": error.input} if isinstance(error, GivenInput) else {}
                            said = {**given, "message": error.message, "note": error.note}
                            print_json({"schema": 1, "verdict": VERDICTS[type(error)], **said})
                        if isinstance(error, GivenInput) and opened.snapshot is not None:
                            from reprokit.render.texts import write_given

                            write_given(opened.snapshot, self.folder, source=self.source)
                            say(f"what surrounds it -> {shown_path(self.folder)}", self.verbosity)
                        raise

    def _opened(self) -> Opened:
        """The snapshot, and the reduction that was named; raises `UsageError` unless both are there and belong."""
        from reprokit.render.sources import Opened, open_source
        from reprokit.snapshot.format import load

        if not self.is_result:
            return Opened(None, load(self.file))
        opened = open_source(self.file)
        try:
            opened.whole(self.file)
        except UsageError as error:
            error.hint = "put the snapshot into the folder around, or shrink it again"
            raise
        made_with = (opened.reduction.origin.check or "") if opened.reduction is not None else ""
        if made_with != (self.check.text if self.check is not None else ""):
            what = f"the check `{made_with}`" if made_with else "no --check"
            raise UsageError(f"`{self.file}` was made with {what}", hint="give the same, or shrink the snapshot again")
        return opened

    @contextlib.contextmanager
    def _made_folder(self) -> Iterator[None]:
        """The folder for the results; after an error what of its path was made here is taken away again if empty."""
        missing = [folder for folder in (self.folder, *self.folder.parents) if not os.path.exists(folder)]
        remove_unfinished(self.folder)
        make_folder(self.folder, overwrite=self.force or (self.is_result and self.output is None))
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # something was written
                for folder in missing:
                    folder.rmdir()
            raise

    def _run(
        self, opened: Opened, view: View, processes: CleanProcesses, executor: Executor | None, num_slots: int
    ) -> int:
        from reprokit.shrink.reducer import SearchStopped
        from reprokit.workflow import shrink

        assert opened.snapshot is not None
        snapshot, most = opened.snapshot, max(self.max_time, FIRST_SECONDS)

        def begin(reduction: Reduction) -> None:
            """Write the repro before it is verified. An error comes up again when everything is written."""
            from reprokit.render.texts import begin

            with contextlib.suppress(ReprokitError, OSError):
                script = begin(reduction, snapshot, self.folder, processes, **self._rendering())
                path = shown_path(self.folder / REPRO_FILE)
                view.say(f"{counted(script.num_lines, 'line')}, verification has not run yet -> {path}")

        try:
            with deadline(most, too_long(most)) as has_run:
                reduction = shrink(
                    snapshot,
                    earlier=opened.reduction,
                    out_dir=self.folder if not self.no_data else None,
                    max_time=self.max_time,
                    max_checks=self.max_checks,
                    check=self.check.text if self.check is not None else None,
                    jobs=self.jobs or num_slots,
                    executor=executor,
                    whatif=not self.no_whatif,
                    view=view,
                    on_replayed=has_run,
                    on_minimum=begin,
                )
        except SearchStopped as stop:
            self._write_interrupted(stop.best, opened, view, processes)
        except KeyboardInterrupt:
            raise Interrupted("interrupted before anything smaller was found") from None
        view.say("writing the results and verifying them in clean processes")
        try:
            summary = self._write(reduction, opened, view, processes)
        except KeyboardInterrupt:
            raise self._interrupted(reduction) from None
        view.close()
        if self.json:
            print_json(summary)
        if self.verbosity is not Verbosity.QUIET:
            print_result(reduction, summary, self.folder)
        return 0

    def _write_interrupted(self, best: Reduction, opened: Opened, view: View, processes: CleanProcesses) -> NoReturn:
        view.say("interrupted: writing the best so far; Ctrl-C again ends at once")
        try:
            summary = self._write(best, opened, view, processes)
        except Exception as error:
            raise self._interrupted(best) from error
        if self.json:
            print_json(summary)
        raise self._interrupted(best)

    def _write(self, reduction: Reduction, opened: Opened, view: View, processes: CleanProcesses) -> dict[str, Any]:
        """Write every file; the contract's summary."""
        from reprokit.render.texts import render_all

        def show_reason(reason: str) -> None:
            view.say(f"there is no repro_module.py: {reason}")

        snapshot = opened.snapshot
        assert snapshot is not None
        earlier = opened.reduction  # by the name of the snapshot `render` finds it again
        file = earlier.origin.file if earlier is not None else self.file.name
        reduction = replace(reduction, origin=replace(reduction.origin, file=file))
        written = render_all(
            reduction, snapshot, self.folder, on_reason=show_reason, processes=processes, **self._rendering()
        )
        fidelity = {"fidelity": snapshot.fidelity, "fidelity_note": snapshot.fidelity_note}
        return {**reduction.summary(), **fidelity, **written}

    def _rendering(self) -> dict[str, Any]:
        check = self.check.file if self.check is not None else None
        return {"source": self.source, "no_data": self.no_data, "check": check}

    def _interrupted(self, best: Reduction) -> Interrupted:
        summary = best.summary()
        size = f"{counted(summary['calls'], 'call')}, {counted(summary['elements'], 'element')}"
        hint = f"`reprokit shrink {shown_path(self.folder / REDUCTION_FILE)}` goes on from there"
        return Interrupted(f"interrupted; the best so far ({size}) is in `{self.folder}`", hint=hint)


@click.command("shrink", short_help="Find the smallest program that fails the same way.")
@click.argument("file", type=FilePath(), metavar="FILE")
@click.option("-o", "--output", type=FilePath(), metavar="DIR", help="Folder for the results.")
@click.option("-f", "--force", is_flag=True, help="Write into DIR even if it holds something.")
@click.option("--check", metavar="SPEC", help=f"What counts as the failure: {CHECKS}. Default: what was captured.")
@max_time_option(MAX_TIME, "Search for S seconds at most, after the replays.")
@click.option("--max-checks", type=click.IntRange(min=1), metavar="N", help="Stop after N checks.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Candidates to check at once. Default: 1, or what the executor runs at once.",
)
@click.option("--executor", metavar="WHERE", help=f"Where to check candidates: {EXECUTORS}. Default: here.")
@click.option("--no-whatif", is_flag=True, help="Do not run the result in other precisions, compiled and so on.")
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    default="all",
    help="How much of your code the texts show: the lines that a traceback shows, none, or all that was captured.",
)
@click.option("--no-data", is_flag=True, help="Write nothing that holds recorded numbers.")
@gone("--resume", "name the result to go on from: `reprokit shrink DIR/reduction.pt`", is_flag=True)
@gone("--level", "the result is the minimum, with the piece of the model beside it in `repro_module.py`")
@gone("--progress", "-q prints errors only, -v prints every check, --json prints the result")
@common_options
def command(check: str | None, executor: str | None, **options: Any) -> Shrink:
    """Shrink a snapshot to the smallest program that fails the same way.

    FILE may also be a reduction.pt to go on from, with its snapshot in the folder around. DIR gets repro.py, issue.md,
    report.html, test_repro.py, reduction.pt and, where there is such a piece, repro_module.py.
    """
    executor = check_name(executor) if executor is not None else None
    return Shrink(check=parse(check) if check is not None else None, executor=executor, **options)


def default_folder(snapshot: Path) -> Path:
    """A folder in the current one with the snapshot's name: ``train-step7.repro.pt`` gives ``train-step7``."""
    stem = snapshot.name.removesuffix(".pt").removesuffix(".repro")
    return Path(stem if stem != snapshot.name else f"{stem}.shrunk")


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
        say(line)
        self._said = time.monotonic()

    def show(self, line: str) -> None:
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
        self._live.console.print(f"reprokit: {visible_line(line)}", markup=False, soft_wrap=True)

    def show(self, line: str) -> None:
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
    from reprokit.render.findings import one_line

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
