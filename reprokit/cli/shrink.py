"""``reprokit shrink``: the smallest program that fails the same way, written as a repro, an issue text and a report."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.block import shown_path
from reprokit.cli.console import FilePath, Seconds, Verbosity, common_options, print_json, say
from reprokit.cli.interrupts import STAGING, Interrupts, deadline, remove_unfinished, too_long
from reprokit.cli.outputs import begin_anew, make_folder, put_in_place
from reprokit.cli.views import View, open_view, print_result, progress_option
from reprokit.errors import Flaky, Interrupted, NotReproduced, ReprokitError
from reprokit.shrink.checks.spec import SYNTAX, Spec, parse
from reprokit.shrink.events import Comparing, Event, Improved, Replayed, Resumed, Writing, Written
from reprokit.shrink.isolation.engines import SYNTAX as ENGINES
from reprokit.shrink.isolation.engines import Engine, check_name, open_engine
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE, own_prefix
from reprokit.snapshot.source import SOURCES
from reprokit.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reprokit.locate.diagnosis import Diagnosis
    from reprokit.program.interpreter import Tensors
    from reprokit.program.ir import Program
    from reprokit.render.script import Script
    from reprokit.render.verify import CleanProcesses
    from reprokit.shrink.reduction import Reduction, WhatIfResult
    from reprokit.snapshot.format import Snapshot
    from reprokit.snapshot.source import Source as SourcePolicy

WHATIF_SECONDS = 5.0
MISMATCH_SECONDS = 30.0  # where every row compiles the program
FIRST_SECONDS = 900.0  # for the first run of the step; the others get limits that follow from it
VERDICTS = {NotReproduced: "not_reproduced", Flaky: "flaky"}


@dataclass(frozen=True, slots=True)
class Shrink:
    """A snapshot to shrink, where to write, and how much work to spend."""

    snapshot: Path
    output: Path | None
    force: bool
    level: str
    max_time: float | None
    max_checks: int | None
    jobs: int | None
    executor: str | None
    resume: bool
    progress: str
    json: bool
    verbosity: Verbosity
    check: Spec | None
    no_whatif: bool
    source: SourcePolicy
    no_data: bool

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.output or default_folder(self.snapshot)

    def execute(self) -> int:
        """Shrink, render and say what came out; raises `NotReproduced`, `Flaky` or `Interrupted`."""
        with Interrupts(self.folder) as interrupts, warnings.catch_warnings(), self._engine() as engine:
            warnings.simplefilter("ignore")  # of calls in what is tried and rendered; training printed its own
            from reprokit.render.verify import CleanProcesses

            file = self.check.file if self.check is not None else None
            with CleanProcesses([file] if file is not None else []) as processes:
                processes.open()  # it loads torch while this process does
                from reprokit.snapshot.format import load

                snapshot = load(self.snapshot)
                with self._made_folder(), contextlib.closing(open_view(self.progress, self.verbosity)) as view:
                    return _Work(self, snapshot, interrupts, processes, view, engine).run()

    def _engine(self) -> contextlib.AbstractContextManager[Engine | None]:
        """The executor that was asked for, ready to run candidates."""
        return open_engine(self.executor) if self.executor is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _made_folder(self) -> Iterator[None]:
        """The folder for the results; after an error what of its path was made here is taken away again if empty."""
        missing = [folder for folder in (self.folder, *self.folder.parents) if not os.path.exists(folder)]
        remove_unfinished(self.folder)
        goes_on = self.resume and os.path.isfile(self.folder / REDUCTION_FILE)
        make_folder(self.folder, overwrite=self.force or goes_on)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # something was written
                for folder in missing:
                    folder.rmdir()
            raise


@dataclass
class _Work:
    """One run of the command: the reducer, its view, the processes that verify, and Ctrl-C."""

    plan: Shrink
    snapshot: Snapshot
    interrupts: Interrupts
    processes: CleanProcesses
    view: View
    engine: Engine | None
    has_best: bool = False

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.plan.folder

    def run(self) -> int:
        """Do everything; the exit code."""
        plan = self.plan
        try:
            reduction, was_interrupted = self._reduce()
        except (NotReproduced, Flaky) as error:
            self._print_verdict(error)
            raise
        self.view.show(Writing(was_interrupted))
        summary = self._write_all(reduction, was_interrupted)
        self.view.close()
        if plan.json:
            print_json(summary)
        if was_interrupted:
            raise _interrupted(summary, self.folder)
        if plan.verbosity is not Verbosity.QUIET and plan.progress != "json":
            print_result(summary, self.folder, plan.verbosity)
        return 0

    def _reduce(self) -> tuple[Reduction, bool]:
        """Reduce the snapshot; the second value is true if Ctrl-C ended the search early."""
        from reprokit.shrink.reducer import shrink
        from reprokit.shrink.reduction import load

        plan = self.plan
        most = max(plan.max_time or 0.0, FIRST_SECONDS)

        def show(event: Event) -> None:
            if isinstance(event, Replayed):
                has_run()
            self.has_best = self.has_best or isinstance(event, (Improved, Resumed))
            self.view.show(event)
            self.interrupts.check()

        self.interrupts.begin()
        try:
            with deadline(most, too_long(most)) as has_run:
                reduction = shrink(
                    self.snapshot,
                    out_dir=self.folder,
                    level=plan.level,
                    max_time=plan.max_time,
                    max_checks=plan.max_checks,
                    check=plan.check.text if plan.check is not None else None,
                    jobs=plan.jobs or (self.engine.num_slots if self.engine is not None else 1),
                    executor=self.engine.executor if self.engine is not None else None,
                    resume=plan.resume,
                    on_event=show,
                    on_minimum=self._write_first,
                )
            reduction = self._complete(reduction)
        except KeyboardInterrupt:
            self.interrupts.answer()
            if not self.has_best:
                raise Interrupted("interrupted before anything smaller was found") from None
            return load(self.folder / REDUCTION_FILE), True
        return reduction, False

    def _write_first(self, reduction: Reduction) -> None:
        """Write the repro before it is verified, and begin that. An error is left to those who write everything."""
        from reprokit.render.script import unverified
        from reprokit.render.texts import TIMES, first_repro

        try:
            reduction, withheld = self._shown(reduction)
            script = first_repro(reduction, self.snapshot, source=self.plan.source, withheld=withheld)
            self._put_repro(unverified(script))
            self.processes.begin(script, TIMES)
        except (ReprokitError, OSError):
            return
        self.view.show(Written(shown_path(self.folder / REPRO_FILE), script.num_lines))

    def _settle(self, reduction: Reduction) -> None:
        """Wait until the repro is verified, and put it in the place of the first one; the context's runs begin."""
        from reprokit.render.texts import TIMES, first_repro, presentable_context

        reduction, withheld = self._shown(reduction)
        script = first_repro(reduction, self.snapshot, source=self.plan.source, withheld=withheld)
        try:
            verification = self.processes.begin(script, TIMES)
            with contextlib.suppress(Exception):  # an error comes up again when the context is written
                context = presentable_context(reduction, self.snapshot)
                if context is not None:
                    self.processes.begin(context, TIMES)
            verification.result()
        except (ReprokitError, OSError) as error:
            file = shown_path(self.folder / REPRO_FILE)
            note = f"the header of `{file}` says that it is not verified"
            raise ReprokitError(f"could not verify `{file}`: {error}", note=note) from error
        self._put_repro(script)

    def _put_repro(self, script: Script) -> None:
        """Write the repro alone; what an earlier run left beside it goes."""
        with tempfile.TemporaryDirectory(prefix=own_prefix(STAGING), dir=self.folder) as staging:
            self._put_check(Path(staging))
            script.write(Path(staging))
            with self.interrupts.held():
                begin_anew(Path(staging), self.folder)

    def _complete(self, reduction: Reduction) -> Reduction:
        """Settle the repro, and add the what-if table and the diagnosis; a failure of these costs nothing else."""
        with self._comparing(reduction) as table:
            self._settle(reduction)
            reduction = replace(reduction, diagnosis=_diagnosed(self.snapshot))
            try:
                return replace(reduction, whatif=table())
            except ReprokitError as error:
                say(f"there is no what-if table: {error.message}", self.plan.verbosity)
        return reduction

    @contextlib.contextmanager
    def _comparing(self, reduction: Reduction) -> Iterator[Callable[[], WhatIfResult]]:
        """The what-if table in the making."""
        from reprokit.shrink.reduction import WhatIfResult
        from reprokit.whatif.table import making_of_reduction

        plan = self.plan
        if plan.no_whatif:
            yield WhatIfResult
            return
        seconds = MISMATCH_SECONDS if reduction.failure.kind == "mismatch" else WHATIF_SECONDS
        self.view.show(Comparing(seconds))
        check = plan.check.text if plan.check is not None else None
        settings = self.snapshot.settings
        with contextlib.ExitStack() as stack:
            try:
                making = making_of_reduction(reduction, settings, seconds=seconds, check=check)
                table = stack.enter_context(making)
            except ReprokitError as error:
                say(f"there is no what-if table: {error.message}", plan.verbosity)
                table = WhatIfResult
            yield table

    def _write_all(self, reduction: Reduction, was_interrupted: bool) -> dict[str, Any]:
        """The contract's summary, with all files written. What was found is on disk whatever happens here."""
        try:
            return self._write(reduction)
        except KeyboardInterrupt:
            raise _interrupted(reduction.summary(), self.folder) from None
        except Exception as error:
            if not was_interrupted:
                raise
            raise _interrupted(reduction.summary(), self.folder) from error

    def _write(self, reduction: Reduction) -> dict[str, Any]:
        """Render beside the results, and put everything in place at once when it is verified."""
        from reprokit.render.texts import render_all

        reduction, withheld = self._shown(reduction)
        with tempfile.TemporaryDirectory(prefix=own_prefix(STAGING), dir=self.folder) as staging:
            self._put_check(Path(staging))
            context = self._render_context(reduction, Path(staging))
            repro = render_all(
                reduction,
                self.snapshot,
                Path(staging),
                source=self.plan.source,
                withheld=withheld,
                context=Path(context["path"]) if context is not None else None,
                processes=self.processes,
            )
            with self.interrupts.held():
                put_in_place(Path(staging), self.folder)
                origin = replace(reduction.origin, file=self.plan.snapshot.name)  # by which `render` finds it again
                replace(reduction, origin=origin).save(self.folder / REDUCTION_FILE)
        fidelity = {"fidelity": self.snapshot.fidelity, "fidelity_note": self.snapshot.fidelity_note}
        summary = {**reduction.summary(), **fidelity, "context": context, "repro": repro}
        return {name: _moved(value, staging, str(self.folder)) for name, value in summary.items()}

    def _shown(self, reduction: Reduction) -> tuple[Reduction, tuple[int, ...]]:
        """The reduction without recorded data where that was asked for, and the inputs that are withheld."""
        if not self.plan.no_data:
            return reduction, ()
        from reprokit.render.withhold import without_data

        return without_data(reduction)

    def _put_check(self, folder: Path) -> None:
        """Copy a check of the user's own, which the repro runs."""
        if self.plan.check is not None and self.plan.check.file is not None:
            shutil.copy(self.plan.check.file, folder)

    def _render_context(self, reduction: Reduction, folder: Path) -> dict[str, Any] | None:
        """Render the files beside the repro. An error in one is printed and does not stop the others."""
        from reprokit.render.texts import render_context

        def show_reason(reason: str) -> None:
            say(f"there is no repro_module.py: {reason}", self.plan.verbosity)

        try:
            return render_context(reduction, self.snapshot, folder, on_reason=show_reason, processes=self.processes)
        except Exception as error:
            show_reason(f"{type(error).__name__}: {error}")
            return None

    def _print_verdict(self, error: ReprokitError) -> None:
        if self.plan.json:
            print_json({"schema": 1, "verdict": VERDICTS[type(error)], "message": error.message, "note": error.note})


def _diagnosed(snapshot: Snapshot) -> Diagnosis | None:
    """The diagnosis. An error in it is printed; the rest of the result stays."""
    from reprokit.locate.diagnose import diagnose
    from reprokit.locate.diagnosis import resting_on_replay
    from reprokit.render.fix_code import fix_code
    from reprokit.render.spelling import in_users_words

    def write(before: Program, after: Program, tensors: Tensors) -> str:
        try:
            return fix_code(before, after, tensors)
        except Exception as error:
            say(f"could not render the fix as code: {type(error).__name__}: {error}")
            return ""

    try:
        found = diagnose(in_users_words(snapshot), write=write)
        if snapshot.fidelity == "unfaithful":
            found = resting_on_replay(found, snapshot.fidelity_note)
        return found
    except Exception as error:
        say(f"no diagnosis: {type(error).__name__}: {error}")
        return None


def _moved(value: Any, old: str, new: str) -> Any:
    """Nested data with paths that begin with one folder given as in another one."""
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, old, new) for item in value]
    return new + value[len(old) :] if isinstance(value, str) and value.startswith(old) else value


def _interrupted(summary: dict[str, Any], folder: Path) -> Interrupted:
    size = f"{counted(summary['calls'], 'call')}, {counted(summary['elements'], 'element')}"
    return Interrupted(f"interrupted; the best so far ({size}) is in `{folder}`, and `--resume` goes on from there")


@click.command("shrink", short_help="Find the smallest program that fails the same way.")
@click.argument("snapshot", type=FilePath(), metavar="FILE")
@click.option("-o", "--output", type=FilePath(), metavar="DIR", help="Folder for the results.")
@click.option("-f", "--force", is_flag=True, help="Write into DIR even if it holds something.")
@click.option(
    "--level",
    type=click.Choice(["op", "module", "step"]),
    default="op",
    show_default=True,
    help="What a piece of the result is.",
)
@click.option("--check", metavar="SPEC", help=f"What counts as the failure: {SYNTAX}. Default: what was captured.")
@click.option("--max-time", type=Seconds(), metavar="S", help="Stop after S seconds.")
@click.option("--max-checks", type=click.IntRange(min=1), metavar="N", help="Stop after N checks.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Candidates to check at once. Default: 1, or what the executor runs at once.",
)
@click.option("--executor", metavar="WHERE", help=f"Where to check candidates: {ENGINES}. Default: here.")
@click.option("--resume", is_flag=True, help="Go on from the reduction that is in DIR.")
@click.option("--no-whatif", is_flag=True, help="Do not run the result in other precisions, compiled and so on.")
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    default="all",
    help="How much of your code the texts show: the lines that a traceback shows, none, or all that was captured.",
)
@click.option("--no-data", is_flag=True, help="Put plain values in the place of recorded ones, or withhold them.")
@progress_option
@common_options
def command(check: str | None, executor: str | None, **options: Any) -> Shrink:
    """Shrink a snapshot to the smallest program that fails the same way.

    DIR gets repro.py, issue.md, report.html, test_repro.py and reduction.pt.
    """
    executor = check_name(executor) if executor is not None else None
    return Shrink(check=parse(check) if check is not None else None, executor=executor, **options)


def default_folder(snapshot: Path) -> Path:
    """A folder in the current one with the snapshot's name: ``train-step7.repro.pt`` gives ``train-step7``."""
    stem = snapshot.name.removesuffix(".pt").removesuffix(".repro")
    return Path(stem if stem != snapshot.name else f"{stem}.shrunk")
