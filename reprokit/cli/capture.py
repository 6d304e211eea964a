"""``reprokit capture``: run a script as Python would and save its first failing step.

Silent while training is healthy: one line at the start says where the snapshot would go. The result is printed at
the very end of the process, after any traceback and the script's own exit functions, so that it cannot be missed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture import launch, options
from reprokit.capture.failure_text import Seen, captured_lines, closing_line, shown_path
from reprokit.capture.options import rank_suffix, with_part
from reprokit.cli.children import REPORTS, Children
from reprokit.cli.console import (
    PATH,
    Plan,
    Verbosity,
    check_file,
    check_folder,
    common_options,
    print_json,
    read_steps,
    say,
)
from reprokit.errors import UsageError, pass_on
from reprokit.series.events import LineLog, older
from reprokit.snapshot.source import SOURCES
from reprokit.words import json_line

if TYPE_CHECKING:
    from reprokit.capture.session import Session

EXIT_CAPTURED = 3
_MOST_BYTES = 2**24  # of a file of numbers, after which it is renamed; two files hold the last 16 to 32 MiB


@dataclass(frozen=True, slots=True)
class Capture:
    """A script or module to run, and what to do at its first failure.

    ``part`` distinguishes the files of this process from those of the process that has started it. ``words`` are the
    options as they were typed, for commands that the script starts.
    """

    target: str
    is_module: bool
    argv: tuple[str, ...]
    output: Path | None
    overwrite: bool
    numbers: Path | None
    json: bool
    verbosity: Verbosity
    options: dict[str, Any]  # of the session
    words: tuple[str, ...] = ()
    part: str = ""

    def __call__(self) -> int:
        """Run the script; its own exit code or exception, unless a failure was captured and stopped it."""
        reports = os.environ.pop(REPORTS, None)
        if reports is not None:
            return replace(self, part=f".pid{os.getpid()}", json=False).run(reports)
        self._check()
        output, numbers = self.file(self.output), self.file(self.numbers)
        place = shown_path(output) if output is not None else f"{self.stem}{rank_suffix()}-step<N>.repro.pt"
        kept = f", numbers to {shown_path(numbers)}" if numbers is not None else ""
        if numbers is None and self.options.get("record") is not None:
            kept = "; without one no numbers are kept (`--numbers FILE` keeps them)"
        say(f"watching `{self.target}`; a failing step goes to {place}{kept}", self.verbosity)
        return self.run(None)

    def run(self, reports: str | None) -> int:
        """Run the script, in a process that reports to the one that has started it if ``reports`` is a folder."""
        watch = self.watch(Path.cwd(), reports)
        atexit.register(watch.announce)
        try:
            with launch.hide_own_frames(), contextlib.ExitStack() as stack:
                watch.begin(stack)
                run_target(self)
        except BaseException as error:
            watch.error = error
            if not watch.has_stopped:
                raise
            if not isinstance(error, SystemExit):
                launch.show_exception(error)
            elif error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # as Python does for `sys.exit("a message")`
        return EXIT_CAPTURED if watch.has_stopped else 0

    def watch(self, folder: Path, reports: str | None) -> Watch:
        """The watch of this process, which works in ``folder``."""
        return Watch(self, folder, reports)

    def file(self, path: Path | None) -> Path | None:
        """A file that was asked for, with the rank of the process under torchrun."""
        return path if path is None or os.path.isdir(path) else with_part(path, rank_suffix() or self.part)

    @property
    def stem(self) -> str:
        """The beginning of an automatic file name."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    @property
    def command(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.argv]

    def _check(self) -> None:
        if not self.is_module:
            if _STARTS_SCRIPTS.fullmatch(os.path.basename(self.target)) and not os.path.isfile(self.target):
                hint = f"watch what it starts: {self.target} [OPTIONS] -m reprokit capture train.py [ARGS]"
                raise UsageError(f"`{self.target}` is a command, not a script", hint=hint)
            launch.read_script(self.target)
        output, numbers = self.file(self.output), self.file(self.numbers)
        if output is not None:
            check_file(output, overwrite=self.overwrite)
        else:
            check_folder(Path.cwd())
        if numbers is not None:
            if numbers.suffix != ".jsonl":
                raise UsageError(f"`{numbers}` does not end in .jsonl", hint="--numbers run.jsonl")
            for found in (numbers, older(numbers)):
                check_file(found, overwrite=self.overwrite, option="--numbers")
                if found.exists() and not found.is_file():
                    raise UsageError(f"`{found}` is not a file", hint="choose another name with --numbers")
            for found in (numbers, older(numbers)):
                found.unlink(missing_ok=True)


class _Numbers:
    """Appends the numbers of a step to a file of JSON lines, until that fails."""

    def __init__(self, plan: Capture, folder: Path) -> None:
        self.has_any = self._has_failed = False
        self._log = LineLog(lambda: folder / (plan.file(plan.numbers) or ""), _MOST_BYTES)

    def __call__(self, numbers: dict[str, float]) -> None:
        if self._has_failed:
            return
        self.has_any = True
        try:
            self._log.add(json_line(numbers))
        except OSError as error:
            pass_on(error)
            self._has_failed = True
            reason = (error.strerror or str(error)).lower()
            say(f"`--numbers` cannot write `{shown_path(self._log.path)}` any more: {reason}; training goes on")


class Watch:
    """The session of one run: begins when the script has imported torch, reports its result at the process's end."""

    def __init__(self, plan: Capture, folder: Path, reports: str | None = None) -> None:
        self._plan = plan
        self._folder = folder
        self._process = os.getpid()
        self._session: Session | None = None
        self._has_failed = False
        self._numbers = _Numbers(plan, folder) if plan.numbers is not None else None
        self._reports = reports
        self._children = Children(plan, reports)
        self.error: BaseException | None = None  # that ended the script

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Watch until ``stack`` is left: this process once it has imported torch, and what it starts."""
        stack.enter_context(self._children.starting())
        stack.callback(launch.when_imported("torch", lambda: self._start(stack)))

    @property
    def has_stopped(self) -> bool:
        """True if a failure was captured that ends the run, here or in a process that the script has started."""
        return self._has_stopped_here or any(report["has_stopped"] for report in self._told_by_children())

    @property
    def _has_stopped_here(self) -> bool:
        session = self._session
        return session is not None and session.has_failed and self._plan.options.get("after") == "stop"

    def _told_by_children(self) -> list[dict[str, Any]]:
        """Reports of all processes below this one, which only the first one reads."""
        return self._children.reports() if self._reports is None else []

    def _start(self, stack: contextlib.ExitStack) -> None:
        plan = self._plan

        def make() -> Session:
            from reprokit.capture.session import Session
            from reprokit.snapshot.redact import redact_argv

            return Session(
                self._folder / plan.output if plan.output is not None else None,
                name=plan.stem,
                part=plan.part,
                directory=self._folder,
                command=redact_argv(plan.command),
                overwrite=plan.overwrite,
                quiet=plan.verbosity is Verbosity.QUIET,
                verbose=plan.verbosity is Verbosity.VERBOSE,
                on_numbers=self._numbers,
                **plan.options,
            )

        self._session = begin_session(stack, make, plan.verbosity)
        self._has_failed = self._session is None

    def announce(self) -> None:
        """Say what was captured and what to do next, or why nothing was; forked children stay silent."""
        if os.getpid() != self._process:
            return
        children = self._told_by_children()
        with contextlib.suppress(OSError, ValueError):  # the script may have closed its streams
            session = self._session
            if session is not None:
                for path, result in zip(session.snapshots, session.results, strict=True):
                    self._tell_result(path, result)
            if self._reports is None:
                self._tell_end(children)
            for result in (result for report in children for result in report["results"]):
                self._tell_result(Path(result["path"]), result)
        if self._reports is not None:
            self._report(self._reports)
        self._children.forget()

    def _tell_end(self, children: Sequence[Mapping[str, Any]]) -> None:
        """Why nothing was saved, if nothing was."""
        plan, is_checked_below = self._plan, any(report["has_checked"] for report in children)
        has_numbers = self._numbers is None or self._numbers.has_any or is_checked_below
        if not has_numbers and self._session is not None and (numbers := plan.file(plan.numbers)):
            missing = f"no numbers were written to {shown_path(numbers)}"
            say(f"{missing}: no step of `torch.optim` was measured", plan.verbosity)
        closing = self._session.closing if self._session is not None else closing_line(Seen(), self.error)
        is_told = isinstance(self.error, UsageError) or self._has_failed  # no such module, say: nothing ran
        is_elsewhere = any(report["results"] for report in children) or (self.error is None and is_checked_below)
        if closing is not None and not (is_told or is_elsewhere):
            say(closing + self._children.words(children), plan.verbosity)

    def _tell_result(self, path: Path, result: Mapping[str, Any]) -> None:
        plan, on = self._plan, self._plan.options.get("on", ())
        if plan.json:
            print_json({**result, "path": str(path)})
        again = [word for kind in on if tuple(on) != options.DEFAULT_ON for word in ("--on", kind)]
        for line in captured_lines(path, result, self._folder, [*again, *plan.command]):
            say(line, plan.verbosity)

    def _report(self, folder: str) -> None:
        """Leave what was captured here for the process that has started this one."""
        found = {
            "has_stopped": self._has_stopped_here,
            "has_checked": self._session is not None and self._session.has_checked,
            "results": self._session.results if self._session is not None else [],
        }
        with contextlib.suppress(OSError, TypeError, ValueError):
            Path(folder, f"{self._process}.json").write_text(json.dumps(found))


def begin_session(stack: contextlib.ExitStack, make: Callable[[], Session], verbosity: Verbosity) -> Session | None:
    """Begin to watch until ``stack`` is left; if that fails, say so and let the script run."""
    try:
        return stack.enter_context(make())
    except Exception as error:
        pass_on(error)
        say(f"cannot watch this run ({type(error).__name__}: {error}); it goes on unwatched")
        if verbosity is Verbosity.VERBOSE:
            print_exception(error)
        return None


def run_target(plan: Any) -> None:
    """Run the script or module of a plan as Python would."""
    run = launch.run_module if plan.is_module else launch.run_script
    run(plan.target, plan.argv)


class _NumberOr(click.ParamType):  # type: ignore[type-arg]  # is generic from click 8.4 on
    """A number above 0, or one of a few words."""

    name = "number"

    def __init__(self, kind: type[int] | type[float], **words: int | None) -> None:
        self._kind = kind
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value in self._words:
            return self._words[value]
        with contextlib.suppress(ValueError):
            number = self._kind(str(value).removesuffix("%") if self._kind is float else str(value))
            if 0 < number < math.inf:
                return number
        self.fail(f"`{value}` is no number above 0, nor {' or '.join(self._words)}", param, ctx)


class _Command(click.Command):
    """Remembers its options as they were typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


@click.command("capture", cls=_Command, context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Where to write the snapshot.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--after-capture",
    "after",
    type=click.Choice(options.AFTER),
    default="stop",
    show_default=True,
    help="Stop the script with exit code 3, or let it go on unwatched.",
)
@click.option(
    "--on",
    type=click.Choice(options.ON),
    multiple=True,
    default=options.DEFAULT_ON,
    help="What is a failure: NaN and infinity, an exception that ends a step (these two by default); with "
    "`skipped`, NaN and infinity also where the loop skips the step by itself. `spike`, `explosion`, `dead` and "
    "`scale` are events of a run that leaves its own course, `early` is all of them; with them, NaN and infinity "
    "count as well. `ranks`: parameters differ between processes that average gradients.",
)
@click.option(
    "--watch",
    type=click.Choice(options.WATCH),
    default="sampled",
    show_default=True,
    help="Check every loss and the rest from time to time, or everything in every step; both name the same step.",
)
@click.option(
    "--history",
    type=_NumberOr(int, auto=None, off=0),
    default="auto",
    show_default=True,
    metavar="N|auto|off",
    help="Steps between copies of the training state, with which a failure found late is traced back.",
)
@click.option(
    "--budget",
    type=_NumberOr(float, off=None),
    default=f"{options.DEFAULT_PERCENT:g}",
    show_default=True,
    metavar="PERCENT|off",
    help="The share of the script's CPU time that watching may take; a long run that exceeds it notes fewer steps.",
)
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Note no step before step N, and all from there on.",
)
@click.option(
    "--at-step",
    metavar="N[,M]",
    callback=lambda context, option, value: tuple(sorted(read_steps(value, "--at-step"))),
    help="Save these steps although they are healthy, in files with their numbers; training goes on.",
)
@click.option(
    "--record",
    metavar="auto|N[:PATTERN]",
    help="Measure gradient and weight norms of every parameter: every N steps, or as often as 0.3% of the time allows.",
)
@click.option(
    "--numbers",
    type=PATH,
    metavar="FILE",
    help="Write the numbers of every step that was measured into FILE (run.jsonl); `reprokit timeline` prints them. "
    "Measures at the pace of `--record auto` without `--record`.",
)
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    default="traceback",
    show_default=True,
    help="How much of your code the snapshot holds: the lines that a traceback shows, none, or all that is known.",
)
@click.option("-m", "--module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE) [ARGS]...")
@common_options
def command(
    target: tuple[str, ...],
    module: bool,
    output: Path | None,
    force: bool,
    numbers: Path | None,
    json: bool,
    verbosity: Verbosity,
    **given: Any,
) -> Plan:
    """Run a training script and save its first failing step.

    Everything after the script's name belongs to the script.
    """
    if not target or not target[0]:
        kind = "module" if module else "script"
        raise UsageError(f"no {kind} given", hint="reprokit capture train.py [ARGS]...")
    record = given["record"]
    if record is not None and not re.fullmatch(r"(auto|0*[1-9]\d*)(:.*)?", record):
        raise UsageError(f"`{record}` is not a pace", hint="--record takes auto, or a number of steps such as 10:h.0.*")
    typed: list[str] = click.get_current_context().obj
    passed_on = (_passed_on(word) for word in typed[: len(typed) - len(target)])
    words = tuple(word for word in passed_on if word not in ("-", "--module", "--"))
    return Capture(target[0], module, target[1:], output, force, numbers, json, verbosity, given, words)


def _passed_on(word: str) -> str:
    """An option as a started process is given it: ``-m``, also in ``-qm``, is about the script of this one."""
    return word.replace("m", "") if re.fullmatch("-[qvfm]+", word) else word


_STARTS_SCRIPTS = re.compile(r"torchrun|accelerate|mpiexec|mpirun|srun|python[\d.]*")
