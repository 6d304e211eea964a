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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import click

from reprokit.capture import launch
from reprokit.capture.options import rank_suffix, with_part
from reprokit.cli import console
from reprokit.cli.capture import UserScript, watching
from reprokit.errors import ReprokitError, UsageError
from reprokit.locate.choice import Choice
from reprokit.words import counted, replay_words

if TYPE_CHECKING:
    from reprokit.capture.session import Session
    from reprokit.locate.ranges import FrameRow

Format = Literal["table", "lines", "jsonl", "csv", "html"]
FORMATS: tuple[Format, ...] = ("table", "lines", "jsonl", "csv", "html")
_MOST_NAMES = 6  # in one line


@dataclass(frozen=True, slots=True)
class Output:
    """The rows that are wanted, and where they go: to a file, else the table to stderr and anything else to stdout."""

    choice: Choice
    histograms: bool
    to: Format
    path: Path | None
    title: str

    def write(self, groups: Sequence[list[FrameRow]], stdout: IO[str]) -> None:
        """Write the rows of several steps."""
        from rich.console import Console

        from reprokit.locate import ranges
        from reprokit.render.templates import render_template

        file = self.path.open("w", encoding="utf-8", newline="") if self.path is not None else None
        rows = [row for group in groups for row in group]
        with file or contextlib.nullcontext():
            if self.to in FORMATS[:2]:
                screen = Console(file=file, stderr=file is None, highlight=False)
                for group in filter(None, groups):
                    is_flat = self.to == "lines"
                    screen.print(ranges.table(group, screen.width, is_flat=is_flat), soft_wrap=is_flat)
                    screen.print()
                return
            if self.to == "html":
                text = render_template("trace.html.j2", title=self.title, rows=rows, histograms=self.histograms)
            elif self.to == "csv":
                text = ranges.csv_lines(rows, has_header=True, histograms=self.histograms) if rows else ""
            else:
                text = ranges.json_lines(rows)
            (file or stdout).write(text)
            (file or stdout).flush()


@dataclass(frozen=True, slots=True)
class TraceScript(console.ScriptPlan):
    """A script of which some steps are saved into files that are shown and deleted."""

    script: UserScript
    steps: frozenset[int]
    stop_after: int | None
    output: Output
    verbosity: console.Verbosity

    def __call__(self) -> int:
        self.script.check()
        begun: list[Session] = []
        trained: set[str] = set()  # names of parameters
        with contextlib.ExitStack() as stack:
            stack.enter_context(launch.hide_own_frames())
            is_mixed = self.output.to not in FORMATS[:2] and self.output.path is None
            stdout = stack.enter_context(_own_stdout()) if is_mixed else sys.stdout
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reprokit-trace-")))
            process = os.getpid()

            def session() -> Session:
                from reprokit.capture.session import Session

                return Session(
                    name="trace",
                    directory=folder,
                    after="continue",
                    quiet=True,
                    verbose=self.verbosity is console.Verbosity.VERBOSE,
                    on=("exception",),
                    source="traceback",  # names of variables
                    budget=None,
                    at_step=self.steps,
                    last_step=self.stop_after,
                    on_snapshot=lambda path: trained.update(begun[0].trained_parameters()),
                )

            try:
                with watching(session, self.verbosity) as begun:
                    self.script.run()
            except SystemExit as error:
                if not begun or getattr(error, "session", None) is not begun[0]:
                    raise
            finally:
                if os.getpid() == process:
                    self._show(begun[0] if begun else None, trained, stdout)
        return 0

    def _show(self, session: Session | None, trained: set[str], stdout: IO[str]) -> None:
        """Write the rows of the saved steps, and say what is missing in them."""
        from reprokit.render.module_ranges import names_with_gradient, rows_of, surveyed
        from reprokit.snapshot.format import load

        output = self.output
        groups, with_gradient = list[list["FrameRow"]](), set[str]()
        for path in session.snapshots if session is not None else ():
            try:
                snapshot = load(path)
                if snapshot.step not in self.steps:  # the script raised in another one
                    continue
                found = surveyed(snapshot, histograms=output.histograms)
            except ReprokitError as error:
                console.say(f"step {path.stem}: {error}")
                continue
            groups.append(rows_of(found, snapshot.step, output.choice))
            with_gradient |= names_with_gradient(found)
            if doubt := replay_words(snapshot.fidelity, snapshot.fidelity_note):
                console.say(f"step {snapshot.step}: {doubt}", self.verbosity)
        output.write(groups, stdout)
        if num_rows := sum(map(len, groups)):
            place = f" -> {output.path}" if output.path is not None else ""
            console.say(f"{counted(num_rows, 'row')}{place}", self.verbosity)
            if names := sorted(trained - with_gradient) if with_gradient else []:
                more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
                shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
                console.say(f"no gradient in the chosen steps: {shown}{more}", self.verbosity)
        elif session is not None:
            steps = counted(session.num_steps, "step")
            console.say(f"no rows: {output.choice} in the chosen steps; an optimizer's step ended {steps}")
        elif "torch" not in sys.modules:
            console.say("no rows: the script did not import torch")


@contextlib.contextmanager
def _own_stdout() -> Iterator[IO[str]]:
    """The process's stdout, to which nobody else writes from now on: file descriptor 1 leads to stderr."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8", newline="") as file:
        os.dup2(2, 1)
        yield file


def _trace_file(path: Path, output: Output, max_time: float, verbosity: console.Verbosity) -> int:
    """Run the program of a snapshot with measuring."""
    from reprokit.render.module_ranges import recorded_rows
    from reprokit.snapshot.format import load

    snapshot = load(path)
    with console.deadline(max_time):
        rows = recorded_rows(snapshot, output.choice, histograms=output.histograms)
    output.write([rows], sys.stdout)
    if not rows:
        console.say(f"no rows: {output.choice} in this step", verbosity)
    return 0


class OptionsAnywhere(click.Command):
    """Takes its options before the script, or behind the script's own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """With options before the script everything behind its name is the script's."""
        start = 1 if args[:1] == ["-m"] else 0
        if start < len(args) and not args[start].startswith("-"):
            places = (place for place in range(start + 1, len(args)) if self._are_options(ctx, args[place:]))
            place = next(places, len(args))
            args = [*args[place:], *args[:place]]
        return super().parse_args(ctx, args)

    def _are_options(self, ctx: click.Context, words: list[str]) -> bool:
        """True if all these words are options of this command and their values."""
        try:
            return (
                words[0].startswith("-") and words[0] != "--" and not self.make_parser(ctx).parse_args(list(words))[1]
            )
        except click.UsageError:
            return False


@click.command(
    "trace",
    cls=OptionsAnywhere,
    short_help="Measure the module calls of chosen steps.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--steps",
    metavar="N,N-M,...",
    callback=lambda context, option, value: console.read_steps(value, "--steps"),
    help="The steps of the script to measure, from 0 on; the first one by default.",
)
@click.option("--stop-after", type=click.IntRange(min=0), metavar="N", help="Stop the script after step N.")
@click.option("--module", metavar="PATTERN", help="Only modules whose path fits, such as 'h.0.*'.")
@click.option("--class", "classes", multiple=True, metavar="PATTERN", help="Only modules of such a class; repeatable.")
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    metavar="PATTERN",
    help="Only input, weight, output, grad_input, grad_output, grad_weight, or a variable of your code; repeatable.",
)
@click.option("--histograms", is_flag=True, help="Add a histogram of magnitudes and the kurtosis to every row.")
@click.option("--to", type=click.Choice(FORMATS), help="The format of the rows: table by default, lines with --tensor.")
@console.output_options("FILE", "Write the rows to FILE.")
@console.max_time_option(60, "For a snapshot.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE | FILE) [ARGS]...")
@console.common_options
def command(
    target: Sequence[str],
    steps: frozenset[int],
    stop_after: int | None,
    module: str | None,
    classes: tuple[str, ...],
    tensors: tuple[str, ...],
    histograms: bool,
    to: Format | None,
    output: Path | None,
    force: bool,
    max_time: float,
    is_module: bool,
    verbosity: console.Verbosity,
    json: bool,
) -> console.Plan:
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
        console.check_file(output, overwrite=force)
    form: Format = "jsonl" if json else to or ("lines" if tensors else "table")
    wanted = Output(Choice(module, classes, tensors), histograms, form, output, target[0])
    if not is_snapshot:
        chosen = steps or frozenset([0])
        return TraceScript(UserScript(target[0], is_module, tuple(target[1:])), chosen, stop_after, wanted, verbosity)
    if steps or stop_after is not None:
        raise UsageError("a snapshot holds one step", hint="--steps and --stop-after are for scripts")
    return partial(_trace_file, Path(target[0]), wanted, max_time, verbosity)


def _is_snapshot(path: str) -> bool:
    """True for a name that ends in ``.pt``, and for an archive, which is what `torch.save` writes."""
    if path.endswith(".pt"):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False
