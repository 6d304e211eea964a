"""``reprokit trace``: forward and backward frames of chosen steps of a script, or of the step that a snapshot holds.

A script runs as Python would run it, and ends with the same bits. Rows leave the process when their step is over.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import print_exception
from typing import IO, TYPE_CHECKING, Literal

import click

from reprokit.capture import launch
from reprokit.capture.options import rank_suffix, with_part
from reprokit.cli.console import (
    FilePath,
    Verbosity,
    check_file,
    common_options,
    deadline,
    max_time_option,
    say,
    too_long,
)
from reprokit.errors import UsageError
from reprokit.words import counted

if TYPE_CHECKING:
    from reprokit.locate.ranges import FrameRow
    from reprokit.measure import FrameRecorder

Format = Literal["table", "jsonl", "csv", "html"]
MOST_NAMES = 6  # in one line
FORMATS: tuple[Format, ...] = ("table", "jsonl", "csv", "html")


@dataclass(slots=True)
class Output:
    """Where rows go: to a file, else the table to stderr and anything else to stdout.

    What a script itself prints goes to stderr where its stdout would be mixed with rows.
    """

    to: Format
    path: Path | None
    title: str
    histograms: bool = False
    num_rows: int = 0
    _file: IO[str] | None = None
    _waiting: list[FrameRow] = field(default_factory=list)

    @contextlib.contextmanager
    def opened(self, *, is_shared: bool) -> Iterator[None]:
        """The output while rows are written; ``is_shared`` if a script prints to this process's stdout."""
        with contextlib.ExitStack() as stack:
            if self.path is not None:
                self._file = stack.enter_context(self.path.open("w", encoding="utf-8", newline=""))
            elif self.to != "table":
                self._file = stack.enter_context(_own_stdout() if is_shared else contextlib.nullcontext(sys.stdout))
            try:
                yield
            finally:
                if self.to == "html" and self._file is not None:
                    from reprokit.render.templates import render_template

                    shown = {"title": self.title, "rows": self._waiting, "histograms": self.histograms}
                    self._file.write(render_template("trace.html.j2", **shown))
                    self._file.flush()

    def write(self, rows: list[FrameRow]) -> None:
        """Print rows; a page is written at the end."""
        from reprokit.locate.ranges import csv_lines, json_lines

        if self.to == "html":
            self._waiting += rows
        elif self.to == "table":
            self._print_table(rows)
        elif self._file is not None:
            header = {"has_header": self.num_rows == 0, "histograms": self.histograms}
            self._file.write(json_lines(rows) if self.to == "jsonl" else csv_lines(rows, **header))
            self._file.flush()
        self.num_rows += len(rows)

    def _print_table(self, rows: list[FrameRow]) -> None:
        from rich.console import Console

        from reprokit.locate.ranges import table

        if rows:
            console = Console(file=self._file, stderr=self._file is None, highlight=False)
            console.print(table(rows, console.width))
            console.print()


@contextlib.contextmanager
def _own_stdout() -> Iterator[IO[str]]:
    """The process's stdout, to which nobody else writes from now on: file descriptor 1 leads to stderr."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8", newline="") as file:
        os.dup2(2, 1)
        yield file


@dataclass(frozen=True, slots=True)
class TraceScript:
    """A script or module to run with some of its steps measured."""

    target: str
    is_module: bool
    argv: tuple[str, ...]
    steps: frozenset[int]
    stop_after: int | None
    module: str | None
    output: Output
    verbosity: Verbosity

    def execute(self) -> int:
        if not self.is_module:
            launch.read_script(self.target)
        tracers: list[FrameRecorder] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(launch.hide_own_frames())
            stack.enter_context(self.output.opened(is_shared=True))
            stack.callback(self._tell, tracers)
            stack.callback(launch.when_imported("torch", lambda: self._start(stack, tracers)))
            run = launch.run_module if self.is_module else launch.run_script
            run(self.target, self.argv)
        return 0

    def _start(self, stack: contextlib.ExitStack, tracers: list[FrameRecorder]) -> None:
        from reprokit.measure import FrameRecorder

        tracer = FrameRecorder(
            self.steps,
            self.output.write,
            self._complain,
            pattern=self.module,
            stop_after=self.stop_after,
            histograms=self.output.histograms,
        )
        tracers.append(tracer)
        stack.callback(tracer.remove)
        tracer.install()

    def _complain(self, error: BaseException) -> None:
        say(f"no more steps are measured after an error of its own ({type(error).__name__}: {error})")
        if self.verbosity is Verbosity.VERBOSE:
            print_exception(error)

    def _tell(self, tracers: list[FrameRecorder]) -> None:
        if self.output.num_rows:
            rows = counted(self.output.num_rows, "row")
            place = f" -> {self.output.path}" if self.output.path is not None else ""
            say(f"{rows}{place}", self.verbosity)
            names = sorted(tracers[0].without_gradient or ())
            if names:
                more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
                shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
                say(f"no gradient in the chosen steps: {shown}{more}", self.verbosity)
        elif not tracers:
            say("no rows: the script did not import torch")
        else:
            steps = counted(tracers[0].num_steps, "step")
            matching = f" that matches `{self.module}`" if self.module is not None else ""
            say(f"no rows: no module{matching} was called in the chosen steps; an optimizer's step ended {steps}")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A snapshot whose program is run with measuring."""

    snapshot: Path
    module: str | None
    output: Output
    max_time: float
    verbosity: Verbosity

    def execute(self) -> int:
        from reprokit.render.module_ranges import recorded_rows
        from reprokit.snapshot.format import load

        snapshot = load(self.snapshot)
        with deadline(self.max_time, too_long(self.max_time, f"--max-time {2 * self.max_time:g} waits longer")):
            rows = recorded_rows(snapshot, self.module, histograms=self.output.histograms)
        with self.output.opened(is_shared=False):
            self.output.write(rows)
        if not rows:
            matching = f" matches `{self.module}`" if self.module is not None else " was called in this step"
            say(f"no rows: no module{matching}", self.verbosity)
        return 0


class _Command(click.Command):
    """Takes its options before the script, or behind the script's own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """With options before the script everything behind its name is the script's."""
        start = 1 if args[:1] == ["-m"] else 0
        if start < len(args) and not args[start].startswith("-"):
            for place in range(start + 1, len(args)):
                if self._are_options(ctx, args[place:]):
                    args = [*args[place:], *args[:place]]
                    break
        return super().parse_args(ctx, args)

    def _are_options(self, ctx: click.Context, words: list[str]) -> bool:
        """True if all these words are options of this command and their values."""
        try:
            return words[0].startswith("-") and not self.make_parser(ctx).parse_args(list(words))[1]
        except click.UsageError:
            return False


@click.command(
    "trace",
    cls=_Command,
    short_help="Measure the module calls of chosen steps.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--steps",
    metavar="N,N-M,...",
    callback=lambda context, option, value: _steps(value),
    help="The steps of the script to measure, from 0 on; the first one by default.",
)
@click.option("--stop-after", type=click.IntRange(min=0), metavar="N", help="Stop the script after step N.")
@click.option("--module", metavar="PATTERN", help="Only modules whose path fits, such as 'h.0.*'.")
@click.option("--histograms", is_flag=True, help="Add a histogram of magnitudes and the kurtosis to every row.")
@click.option("--to", type=click.Choice(FORMATS), default="table", show_default=True, help="The format of the rows.")
@click.option("-o", "--output", type=FilePath(), metavar="FILE", help="Write the rows to FILE.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE if it exists.")
@max_time_option(60, "For a snapshot.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE | FILE) [ARGS]...")
@common_options
def command(
    target: Sequence[str],
    steps: frozenset[int] | None,
    stop_after: int | None,
    module: str | None,
    histograms: bool,
    to: Format,
    output: Path | None,
    force: bool,
    max_time: float,
    is_module: bool,
    verbosity: Verbosity,
    json: bool,
) -> TraceScript | TraceFile:
    """Print weights, inputs, outputs and gradients of every module call in numbers.

    Of a script the chosen steps are measured while it runs. Of a snapshot its program is run; nothing of yours is.
    Options stand before the script, or behind its last argument.
    """
    if not target or not target[0]:
        raise UsageError("no script or snapshot given", hint="reprokit trace train.py [ARGS]...")
    is_snapshot = not is_module and _is_snapshot(target[0])
    if output is not None:
        output = output if is_snapshot else with_part(output, rank_suffix())
        check_file(output, overwrite=force)
    to = "jsonl" if json else to
    made = Output(to, output, f"{target[0]}", histograms)
    if is_snapshot:
        if steps is not None or stop_after is not None:
            raise UsageError("a snapshot holds one step", hint="--steps and --stop-after are for scripts")
        return TraceFile(Path(target[0]), module, made, max_time, verbosity)
    chosen = steps or frozenset([0])
    return TraceScript(target[0], is_module, tuple(target[1:]), chosen, stop_after, module, made, verbosity)


def _is_snapshot(path: str) -> bool:
    """True for a name that ends in ``.pt``, and for an archive, which is what `torch.save` writes."""
    if path.endswith(".pt"):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def _steps(value: str | None) -> frozenset[int] | None:
    """``1,3,7-9`` as a set."""
    if value is None:
        return None
    found: set[int] = set()
    for word in value.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise UsageError(f"`{value}` is not a list of steps", hint="--steps takes numbers such as 1,3 or 7-9")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
