"""The reducer: replay, cut, then rounds of passes until a full round changes nothing.

Knowledge before search: the origin is known from one instrumented run, so the program is cut there first and the checks
are spent on polishing. The best so far is always on disk when there is a folder for it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprokit.compare.compiled import Compiled
from reprokit.errors import NotReproduced, ReprokitError
from reprokit.locate.failure import Failure
from reprokit.own_work import ignored_warnings
from reprokit.program.interpreter import determinism
from reprokit.program.sites import variables
from reprokit.program.step import Step
from reprokit.shrink import View
from reprokit.shrink.apart import Isolation, Observe, RunLimits, Task
from reprokit.shrink.certainty import Certainty
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.checks.mismatch import MismatchCheck
from reprokit.shrink.checks.predicate import FunctionCheck, PredicateCheck, missing_cause
from reprokit.shrink.checks.recorded import ExceptionCheck, NonfiniteCheck
from reprokit.shrink.context.finder import Context, find_context
from reprokit.shrink.explain import Explanation, explain
from reprokit.shrink.oracle import Oracle, OutOfBudget
from reprokit.shrink.passes.cut import cuts, remove_calls, slice_to
from reprokit.shrink.passes.setting import drop_autocast, simplify_precision, simplify_setting
from reprokit.shrink.passes.sizes import drop_dimensions, shrink_sizes, simplify_recurrent
from reprokit.shrink.passes.values import simplify_values
from reprokit.shrink.problem import Problem
from reprokit.shrink.reduction import LogRow, Origin, Reduction, Size, origin_of
from reprokit.snapshot.files import REDUCTION_FILE
from reprokit.snapshot.format import Snapshot
from reprokit.words import counted

MAX_TIME = 120.0  # seconds; the median search takes four checks
_SEARCH = 0.5  # of the time is for the minimum, the rest for its explanation and for the piece of the model
_MAX_ROUNDS = 20  # a round that changes nothing ends the search far earlier; this ends a cycle

# In this order: fewer calls make every later check cheaper; strides, padding and flags stand in the way of small sizes;
# and settings are simplified before values, so that an argument that matters is not made superfluous by another value.
PASSES: tuple[tuple[str, Callable[[Problem], None]], ...] = (
    ("calls", remove_calls),
    ("modes", drop_autocast),
    ("setting", simplify_setting),
    ("recurrent", simplify_recurrent),
    ("sizes", shrink_sizes),
    ("dimensions", drop_dimensions),
    ("values", simplify_values),
    ("precision", simplify_precision),
)


def shrink(
    snapshot: Snapshot,
    *,
    earlier: Reduction | None = None,
    out_dir: Path | None = None,
    max_time: float = MAX_TIME,
    max_checks: int | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    limits: RunLimits | None = None,
    check: str | None = None,
    observe: Observe | None = None,
    with_piece: bool = True,
    view: View | None = None,
    on_replayed: Callable[[], None] | None = None,
    on_minimum: Callable[[Reduction], None] | None = None,
) -> Reduction:
    """The smallest program found that fails like the snapshot.

    With ``out_dir`` the best so far is kept there; Ctrl-C raises `SearchStopped` with it. The search begins with
    ``earlier``, an earlier reduction of the same snapshot with the same check. ``max_time`` (seconds, after the
    replays) and ``max_checks`` bound the search. Raises `NotReproduced` or `Flaky` when the snapshot itself, or the
    earlier reduction, does not fail reliably.

    ``check`` says what counts as the failure (`spec.CHECKS`), by default what the snapshot recorded.
    ``executor``, any of ``concurrent.futures``, takes the candidates that do not run in this process. ``jobs`` is how
    many run at once; it changes neither the result nor the log. ``limits`` bounds each candidate's time and memory, by
    default in terms of the first run. Without ``with_piece`` no piece of the model is looked for. ``observe`` runs
    candidates in place of the check. ``on_replayed`` is called when the snapshot has failed again, ``on_minimum`` with
    the reduction when the search is over; explanation and context are not in it yet.
    """
    origin = replace(origin_of(snapshot), check=check or "")
    view = view or View()
    with ignored_warnings(), determinism(snapshot.settings), _hint_of(snapshot):
        chosen = choose_check(check, snapshot)
        is_foreign = observe is not None or isinstance(chosen, FunctionCheck)
        is_foreign = is_foreign or (isinstance(chosen, MismatchCheck) and isinstance(chosen.reference, Compiled))
        task = Task.of(observe or chosen, snapshot.settings)
        with closing(Isolation(task, jobs, is_foreign, executor, limits)) as places:
            oracle = Oracle(chosen, places, max_time, math.inf if max_checks is None else max_checks)
            doubt = snapshot.fidelity_note or "" if snapshot.fidelity == "unfaithful" else ""
            certainty = Certainty(oracle, places, chosen, snapshot.settings, observe is None, snapshot.failure, doubt)
            file = out_dir / REDUCTION_FILE if out_dir is not None else None
            no_repro = missing_cause(snapshot) if isinstance(chosen, PredicateCheck) else ""
            run = _Run(snapshot, file, view, origin, earlier, oracle, certainty, no_repro, with_piece)
            return run.reduce(on_replayed, on_minimum)


class SearchStopped(KeyboardInterrupt):
    """Ctrl-C ended the search; ``best`` is the smallest program until then."""

    def __init__(self, best: Reduction) -> None:
        super().__init__()
        self.best = best


@contextmanager
def _hint_of(snapshot: Snapshot) -> Iterator[None]:
    """Let an error about a step that capture did not note say how to note it."""
    try:
        yield
    except NotReproduced as error:
        if snapshot.settings.is_noted is False:
            error.hint = f"capture step {snapshot.step} again with `--from-step {snapshot.step}`"
        raise


@dataclass
class _Run:
    """One reduction in progress."""

    snapshot: Snapshot
    file: Path | None
    view: View
    origin: Origin
    earlier: Reduction | None
    oracle: Oracle
    certainty: Certainty
    no_repro: str
    with_piece: bool
    context: Context | None = None
    stopped: str | None = None  # why the search ended before everything was tried
    is_minimal: bool = False
    explanation: Explanation = field(default_factory=Explanation)
    broken: set[str] = field(default_factory=set)  # parts of the work that ended with an error of their own
    change: str = ""  # of the latest candidate that failed
    place: str = "cut"
    checks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    variants: int = 0
    log: list[LogRow] = field(default_factory=list)
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def reduce(
        self, on_replayed: Callable[[], None] | None, on_minimum: Callable[[Reduction], None] | None
    ) -> Reduction:
        """Run the whole schedule."""
        whole = Step(self.snapshot.program, self.snapshot.tensors)
        most = f"{self.oracle.max_time:g} s"
        most += f" and {counted(int(self.oracle.max_checks), 'check')}" if self.oracle.max_checks < math.inf else ""
        self.view.say(f"start: {_size(whole)}, at most {most}")
        whole, runs = self._needed(whole)
        self.certainty.establish(
            whole, lambda failed, times: self.view.say(f"replay: {failed}/{times} runs fail as recorded"), runs
        )
        if on_replayed is not None:
            on_replayed()
        problem = Problem(whole, self.oracle)
        self.oracle.on_check = self._checked
        self.oracle.started = time.monotonic()
        try:
            if not self.no_repro:
                self._search(problem)
                if on_minimum is not None:
                    on_minimum(self._reduction(problem.best))
                self.is_minimal = self.certainty.confirm(problem.best) and self.is_minimal
                self.oracle.on_check = self._varied
                with self._failing_open("explain"), self.oracle.at_most(0.5):
                    self.explanation = explain(problem)
            self.seconds = time.monotonic() - self.started
            with self._failing_open("context"):
                self.context = self.context or self._find_context(whole)
        except KeyboardInterrupt as interrupt:
            if problem.best is whole:
                raise
            self.stopped = self.stopped or "interrupted"
            raise SearchStopped(self._keep(problem.best)) from interrupt
        reduction = self._keep(problem.best)
        end = "nothing more can go" if self.is_minimal else "stopped early" if self.stopped else "done"
        self.view.show(f"{end}: {_size(problem.best)} after {counted(self.checks, 'check')}")
        return reduction

    def _search(self, problem: Problem) -> None:
        """Make the problem as small as the budget allows."""
        try:
            with self.oracle.at_most(_SEARCH):
                self._start(problem)
                problem.on_accept = self._accepted
                self.is_minimal = self._run_rounds(problem)
        except OutOfBudget as spent:
            self.stopped = str(spent)

    def _needed(self, whole: Step) -> tuple[Step, list[Failure | None]]:
        """The calls that the failure depends on, if they show it without the rest of the step, and the run for that."""
        certainty = self.certainty
        sliced = slice_to(whole, certainty.failure) if certainty.check.wanted is not None else None
        if sliced is None:
            return whole, []
        candidate, failure = sliced
        report = certainty.isolation.report(candidate)
        if report.error is not None or certainty.check.judge(report.found) is not Ruling.SAME:
            certainty.isolation.limits = None  # those of the slice are too tight for the whole step
            return whole, []
        certainty.failure = failure
        return candidate, [report.found]

    def _start(self, problem: Problem) -> None:
        """Cut to the origin, or go on from an earlier reduction."""
        cut = self.oracle.first(cuts(problem.best, self.certainty.failure)) if self.earlier is None else None
        found = cut or self._failing_again(self.earlier)
        if found is not None:
            problem.best = found
            self._accepted(found)
            self.view.say(f"{self.place}: {_size(found)} left")

    def _failing_again(self, earlier: Reduction | None) -> Step | None:
        """An earlier reduction as a candidate; raises `NotReproduced` unless it fails as the snapshot does."""
        if earlier is None:
            return None
        candidate = Step.of(earlier)
        failure = self.oracle.failure(candidate)
        if failure is None or self.oracle.predicate.judge(failure) is not Ruling.SAME:
            raise NotReproduced(
                "the earlier reduction does not fail any more, while the snapshot does",
                hint="shrink the snapshot again, into another folder with -o or over this one with -f",
            )
        self.oracle.remember(candidate, failure)
        self.context, self.place, self.change = earlier.context, "earlier reduction", "the earlier reduction"
        return candidate

    def _find_context(self, whole: Step) -> Context | None:
        """The piece of the model that shows the failure, if that is one value or exception that comes every time."""
        certainty = self.certainty
        if (
            not self.with_piece
            or certainty.is_flaky
            or not isinstance(certainty.check, (NonfiniteCheck, ExceptionCheck))
        ):
            return None
        oracle = Oracle(
            certainty.check, certainty.isolation, max(0.0, self.oracle.seconds_left), self.oracle.max_checks
        )
        oracle.on_check = lambda candidate, verdict, change: self.view.show(
            f"context {oracle.checks}: {change}: {verdict.value}"
        )
        return find_context(whole, certainty.failure, oracle, variables(self.snapshot.program.calls))

    def _run_rounds(self, problem: Problem) -> bool:
        """Repeat all passes until a round changes nothing; whether that happened."""
        for number in range(1, _MAX_ROUNDS + 1):
            before = problem.best
            for name, run_pass in PASSES:
                best, self.place = problem.best, f"round {number}, {name}"
                if name not in self.broken:
                    with self._failing_open(name):
                        run_pass(problem)
                if problem.best is not best:
                    self.view.say(f"{self.place}: {_size(problem.best)} left")
            if problem.best is before:
                return problem.is_exhaustive and not self.broken
        self.stopped = "max-rounds"
        return False

    @contextmanager
    def _failing_open(self, name: str) -> Iterator[None]:
        """An internal error ends only the part that it is in, and is printed."""
        try:
            yield
        except (ReprokitError, OutOfBudget):
            raise
        except Exception as error:
            self.broken.add(name)
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            note = f"`{name}` stopped after an internal error ({first_line}); the other parts ran"
            self.certainty.notes.append(note)

    def _checked(self, candidate: Step, verdict: Ruling, change: str) -> None:
        self.checks += 1
        self.verdicts[verdict.value] += 1
        if verdict is Ruling.SAME:
            self.change = change
        self.view.show(f"{self.place}, check {self.checks}: {change}: {verdict.value} ({_size(candidate)})")

    def _varied(self, candidate: Step, verdict: Ruling, change: str) -> None:
        self.variants += 1
        self.view.show(f"variant {self.variants}: {change}: {verdict.value}")

    def _accepted(self, candidate: Step) -> None:
        self.log.append(LogRow(self.checks, self.change, candidate.num_calls, candidate.num_elements))
        self._keep(candidate)

    def _keep(self, best: Step) -> Reduction:
        """The reduction as it stands, written to disk if there is a place for it."""
        reduction = self._reduction(best)
        if self.file is not None:
            reduction.save(self.file)
        return reduction

    def _reduction(self, best: Step) -> Reduction:
        failure = self.oracle.known_failure(best)
        return Reduction(
            best.program,
            {item.value: best.tensors[item.value] for item in best.program.inputs},
            failure if failure is not None else self.certainty.failure,
            Size(self.snapshot.program.num_calls, self.snapshot.num_elements),
            self.certainty.check.signed(),
            checks=self.checks,
            verdicts={verdict.value: self.verdicts[verdict.value] for verdict in Ruling},
            seconds=self.seconds or time.monotonic() - self.started,
            reproduces=self.certainty.reproduces,
            explain=self.explanation.inputs,
            one_minimal=self.is_minimal,
            log=list(self.log),
            constants=self.explanation.constants,
            nearest=self.explanation.nearest,
            explain_checks=self.variants,
            stopped=self.stopped,
            notes=list(self.certainty.notes),
            origin=self.origin,
            context=self.context,
            no_repro=self.no_repro or None,
        )


def _size(candidate: Step) -> str:
    return f"{counted(candidate.num_calls, 'call')}, {counted(candidate.num_elements, 'element')}"
