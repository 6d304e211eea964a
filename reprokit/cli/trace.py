"""``reprokit trace``: forward and backward frames of chosen steps of a script, or of the step that a snapshot holds.

A script runs as Python would run it, and ends with the same bits. Its steps are saved as `capture --at-step`
saves them, into files that are shown when the script has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    read_steps,
    say,
    too_long,
)
from reprokit.errors import ReprokitError, UsageError, pass_on
from reprokit.words import counted, replay_words

if TYPE_CHECKING:
    from reprokit.capture.session import Session
    from reprokit.locate.ranges import FrameRow

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
    """A script or module of which some steps are saved into files that are shown and deleted."""

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
        with contextlib.ExitStack() as outer:
            outer.enter_context(launch.hide_own_frames())
            outer.enter_context(self.output.opened(is_shared=True))
            shown = _Shown(self, Path(outer.enter_context(tempfile.TemporaryDirectory(prefix="reprokit-trace-"))))
            outer.callback(shown.write)
            with contextlib.ExitStack() as stack:
                stack.callback(launch.when_imported("torch", lambda: shown.start(stack)))
                run = launch.run_module if self.is_module else launch.run_script
                try:
                    run(self.target, self.argv)
                except SystemExit as error:
                    if getattr(error, "session", None) is None or error.session is not shown.session:  # type: ignore[attr-defined]
                        raise
        return 0


class _Shown:
    """The chosen steps of a script: saved while it runs, shown when it has ended."""

    def __init__(self, plan: TraceScript, folder: Path) -> None:
        self.session: Session | None = None
        self._plan = plan
        self._folder = folder
        self._process = os.getpid()
        self._trained: set[str] = set()  # names of parameters
        self._with_gradient: set[str] = set()

    def start(self, stack: contextlib.ExitStack) -> None:
        """Begin to watch; if that fails, say so and let the script run."""
        from reprokit.capture.session import Session

        try:
            self.session = stack.enter_context(
                Session(
                    name="trace",
                    directory=self._folder,
                    after="continue",
                    quiet=True,
                    verbose=self._plan.verbosity is Verbosity.VERBOSE,
                    on=("exception",),
                    source="none",
                    budget=None,
                    at_step=self._plan.steps,
                    last_step=self._plan.stop_after,
                    on_snapshot=self._note_names,
                )
            )
        except Exception as error:
            pass_on(error)
            say(f"cannot watch this run ({type(error).__name__}: {error}); it goes on unwatched")

    def _note_names(self, path: Path) -> None:
        if self.session is not None:
            self._trained |= self.session.trained_parameters()

    def write(self) -> None:
        """Show the steps."""
        if os.getpid() != self._process:
            return
        from reprokit.render.module_ranges import names_with_gradient, rows_of, surveyed
        from reprokit.snapshot.format import load

        plan, session = self._plan, self.session
        for path in session.snapshots if session is not None else ():
            try:
                snapshot = load(path)
                if snapshot.step not in plan.steps:  # the script raised in another one
                    continue
                found = surveyed(snapshot, histograms=plan.output.histograms)
            except ReprokitError as error:
                say(f"step {path.stem}: {error}")
                continue
            plan.output.write(rows_of(found, snapshot.step, plan.module))
            self._with_gradient |= names_with_gradient(found)
            if snapshot.fidelity != "exact":
                say(f"step {snapshot.step}: {replay_words(snapshot.fidelity, snapshot.fidelity_note)}", plan.verbosity)
        self._tell()

    def _tell(self) -> None:
        plan, output = self._plan, self._plan.output
        if output.num_rows:
            place = f" -> {output.path}" if output.path is not None else ""
            say(f"{counted(output.num_rows, 'row')}{place}", plan.verbosity)
            names = sorted(self._trained - self._with_gradient) if self._with_gradient else []
            if names:
                more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
                shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
                say(f"no gradient in the chosen steps: {shown}{more}", plan.verbosity)
        elif self.session is None:
            say("no rows: the script did not import torch")
        else:
            steps = counted(self.session.num_steps, "step")
            matching = f" that matches `{plan.module}`" if plan.module is not None else ""
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
    callback=lambda context, option, value: read_steps(value, "--steps"),
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

    Of a script the chosen steps are saved while it runs, and shown when it has ended. Of a snapshot its program is run;
    nothing of yours is.
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
