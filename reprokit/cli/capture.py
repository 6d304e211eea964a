"""``reprokit capture``: run a script as Python would and save its first failing step.

Silent while training is healthy: one line at the start says where the snapshot would go. The result is printed at
the very end of the process, after any traceback and the script's own exit functions, so that it cannot be missed.
"""

from __future__ import annotations

import atexit
import contextlib
import json as json_format
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture import launch, options
from reprokit.capture.failure_text import Seen, captured_lines, closing_line, shown_path
from reprokit.capture.options import current_folder, rank_suffix, with_part
from reprokit.cli import console
from reprokit.cli.children import PLAN, Children
from reprokit.errors import UsageError, pass_on
from reprokit.grammar import values_of
from reprokit.series.events import LineLog, older
from reprokit.words import counted, json_line, print_own

if TYPE_CHECKING:
    from reprokit.capture.session import Session

EXIT_CAPTURED = 3
_MOST_BYTES = 2**24  # of a file of numbers, after which it is renamed; two files hold the last 16 to 32 MiB
_STARTS_SCRIPTS = re.compile(r"torchrun|accelerate|mpiexec|mpirun|srun|python[\d.]*")


@dataclass(frozen=True, slots=True)
class UserScript:
    """A script or a module, with its arguments."""

    target: str
    is_module: bool
    argv: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The beginning of an automatic file name."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    @property
    def words(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.argv]

    def check(self) -> None:
        """Raise `UsageError` unless there is such a script; a module is looked for when it is run."""
        if self.is_module:
            return
        if _STARTS_SCRIPTS.fullmatch(os.path.basename(self.target)) and not os.path.isfile(self.target):
            hint = f"watch what it starts: {self.target} [OPTIONS] -m reprokit capture train.py [ARGS]"
            raise UsageError(f"`{self.target}` is a command, not a script", hint=hint)
        launch.read_script(self.target)

    def run(self) -> None:
        run = launch.run_module if self.is_module else launch.run_script
        run(self.target, self.argv)


@contextlib.contextmanager
def watching(make: Callable[[], Session], verbosity: console.Verbosity) -> Iterator[list[Session]]:
    """A context whose code is watched once it has imported torch; the list then has the session.

    If no session can be made, a line says so and the code runs on.
    """
    begun: list[Session] = []
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            try:
                begun.append(stack.enter_context(make()))
            except Exception as error:
                pass_on(error)
                console.say(f"cannot watch this run ({type(error).__name__}: {error}); it goes on unwatched")
                if verbosity is console.Verbosity.VERBOSE:
                    print_own("".join(format_exception(error)))

        stack.callback(launch.when_imported("torch", begin))
        yield begun


@dataclass(frozen=True, slots=True)
class Capture(console.ScriptPlan):
    """A script to run, and what to do at its first failure."""

    script: UserScript
    folder: Path  # of files that have no other place
    output: Path | None
    overwrite: bool
    numbers: Path | None
    json: bool
    verbosity: console.Verbosity
    options: dict[str, Any]  # of the session
    part: str = ""  # tells the files of a process that the script has started

    def __call__(self) -> int:
        """Run the script; its own exit code or exception, unless a failure was captured and stopped it."""
        self._check()
        output, numbers = self.file(self.output), self.file(self.numbers)
        place = shown_path(output) if output is not None else f"{self.script.stem}{rank_suffix()}-step<N>.repro.pt"
        kept = f", numbers to {shown_path(numbers)}" if numbers is not None else ""
        if numbers is None and self.options.get("record") is not None:
            kept = "; without one no numbers are kept (`--numbers FILE` keeps them)"
        console.say(f"watching `{self.script.target}`; a failing step goes to {place}{kept}", self.verbosity)
        return self.run()

    def run(self, reports: Path | None = None) -> int:
        """Run the script, in a process that reports to the one that has started it if ``reports`` is a folder."""
        watch = self.watch(reports)
        atexit.register(watch.announce)
        try:
            with launch.hide_own_frames(), watch.watching():
                self.script.run()
        except BaseException as error:
            watch.error = error
            if not watch.has_stopped:
                raise
            if not isinstance(error, SystemExit):
                launch.show_exception(error)
            elif error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # as Python does for `sys.exit("a message")`
        return EXIT_CAPTURED if watch.has_stopped else 0

    def watch(self, reports: Path | None) -> Watch:
        return Watch(self, reports)

    def in_child(self) -> Capture:
        """The same in a process that the script has started."""
        return replace(self, part=f".pid{os.getpid()}", json=False)

    def to_json(self) -> str:
        """The same for a command that the script starts."""
        return json_format.dumps(values_of(self), default=str)

    @classmethod
    def of(cls, script: UserScript, text: str) -> Capture:
        """The capture of a script, as `to_json` has written that of another one."""
        given = json_format.loads(text)
        paths = {name: Path(given[name]) if given[name] else None for name in ("output", "numbers")}
        verbosity = console.Verbosity(given["verbosity"])
        return cls(**{**given, **paths, "script": script, "folder": Path(given["folder"]), "verbosity": verbosity})

    def file(self, path: Path | None) -> Path | None:
        """A file that was asked for, with the rank of the process under torchrun."""
        return path if path is None or os.path.isdir(path) else with_part(path, rank_suffix() or self.part)

    def _check(self) -> None:
        self.script.check()
        places = (self.file(path) for path in (self.output, self.numbers))
        output, numbers = (Path(shown_path(path)) if path is not None else None for path in places)
        if output is not None:
            console.check_file(output, overwrite=self.overwrite)
        else:
            console.check_folder(self.folder)
        if numbers is not None:
            if numbers.suffix != ".jsonl":
                raise UsageError(f"`{numbers}` does not end in .jsonl", hint="--numbers run.jsonl")
            for found in (numbers, older(numbers)):
                console.check_file(found, overwrite=self.overwrite, option="--numbers")
            for found in (numbers, older(numbers)):
                found.unlink(missing_ok=True)


class Watch:
    """Watches one process and what it starts; prints at its end what was captured, or reports it to the parent."""

    def __init__(self, plan: Capture, reports: Path | None) -> None:
        self.error: BaseException | None = None  # that ended the script
        self._plan = plan
        self._process = os.getpid()
        self._begun: list[Session] = []
        self._children = Children(plan, reports)
        self._is_child = reports is not None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with self._children.starting(), watching(self._session, self._plan.verbosity) as self._begun:
            yield

    @property
    def has_stopped(self) -> bool:
        """True if a failure was captured that ends the run, here or in a process that the script has started."""
        return self._has_stopped_here or any(report["has_stopped"] for report in self._children.reports())

    @property
    def _has_stopped_here(self) -> bool:
        return self._plan.options.get("after") == "stop" and any(session.has_failed for session in self._begun)

    def _session(self) -> Session:
        from reprokit.capture.session import Session
        from reprokit.snapshot.redact import redact_argv

        plan = self._plan
        numbers = LineLog(lambda: plan.file(plan.numbers) or Path(), _MOST_BYTES)
        return Session(
            plan.output,
            name=plan.script.stem,
            part=plan.part,
            directory=plan.folder,
            command=redact_argv(plan.script.words),
            overwrite=plan.overwrite,
            quiet=plan.verbosity is console.Verbosity.QUIET,
            verbose=plan.verbosity is console.Verbosity.VERBOSE,
            on_numbers=(lambda row: numbers.add(json_line(row))) if plan.numbers is not None else None,
            **plan.options,
        )

    def announce(self) -> None:
        """Say what was captured and what to do next, or why nothing was; forked children stay silent."""
        if os.getpid() != self._process:
            return
        results = [result for session in self._begun for result in session.results]
        paths = [path for session in self._begun for path in session.snapshots]
        below = self._children.reports()
        with contextlib.suppress(OSError, ValueError):  # the script may have closed its streams
            for path, result in zip(paths, results, strict=True):
                self._tell_result(path, result)
            if not self._is_child:
                self._tell_end(below)
            for result in (result for report in below for result in report["results"]):
                self._tell_result(Path(result["path"]), result)
        if self._is_child:
            has_checked = any(session.has_checked for session in self._begun)
            self._children.report(
                {"has_stopped": self._has_stopped_here, "has_checked": has_checked, "results": results}
            )
        self._children.forget()

    def _tell_end(self, below: Sequence[Mapping[str, Any]]) -> None:
        """Why nothing was saved, if nothing was."""
        plan, is_checked_below = self._plan, any(report["has_checked"] for report in below)
        numbers = plan.file(plan.numbers)
        if self._begun and numbers is not None and not (numbers.exists() or is_checked_below):
            missing = f"no numbers were written to {shown_path(numbers)}"
            console.say(f"{missing}: no step of `torch.optim` was measured", plan.verbosity)
        closing = self._begun[0].closing if self._begun else closing_line(Seen(), self.error)
        # no such module, say, so that nothing ran; or no session, in a line of its own
        is_told = isinstance(self.error, UsageError) or ("torch" in sys.modules and not self._begun)
        is_elsewhere = any(report["results"] for report in below) or (self.error is None and is_checked_below)
        if closing is not None and not (is_told or is_elsewhere):
            if num_watched := self._children.num_watched if not is_checked_below else 0:
                closing += f", nor in {counted(num_watched, 'process', 'processes')} that the script started"
            console.say(closing, plan.verbosity)

    def _tell_result(self, path: Path, result: Mapping[str, Any]) -> None:
        plan, on = self._plan, self._plan.options.get("on", ())
        if plan.json:
            console.print_json({**result, "path": str(path)})
        again = [word for kind in on if tuple(on) != options.DEFAULT_ON for word in ("--on", kind)]
        for line in captured_lines(path, result, plan.folder, [*again, *plan.script.words]):
            console.say(line, plan.verbosity)


def run_started(folder: Path, words: Sequence[str]) -> int:
    """Run a command that a watched script has started, watched as the script is; unwatched if the script has ended."""
    is_module = words[0] == "-m"
    script = UserScript(words[is_module], is_module, tuple(words[is_module + 1 :]))
    try:
        text = (folder / PLAN).read_text()
    except OSError:
        script.run()
        return 0
    return Capture.of(script, text).in_child().run(folder)


def _number_or(kind: type[int] | type[float], **words: int | None) -> Callable[..., float | None]:
    """A callback of click that takes a number above 0, or one of a few words."""

    def convert(context: click.Context, param: click.Parameter, value: str) -> float | None:
        if value in words:
            return words[value]
        with contextlib.suppress(ValueError):
            number = kind(value.removesuffix("%") if kind is float else value)
            if 0 < number < math.inf:
                return number
        raise click.BadParameter(f"`{value}` is no number above 0, nor {' or '.join(words)}", context, param)

    return convert


def _pace(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"(auto|0*[1-9]\d*)(:.*)?", value):
        raise UsageError(f"`{value}` is not a pace", hint="--record takes auto, or a number of steps such as 10:h.0.*")
    return value


@click.command("capture", context_settings={"allow_interspersed_args": False})
@console.output_options("FILE", "Where to write the snapshot.")
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
    "`skipped`, NaN and infinity also where the loop skips the step by itself. `spike`, `explosion`, `dead`, "
    "`scale`, `change` and `silent` are events of a run, `early` is all of them; with them, NaN and "
    "infinity count as well. `ranks`: parameters differ between processes that average gradients.",
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
    callback=_number_or(int, auto=None, off=0),
    default="auto",
    show_default=True,
    metavar="N|auto|off",
    help="Steps between copies of the training state, with which a failure found late is traced back.",
)
@click.option(
    "--budget",
    callback=_number_or(float, off=None),
    default=f"{options.DEFAULT_PERCENT:g}",
    show_default=True,
    metavar="PERCENT|off",
    help="The share of the script's CPU time that watching may take; a long run that exceeds it notes fewer steps.",
)
@click.option(
    "--from-step", type=click.IntRange(min=0), metavar="N", help="Note no step before step N, and all from there on."
)
@click.option(
    "--at-step",
    metavar="N[,M]",
    callback=lambda context, option, value: tuple(sorted(console.read_steps(value, "--at-step"))),
    help="Save these steps although they are healthy, in files with their numbers; training goes on.",
)
@click.option(
    "--record",
    metavar="auto|N[:PATTERN]",
    callback=_pace,
    help="Measure gradient and weight norms of every parameter: every N steps, or as often as 0.3% of the time allows.",
)
@click.option(
    "--numbers",
    type=console.PATH,
    metavar="FILE",
    help="Write the numbers of every step that was measured into FILE (run.jsonl); `reprokit timeline` prints them. "
    "Measures at the pace of `--record auto` without `--record`.",
)
@click.option(
    "--no-cause",
    "cause",
    flag_value=False,
    default=True,
    help="Do not play the steps before a failure again with one thing changed.",
)
@console.source_option("traceback")
@click.option("-m", "--module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE) [ARGS]...")
@console.common_options
def command(
    target: tuple[str, ...],
    module: bool,
    output: Path | None,
    force: bool,
    numbers: Path | None,
    json: bool,
    verbosity: console.Verbosity,
    **given: Any,
) -> console.Plan:
    """Run a training script and save its first failing step.

    Everything after the script's name belongs to the script.
    """
    if not target or not target[0]:
        kind = "module" if module else "script"
        raise UsageError(f"no {kind} given", hint="reprokit capture train.py [ARGS]...")
    folder = current_folder()
    places = (path if path is None else folder / path for path in (output, numbers))
    return Capture(
        UserScript(target[0], module, target[1:]), folder, next(places), force, next(places), json, verbosity, given
    )
