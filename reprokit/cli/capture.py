"""``reprokit capture``: run a script as Python would and save its first failing step.

Silent while training is healthy: one line at the start says where the snapshot would go. The result is printed at
the very end of the process, after any traceback and the script's own exit functions, so that it cannot be missed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture import launch, options
from reprokit.capture.failure_text import Seen, captured_lines, closing_line, shown_path
from reprokit.capture.options import check_name, rank_suffix, with_part
from reprokit.cli.children import REPORTS, Children
from reprokit.cli.console import (
    FilePath,
    Verbosity,
    check_file,
    check_folder,
    common_options,
    print_json,
    read_steps,
    remove_file,
    say,
)
from reprokit.errors import UsageError, pass_on
from reprokit.series.events import LineLog, older
from reprokit.snapshot.source import SOURCES, Source
from reprokit.words import json_line

if TYPE_CHECKING:
    from reprokit.capture.session import Session

EXIT_CAPTURED = 3
_MOST_BYTES = 2**24  # of a file of numbers, after which it is renamed; two files hold the last 16 to 32 MiB


@dataclass(frozen=True, slots=True)
class Capture:
    """A script or module to run, and what to do at its first failure.

    ``part`` distinguishes the files of this process from those of the process that has started it.
    """

    target: str
    is_module: bool
    argv: tuple[str, ...]
    output: Path | None
    overwrite: bool
    after: options.After
    history: int | None
    watch: options.Watch
    on: tuple[str, ...]
    source: Source
    json: bool
    verbosity: Verbosity
    budget: float | None = options.DEFAULT_PERCENT
    from_step: int | None = None
    at_step: tuple[int, ...] = ()
    part: str = ""
    record: str | None = None
    numbers: Path | None = None

    def execute(self) -> int:
        """Run the script; its own exit code or exception, unless a failure was captured and stopped it."""
        reports = os.environ.pop(REPORTS, None)
        if reports is not None:
            return dataclasses.replace(self, part=f".pid{os.getpid()}", json=False)._execute(reports)
        self._check()
        say(f"watching `{self.target}`; a failing step goes to {self._place()}{self._numbers()}", self.verbosity)
        return self._execute(None)

    def _execute(self, reports: str | None) -> int:
        watch = Watch(self, Path.cwd(), reports)
        atexit.register(watch.announce)
        try:
            with launch.hide_own_frames(), contextlib.ExitStack() as stack:
                watch.begin(stack)
                self._run()
        except BaseException as error:
            watch.error = error
            if not watch.has_stopped:
                raise
            if not isinstance(error, SystemExit):
                launch.show_exception(error)
            elif error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # as Python does for `sys.exit("a message")`
        return EXIT_CAPTURED if watch.has_stopped else 0

    def watch_of_child(self, folder: Path, reports: str) -> Watch:
        """The watch of a process that the script has started, which is this one."""
        return Watch(dataclasses.replace(self, part=f".pid{os.getpid()}"), folder, reports)

    def file(self) -> Path | None:
        """The file that was asked for, with the process's rank under torchrun."""
        if self.output is None or os.path.isdir(self.output):
            return self.output
        return with_part(self.output, rank_suffix() or self.part)

    @property
    def stem(self) -> str:
        """The beginning of an automatic file name."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    @property
    def name(self) -> str:
        """The same with the part of this process."""
        return f"{self.stem}{rank_suffix() or self.part}"

    @property
    def options(self) -> list[str]:
        """The options of the same capture of another process."""
        found = ["--after-capture", self.after, "--watch", self.watch, "--source", self.source]
        found += ["--history", "auto" if self.history is None else str(self.history or "off")]
        found += ["--budget", "off" if self.budget is None else str(self.budget)]
        found += ["--from-step", str(self.from_step)] if self.from_step is not None else []
        found += ["--at-step", ",".join(map(str, self.at_step))] if self.at_step else []
        found += ["--record", self.record] if self.record is not None else []
        found += ["--numbers", str(self.numbers.absolute())] if self.numbers is not None else []
        found += [word for kind in self.on for word in ("--on", kind)]
        found += ["-o", str(self.output.absolute())] if self.output is not None else []
        found += ["-f"] if self.overwrite else []
        return found + {Verbosity.QUIET: ["-q"], Verbosity.VERBOSE: ["-v"]}.get(self.verbosity, [])

    @property
    def again(self) -> list[str]:
        """The command line behind ``reprokit capture`` for the same failures."""
        return [*(word for kind in self.on if self.on != options.DEFAULT_ON for word in ("--on", kind)), *self.command]

    @property
    def command(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.argv]

    def _run(self) -> None:
        if self.is_module:
            launch.run_module(self.target, self.argv)
        else:
            launch.run_script(self.target, self.argv)

    def _check(self) -> None:
        if not self.is_module:
            # Raises `UsageError` for a launcher, whose processes have to be watched one by one
            if _STARTS_SCRIPTS.fullmatch(os.path.basename(self.target)) and not os.path.isfile(self.target):
                raise UsageError(
                    f"`{self.target}` is a command, not a script", hint=_launched([self.target, *self.argv])
                )
            launch.read_script(self.target)
        output = self.file()
        check_name(self.output, None, self.stem)
        if output is not None:
            check_file(output, overwrite=self.overwrite)
        else:
            check_folder(Path.cwd())
        if self.numbers is not None:
            file = self.numbers_file(self.numbers)
            if file.suffix != ".jsonl":
                raise UsageError(f"`{file}` does not end in .jsonl", hint="--numbers run.jsonl")
            for found in (file, older(file)):
                check_file(found, overwrite=self.overwrite, option="--numbers")
            for found in (file, older(file)):
                remove_file(found, "--numbers")

    def numbers_file(self, path: Path) -> Path:
        return with_part(path, rank_suffix() or self.part)

    def _numbers(self) -> str:
        """Where recorded numbers are written, for the first line that is printed."""
        if self.numbers is not None:
            return f", numbers to {shown_path(self.numbers_file(self.numbers))}"
        return "; without one no numbers are kept (`--numbers FILE` keeps them)" if self.record is not None else ""

    def _place(self) -> str:
        output = self.file()
        return shown_path(output) if output is not None else f"{self.name}-step<N>.repro.pt"


class Watch:
    """The session of one run: begins when the script has imported torch, reports its result at the process's end.

    ``_has_numbers``: a step was measured for `--numbers`. ``_has_lost_numbers``: the file could not be written.
    """

    def __init__(self, plan: Capture, folder: Path, reports: str | None = None) -> None:
        self._plan = plan
        self._folder = folder
        self._output = folder / plan.output if plan.output is not None else None
        self._process = os.getpid()
        self._session: Session | None = None
        self.error: BaseException | None = None  # that ended the script
        self._has_failed = self._has_numbers = self._has_lost_numbers = False
        self._reports = reports
        self.children = Children(plan, reports)

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Watch until ``stack`` is left: this process once it has imported torch, and what it starts."""
        stack.enter_context(self.children.starting())
        stack.callback(launch.when_imported("torch", lambda: self.start(stack)))

    @property
    def has_stopped(self) -> bool:
        """True if a failure was captured that ends the run, here or in a process that the script has started."""
        own = self._session is not None and self._session.has_failed and self._plan.after == "stop"
        return own or any(report["has_stopped"] for report in self._told_by_children())

    def _told_by_children(self) -> list[dict[str, Any]]:
        """Reports of all processes below this one, which only the first one reads."""
        return self.children.reports() if self._reports is None else []

    def start(self, stack: contextlib.ExitStack) -> None:
        """Begin to watch; if that fails, say so and let the script run."""
        plan = self._plan
        try:
            from reprokit.capture.session import Session
            from reprokit.snapshot.redact import redact_argv

            session = Session(
                self._output,
                name=plan.stem,
                part=plan.part,
                directory=self._folder,
                after=plan.after,
                command=redact_argv(plan.command),
                overwrite=plan.overwrite,
                quiet=plan.verbosity is Verbosity.QUIET,
                verbose=plan.verbosity is Verbosity.VERBOSE,
                history=plan.history,
                watch=plan.watch,
                on=plan.on,
                source=plan.source,
                budget=plan.budget,
                from_step=plan.from_step,
                at_step=plan.at_step,
                record=plan.record,
                on_numbers=self._writer(plan.numbers) if plan.numbers is not None else None,
            )
            self._session = stack.enter_context(session)
        except Exception as error:
            pass_on(error)
            self._has_failed = True
            say(f"cannot watch this run ({type(error).__name__}: {error}); it goes on unwatched")
            if plan.verbosity is Verbosity.VERBOSE:
                print_exception(error)

    def _writer(self, path: Path) -> Callable[[dict[str, float]], None]:
        """A function that appends the numbers of a step to a file of JSON lines, until that fails."""
        log = LineLog(lambda: self._folder / self._plan.numbers_file(path), _MOST_BYTES)

        def write(numbers: dict[str, float]) -> None:
            if self._has_lost_numbers:
                return
            self._has_numbers = True
            try:
                log.add(json_line(numbers))
            except OSError as error:
                pass_on(error)
                self._has_lost_numbers = True
                reason = (error.strerror or str(error)).lower()
                say(f"`--numbers` cannot write `{shown_path(log.path)}` any more: {reason}; training goes on")

        return write

    def announce(self) -> None:
        """Say what was captured and what to do next, or why nothing was; forked children stay silent."""
        if os.getpid() != self._process:
            return
        children = self._told_by_children()
        with contextlib.suppress(OSError, ValueError):  # the script may have closed its streams
            self._tell_own(children)
            for report in children:
                for result in report["results"]:
                    self._tell_result(Path(result["path"]), result)
        if self._reports is not None:
            self.report(self._reports)
        self.children.forget()

    def _tell_own(self, children: Sequence[Mapping[str, Any]]) -> None:
        """What this process saw; where it is one of several, only what it captured."""
        is_checked_below = any(report["has_checked"] for report in children)
        is_first = self._session is not None and self._reports is None
        if self._plan.numbers is not None and is_first and not (self._has_numbers or is_checked_below):
            file = shown_path(self._plan.numbers_file(self._plan.numbers))
            say(f"no numbers were written to {file}: no step of `torch.optim` was measured", self._plan.verbosity)
        if self._session is not None:
            for path, result in zip(self._session.snapshots, self._session.results, strict=True):
                self._tell_result(path, result)
        closing = self._session.closing if self._session is not None else closing_line(Seen(), self.error)
        is_checked_elsewhere = self.error is None and is_checked_below
        is_told = isinstance(self.error, UsageError)  # no such module: nothing ran
        is_reported = (
            is_told or self._has_failed or is_checked_elsewhere or any(report["results"] for report in children)
        )
        if closing is not None and not is_reported and self._reports is None:
            say(closing + self.children.words(children), self._plan.verbosity)

    def _tell_result(self, path: Path, result: Mapping[str, Any]) -> None:
        if self._plan.json:
            print_json({**result, "path": str(path)})
        for line in captured_lines(path, result, self._folder, self._plan.again):
            say(line, self._plan.verbosity)

    def report(self, folder: str) -> None:
        """Leave what was captured here for the process that has started this one."""
        session = self._session
        found = {
            "pid": self._process,
            "has_stopped": session is not None and session.has_failed and self._plan.after == "stop",
            "has_checked": session is not None and session.has_checked,
            "results": session.results if session is not None else [],
        }
        with contextlib.suppress(OSError, TypeError, ValueError):
            Path(folder, f"{self._process}.json").write_text(json.dumps(found))


@click.command("capture", context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", type=FilePath(), metavar="FILE", help="Where to write the snapshot.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--after-capture",
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
    default="auto",
    show_default=True,
    metavar="N|auto|off",
    callback=lambda context, option, value: _history(value),
    help="Steps between copies of the training state, with which a failure found late is traced back.",
)
@click.option(
    "--budget",
    default=f"{options.DEFAULT_PERCENT:g}",
    show_default=True,
    metavar="PERCENT|off",
    callback=lambda context, option, value: _budget(value),
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
    callback=lambda context, option, value: tuple(sorted(read_steps(value, "--at-step") or ())),
    help="Save these steps although they are healthy, in files with their numbers; training goes on.",
)
@click.option(
    "--record",
    metavar="auto|N[:PATTERN]",
    callback=lambda context, option, value: _record(value),
    help="Measure gradient and weight norms of every parameter: every N steps, or as often as 0.3% of the time allows.",
)
@click.option(
    "--numbers",
    type=FilePath(),
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
def command(target: tuple[str, ...], module: bool, force: bool, after_capture: options.After, **more: Any) -> Capture:
    """Run a training script and save its first failing step.

    Everything after the script's name belongs to the script.
    """
    if not target or not target[0]:
        kind = "module" if module else "script"
        raise UsageError(f"no {kind} given", hint="reprokit capture train.py [ARGS]...")
    return Capture(target[0], module, target[1:], overwrite=force, after=after_capture, **more)


def _launched(words: Sequence[str]) -> str:
    """The command of a launcher with ``reprokit capture`` in front of the script or module that it starts."""
    pairs = list(enumerate(zip(words, [*words[1:], ""], strict=True)))
    start = next((number for number, (word, _) in pairs if _PYTHON.fullmatch(os.path.basename(word))), 0)
    for number, (word, following) in pairs[start:]:
        if word.endswith(".py") or (word in ("-m", "--module") and following not in _LAUNCHING_MODULES):
            return shlex.join([*words[:number], "-m", "reprokit", "capture", *words[number:]])
    return f"{words[0]} [OPTIONS] -m reprokit capture train.py [ARGS]"


_PYTHON = re.compile(r"python[\d.]*")
_STARTS_SCRIPTS = re.compile(rf"torchrun|accelerate|mpiexec|mpirun|srun|{_PYTHON.pattern}")
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def _budget(value: str) -> float | None:
    """``off`` as ``None``, or a percentage."""
    if value == "off":
        return None
    with contextlib.suppress(ValueError):
        percent = float(value.removesuffix("%"))
        if 0 < percent < math.inf:
            return percent
    raise UsageError(f"`{value}` is not a percentage above 0", hint="--budget takes a number such as 10, or `off`")


def _record(value: str | None) -> str | None:
    """``auto``, ``N`` or ``N:PATTERN``."""
    number = (value or "auto").partition(":")[0]
    if number != "auto" and not (number.isdigit() and int(number) >= 1):
        raise UsageError(f"`{value}` is not a pace", hint="--record takes auto, or a number of steps such as 10:h.0.*")
    return value


def _history(value: str) -> int | None:
    """``auto`` as ``None``, ``off`` as 0, or a number of steps."""
    if value == "auto":
        return None
    if value == "off":
        return 0
    if not value.isdigit() or int(value) < 1:
        raise UsageError(f"`{value}` is not a number of steps", hint="--history takes a number, `auto` or `off`")
    return int(value)
