"""The reducer: replay, cut, then rounds of passes until a full round changes nothing.

Knowledge before search: the origin is known from one instrumented run, so the program is cut there first and the checks
are spent on polishing. The best so far is always on disk when there is a folder for it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprokit.errors import NotReproduced, ReprokitError, UsageError
from reprokit.locate.compiled import Compiled
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import determinism
from reprokit.program.statement import variables
from reprokit.shrink import events
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.certainty import Certainty
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.checks.function import FunctionCheck
from reprokit.shrink.checks.mismatch import MismatchCheck
from reprokit.shrink.checks.recorded import ExceptionCheck, NonfiniteCheck, OutOfMemoryCheck
from reprokit.shrink.context.finder import find_context
from reprokit.shrink.context.piece import Context
from reprokit.shrink.events import Event
from reprokit.shrink.explain import Explanation, explain
from reprokit.shrink.isolation.processes import RunLimits
from reprokit.shrink.isolation.runner import Executor, Isolation
from reprokit.shrink.isolation.task import Observe, Task
from reprokit.shrink.oracle import Oracle, OutOfBudget, PartBudget, PartIsOver
from reprokit.shrink.passes.cut import cuts, slice_to
from reprokit.shrink.passes.removal import remove_calls
from reprokit.shrink.passes.setting import drop_autocast, simplify_precision, simplify_setting
from reprokit.shrink.passes.sizes import drop_dimensions, shrink_sizes
from reprokit.shrink.passes.values import simplify_values
from reprokit.shrink.problem import Problem
from reprokit.shrink.reduction import Ledger, Origin, Reduction, Size, load_earlier, origin_of
from reprokit.shrink.signature import Verdict
from reprokit.snapshot.files import REDUCTION_FILE
from reprokit.snapshot.format import Snapshot

LEVELS = ("op", "module", "step")
CUT, EXPLAIN, CONTEXT = "cut", "explain", "context"
_MAX_ROUNDS = 20  # a round that changes nothing ends the search far earlier; this ends a cycle

# In this order: fewer calls make every later check cheaper; strides, padding and flags stand in the way of small sizes;
# and settings are simplified before values, so that an argument that matters is not made superfluous by another value.
PASSES: tuple[tuple[str, Callable[[Problem], None]], ...] = (
    ("calls", remove_calls),
    ("modes", drop_autocast),
    ("setting", simplify_setting),
    ("sizes", shrink_sizes),
    ("dimensions", drop_dimensions),
    ("values", simplify_values),
    ("precision", simplify_precision),
)
STEP_PASSES = ("sizes", "values")  # these leave every call where it is


def shrink(
    snapshot: Snapshot,
    *,
    out_dir: Path | None = None,
    level: str = "op",
    max_time: float | None = None,
    max_checks: int | None = None,
    jobs: int = 1,
    isolation: str = "auto",
    executor: Executor | None = None,
    limits: RunLimits | None = None,
    check: str | None = None,
    observe: Observe | None = None,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
    on_minimum: Callable[[Reduction], None] | None = None,
) -> Reduction:
    """The smallest program found that fails like the snapshot.

    With ``out_dir`` the best so far is kept there, also when Ctrl-C ends the work, and ``resume`` goes on from it.
    ``max_time`` (seconds) and ``max_checks`` bound this run. Raises `NotReproduced` or `Flaky` when the snapshot itself
    does not fail reliably, and `SnapshotError` or `UsageError` when there is nothing to resume from.

    ``level`` is ``op`` for the minimum, with the context beside it; ``module`` for the context as the result; ``step``
    for the whole step with smaller sizes and plainer values. ``check`` says what counts as the failure
    (`checks.spec.SYNTAX`), by default what the snapshot recorded.
    ``isolation`` says where candidates run: ``auto`` (here unless they may crash), ``process``, ``fork`` or ``worker``;
    ``executor``, anything like those of ``concurrent.futures``, takes those that do not run here. ``jobs`` is how many
    run at once; it changes neither the result nor the log. ``limits`` bounds each candidate's time and memory, by
    default in terms of the first run. ``observe`` runs candidates in place of the check.
    ``on_minimum`` is given the reduction when the search is over; explanation and context are not in it yet.
    """
    if level not in LEVELS:
        raise UsageError(f"there is no level `{level}`", hint=f"one of {', '.join(LEVELS)}")
    origin = replace(origin_of(snapshot), check=check or "")
    file = out_dir / REDUCTION_FILE if out_dir is not None else None
    earlier = load_earlier(file, snapshot, origin, level) if resume and file is not None and file.exists() else None
    with warnings.catch_warnings(), determinism(snapshot.settings), _hint_of(snapshot):
        warnings.simplefilter("ignore")
        chosen = choose_check(check, snapshot)
        is_foreign = observe is not None or isinstance(chosen, (FunctionCheck, OutOfMemoryCheck))
        is_foreign = is_foreign or (isinstance(chosen, MismatchCheck) and isinstance(chosen.reference, Compiled))
        task = Task.of(observe or chosen, snapshot.settings)
        with closing(Isolation(task, isolation, jobs, limits, is_foreign, executor)) as places:
            on_event = on_event or (lambda event: None)
            places.on_trouble = lambda trouble: on_event(events.ExecutorLost(trouble))
            oracle = Oracle(chosen, places, max_time, max_checks)
            certainty = Certainty(oracle, places, chosen, snapshot.settings, observe is None, snapshot.failure)
            return _Run(snapshot, file, on_event, origin, earlier, oracle, certainty, level).reduce(on_minimum)


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
    """One reduction in progress. ``stopped`` is why the search ended before everything was tried; ``broken`` are parts
    of the work that ended with an error of their own, ``over`` those that spent their budget."""

    snapshot: Snapshot
    file: Path | None
    on_event: Callable[[Event], None]
    origin: Origin
    earlier: Reduction | None
    oracle: Oracle
    certainty: Certainty
    level: str
    context: Context | None = None
    stopped: str | None = None
    is_minimal: bool = False
    explanation: Explanation = field(default_factory=Explanation)
    broken: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    budgets: dict[str, PartBudget] = field(default_factory=dict)
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def reduce(self, on_minimum: Callable[[Reduction], None] | None = None) -> Reduction:
        """Run the whole schedule."""
        whole = Candidate(self.snapshot.program, self.snapshot.tensors)
        self.ledger = Ledger(whole.num_calls, whole.num_elements)
        self.on_event(events.Started(whole.num_calls, whole.num_elements, self.oracle.max_time, self.oracle.max_checks))
        self.oracle.on_check = self._checked
        whole, runs = self._needed(whole)
        self.certainty.establish(whole, lambda rate: self.on_event(events.Replayed(rate.failed, rate.runs)), runs)
        problem = Problem(whole, self.oracle)
        try:
            self._search(problem)
            if on_minimum is not None:
                on_minimum(self._reduction(problem.best))
            problem.best, is_certain = self.certainty.confirmed(problem.best)
            self.is_minimal = self.is_minimal and is_certain
            self._explain(problem)
            self.seconds = time.monotonic() - self.started
            if self.level == "op":
                with self._failing_open(CONTEXT):
                    self.context = self._find_context(whole)
        except KeyboardInterrupt:
            if problem.best is not whole:
                self.stopped = self.stopped or "interrupted"
                self._keep(problem.best)
            raise
        reduction = self._keep(problem.best)
        self.on_event(
            events.Finished(
                reduction.program.num_calls,
                problem.best.num_elements,
                reduction.checks,
                reduction.one_minimal,
                reduction.stopped,
                tuple(reduction.untried),
            )
        )
        return reduction

    def _search(self, problem: Problem) -> None:
        """Make the problem as small as the budget allows."""
        try:
            self._start(problem)
            problem.on_accept = self._accepted
            self.is_minimal = self._run_rounds(problem)
        except OutOfBudget:
            is_spent = self.oracle.max_checks is not None and self.oracle.checks >= self.oracle.max_checks
            self.stopped = "max-checks" if is_spent else "max-time"

    def _explain(self, problem: Problem) -> None:
        """Say which parts of the result matter; these runs are booked apart."""
        self.oracle.on_check = self._varied
        with self._failing_open(EXPLAIN), self.ledger.passing(EXPLAIN), self._within_budget(EXPLAIN):
            self.explanation = explain(problem)

    def _needed(self, whole: Candidate) -> tuple[Candidate, list[Failure | None]]:
        """The calls that the failure depends on, if they show it without the rest of the step, and the run for that."""
        certainty = self.certainty
        sliced = slice_to(whole, certainty.failure) if certainty.check.is_settled and self.level != "step" else None
        if sliced is None:
            return whole, []
        candidate, failure = sliced
        report = certainty.isolation.report(candidate)
        if report.error is not None or certainty.check.judge(report.observation, candidate) is not Verdict.SAME:
            certainty.isolation.forget_limits()  # those of the slice are too tight for the whole step
            return whole, []
        certainty.failure = failure
        return candidate, [report.observation]

    def _start(self, problem: Problem) -> None:
        """Go on from what is on disk, or cut to the origin."""
        if self.earlier is not None:
            self._resume(problem, self.earlier)
            return
        if self.level == "step":
            return
        if self.level == "module":
            with self._failing_open(CONTEXT):
                self.context = self._find_context(problem.best)
            if self.context is not None:
                problem.best = self.context.candidate
                self.oracle.remember(problem.best, self.context.failure)
                self._accepted(problem.best)
                return
            self.certainty.notes.append("no piece of the model shows the failure: this is the minimum")
        with self._passing(CUT, 0, problem):
            found = problem.oracle.first(cuts(problem.best, self.certainty.failure))
            if found is not None:
                problem.best = found
                self._accepted(found)

    def _resume(self, problem: Problem, earlier: Reduction) -> None:
        """Take over the earlier reduction once it has failed again, with its log, counts and verdicts."""
        candidate = Candidate(earlier.program, earlier.tensors)
        problem.best = candidate
        self.ledger.go_on(earlier)
        self.oracle.on_check = None
        if problem.oracle.check(candidate, "the earlier reduction") is not Verdict.SAME:
            raise NotReproduced(
                "cannot resume: the earlier reduction does not fail any more, while the snapshot does",
                hint="shrink without `--resume`, into another folder with -o or over this one with -f",
            )
        self.certainty.accepted(candidate)
        self.context = earlier.context
        self.oracle.on_check = self._checked
        self.oracle.recall(earlier.known)
        self.on_event(events.Resumed(candidate.num_calls, candidate.num_elements, earlier.checks))

    def _find_context(self, whole: Candidate) -> Context | None:
        """The piece of the model that shows the failure, if that is one value or exception that comes every time."""
        certainty = self.certainty
        if certainty.rule is not None or not isinstance(certainty.check, (NonfiniteCheck, ExceptionCheck)):
            return None
        budget = self._budget(CONTEXT)
        left = None if self.oracle.max_time is None else max(0.0, self.oracle.seconds_left)
        oracle = Oracle(certainty.check, certainty.isolation, left, self.oracle.max_checks)

        def report(candidate: Candidate, verdict: Verdict, change: str) -> None:
            self.on_event(events.ContextChecked(oracle.checks, verdict.value, change))

        oracle.on_check = report
        self.on_event(events.ContextStarted(min(budget.seconds, oracle.seconds_left)))
        with oracle.within(budget):
            found = find_context(whole, certainty.failure, oracle, variables(self.snapshot.program.calls))
        if oracle.was_late and self.oracle.max_time is None:
            self._note_over(CONTEXT)
        return found

    def _passes(self) -> tuple[tuple[str, Callable[[Problem], None]], ...]:
        """What to run in every round at this level."""
        if self.level == "module" and self.context is not None:
            return ()
        return PASSES if self.level != "step" else tuple(row for row in PASSES if row[0] in STEP_PASSES)

    def _run_rounds(self, problem: Problem) -> bool:
        """Repeat all passes until a round changes nothing; whether that happened."""
        for number in range(1, _MAX_ROUNDS + 1):
            before = problem.best
            for name, run_pass in self._passes():
                if name not in self.broken | self.over:
                    with self._failing_open(name), self._passing(name, number, problem):
                        run_pass(problem)
            if problem.best is before:
                return problem.is_exhaustive and self.level == "op" and not self.broken | self.over
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

    def _budget(self, name: str) -> PartBudget:
        """What is left of the budget of a part of the work."""
        if name not in self.budgets:
            self.budgets[name] = PartBudget.after(self.certainty.seconds, self.oracle.max_time, self.oracle.max_checks)
        return self.budgets[name]

    @contextmanager
    def _within_budget(self, name: str) -> Iterator[None]:
        """End a part of the work, and no more, when its budget is spent."""
        try:
            with self.oracle.within(self._budget(name)):
                yield
        except PartIsOver:
            self._note_over(name)

    def _note_over(self, name: str) -> None:
        self.over.add(name)
        self.certainty.notes.append(f"`{name}` spent its budget: search incomplete (`--max-time` raises the budget)")

    @contextmanager
    def _passing(self, name: str, number: int, problem: Problem) -> Iterator[None]:
        """Book and report what a pass does."""
        self.on_event(events.PassStarted(name, number, problem.best.num_calls, problem.best.num_elements))
        with self.ledger.passing(name) as row, self._within_budget(name):
            yield
        is_over = name in self.over
        if not row.successes and not is_over:
            self.ledger.settled.add(name)
        best = problem.best
        self.on_event(
            events.PassEnded(name, number, row.checks, row.successes, best.num_calls, best.num_elements, is_over)
        )

    def _checked(self, candidate: Candidate, verdict: Verdict, change: str) -> None:
        self.ledger.checked(candidate, verdict.value, change)
        self.on_event(
            events.Checked(self.ledger.checks, candidate.num_calls, candidate.num_elements, verdict.value, change),
        )

    def _varied(self, candidate: Candidate, verdict: Verdict, change: str) -> None:
        self.ledger.varied()
        self.on_event(events.Varied(self.ledger.variants, verdict.value, change))

    def _accepted(self, candidate: Candidate) -> None:
        change = self.ledger.accepted(candidate)
        self.certainty.accepted(candidate)
        self._keep(candidate)
        self.on_event(events.Improved(candidate.num_calls, candidate.num_elements, change))

    def _keep(self, best: Candidate) -> Reduction:
        """The reduction as it stands, written to disk if there is a place for it."""
        reduction = self._reduction(best)
        if self.file is not None:
            reduction.save(self.file)
        return reduction

    def _reduction(self, best: Candidate) -> Reduction:
        program, ledger = best.program, self.ledger
        failure = self.oracle.known_failure(best)
        untried = [] if self.is_minimal else [name for name, _ in self._passes() if name not in ledger.settled]
        untried += [] if self.explanation.is_complete and EXPLAIN not in self.broken else [EXPLAIN]
        untried += [CONTEXT] if CONTEXT in self.over else []
        return Reduction(
            program,
            {item.value: best.tensors[item.value] for item in program.inputs},
            failure if failure is not None else self.certainty.failure,
            Size(self.snapshot.program.num_calls, self.snapshot.num_elements),
            self.certainty.check.summary(),
            checks=ledger.checks,
            verdicts={verdict.value: ledger.verdicts.get(verdict.value, 0) for verdict in Verdict},
            seconds=ledger.seconds + (self.seconds or time.monotonic() - self.started),
            reproduces=self.certainty.reproduces,
            explain=self.explanation.inputs,
            one_minimal=self.is_minimal,
            log=list(ledger.log),
            passes=ledger.table(),
            constants=self.explanation.constants,
            nearest=self.explanation.nearest,
            explain_checks=ledger.variants,
            stopped=self.stopped,
            untried=untried,
            notes=list(self.certainty.notes),
            origin=self.origin,
            level=self.level,
            context=self.context,
            known={**(self.earlier.known if self.earlier is not None else {}), **self.oracle.remembered},
        )
