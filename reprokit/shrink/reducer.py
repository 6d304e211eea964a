"""The reducer: replay, cut, then rounds of passes until a full round changes nothing.

Knowledge before search: the origin is known from one instrumented run, so the program is cut there first and the checks
are spent on polishing. The best so far is always on disk when there is a folder for it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from reprokit.errors import Flaky, NotReproduced, ReprokitError
from reprokit.locate.failure import Failure
from reprokit.program.run import determinism
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.events import Checked, Event, Finished, PassStarted, Replayed
from reprokit.shrink.explain import explain
from reprokit.shrink.isolation.limits import Limits
from reprokit.shrink.isolation.remote import Executor
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import Observe, Task
from reprokit.shrink.oracle import Oracle, OutOfBudget, Verdict, run_in_process
from reprokit.shrink.passes.calls import remove_calls
from reprokit.shrink.passes.cut import cuts
from reprokit.shrink.passes.setting import drop_autocast, simplify_precision, simplify_setting
from reprokit.shrink.passes.sizes import drop_dimensions, shrink_sizes
from reprokit.shrink.passes.values import simplify_values
from reprokit.shrink.problem import Problem
from reprokit.shrink.reduction import Reduction, load
from reprokit.shrink.signature import Signature, same
from reprokit.snapshot.format import Snapshot

REDUCTION_FILE = "reduction.pt"
REPLAYS = 5
MIN_REPLAYS = 3
_SLOW_REPLAY = 1.0
_MAX_ROUNDS = 20

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


def shrink(
    snapshot: Snapshot,
    *,
    out_dir: Path | None = None,
    level: str = "op",
    max_time: float | None = None,
    jobs: int = 1,
    isolation: str = "auto",
    executor: Executor | None = None,
    limits: Limits | None = None,
    observe: Observe = run_in_process,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Reduction:
    """The smallest program found that fails like the snapshot.

    With ``out_dir`` the best so far is kept there, and ``resume`` goes on from it. Raises `NotReproduced` or `Flaky`
    when the snapshot itself does not fail reliably.

    ``isolation`` says where candidates run: ``auto`` (here unless they may crash), ``process``, ``fork`` or ``worker``;
    ``executor``, anything like those of ``concurrent.futures``, takes those that do not run here. ``jobs`` is how many
    run at once; it changes neither the result nor the log. ``limits`` bounds each candidate's time and memory, by
    default in terms of the first run. ``observe`` is what is looked at in a candidate.
    """
    if level != "op":
        raise ReprokitError(f"`--level {level}` is not available in this version", hint="use `--level op`")
    with warnings.catch_warnings(), determinism(snapshot.settings):
        warnings.simplefilter("ignore")
        task = Task.of(observe, snapshot.settings)
        places = Isolation(task, isolation, jobs, limits, observe is not run_in_process, executor)
        with closing(places):
            return _Run(snapshot, out_dir, max_time, on_event or (lambda event: None), places).reduce(resume)


@dataclass
class _Run:
    """One reduction in progress."""

    snapshot: Snapshot
    out_dir: Path | None
    max_time: float | None
    tell: Callable[[Event], None]
    isolation: Isolation
    log: list[str] = field(default_factory=list)
    reproduces: str = ""
    started: float = field(default_factory=time.monotonic)

    def reduce(self, resume: bool) -> Reduction:
        """Run the whole schedule."""
        snapshot = self.snapshot
        whole = Candidate(snapshot.program, snapshot.tensors)
        oracle = Oracle(
            Signature.of(snapshot.failure, snapshot.program),
            frozenset({snapshot.failure.way} - {""}),
            snapshot.settings,
            self.max_time,
            isolation=self.isolation,
            on_check=self._checked,
        )
        self.oracle = oracle
        self._replay(whole, oracle)
        problem = Problem(whole, oracle)
        is_minimal = False
        try:
            self._start(problem, resume)
            problem.on_accept = self._accepted
            is_minimal = self._run_rounds(problem)
        except OutOfBudget:
            pass
        reduction = self._reduction(problem.best, is_minimal)
        reduction.explain = explain(problem)
        reduction.checks, reduction.verdicts = oracle.checks, self._verdicts()
        reduction.seconds = time.monotonic() - self.started
        self._keep(reduction)
        self.tell(Finished(reduction.program.num_calls, problem.best.num_elements, oracle.checks, is_minimal))
        return reduction

    def _replay(self, whole: Candidate, oracle: Oracle) -> None:
        """Run the snapshot a few times; all runs must fail as recorded."""
        outcomes: list[Failure | None] = []
        while len(outcomes) < REPLAYS:
            started = time.monotonic()
            outcomes.append(oracle.failure(whole))
            if len(outcomes) >= MIN_REPLAYS and time.monotonic() - started > _SLOW_REPLAY:
                break
        matching = sum(f is not None and same(Signature.of(f, whole.program), oracle.signature) for f in outcomes)
        self.reproduces = f"{matching}/{len(outcomes)}"
        self.tell(Replayed(matching, len(outcomes)))
        if matching == 0:
            raise NotReproduced(
                "the snapshot does not fail again",
                hint="was it made with another torch or device?",
                note=_told(outcomes),
            )
        if matching < len(outcomes):
            raise Flaky(
                f"the snapshot fails in {matching} of {len(outcomes)} runs",
                hint="`torch.use_deterministic_algorithms(True)` may make it fail every time",
                note=f"reproduces {self.reproduces}",
            )

    def _start(self, problem: Problem, resume: bool) -> None:
        """Go on from what is on disk, or cut to the origin."""
        file = self.out_dir / REDUCTION_FILE if self.out_dir is not None else None
        if resume and file is not None and file.exists():
            earlier = load(file)
            candidate = Candidate(earlier.program, earlier.tensors)
            if problem.oracle.check(candidate, "the earlier reduction") is Verdict.SAME:
                self.log = list(earlier.log)
                problem.best = candidate
                return
        found = problem.oracle.first(cuts(problem.best, self.snapshot.failure))
        if found is not None:
            problem.best = found
            self._accepted(found)

    def _run_rounds(self, problem: Problem) -> bool:
        """Repeat all passes until a round changes nothing; whether that happened."""
        for number in range(1, _MAX_ROUNDS + 1):
            before = problem.best
            for name, run_pass in PASSES:
                self.tell(PassStarted(name, number, problem.best.num_calls, problem.best.num_elements))
                run_pass(problem)
            if problem.best is before:
                return problem.is_exhaustive
        return False

    def _checked(self, candidate: Candidate, verdict: Verdict, change: str) -> None:
        number = self.oracle.checks
        self.tell(Checked(number, candidate.num_calls, candidate.num_elements, verdict.value, change))
        if verdict is Verdict.SAME and change != "explain":
            self.log.append(f"{number}: {change}: {candidate.num_calls} calls, {candidate.num_elements} elements")

    def _accepted(self, candidate: Candidate) -> None:
        if self.out_dir is not None:
            self._keep(self._reduction(candidate, False))

    def _keep(self, reduction: Reduction) -> None:
        if self.out_dir is not None:
            reduction.save(self.out_dir / REDUCTION_FILE)

    def _reduction(self, candidate: Candidate, is_minimal: bool) -> Reduction:
        program, tensors = candidate.program, dict(candidate.tensors)
        failure = self.oracle.known_failure(candidate)
        return Reduction(
            program,
            {item.value: tensors[item.value] for item in program.inputs},
            failure if failure is not None else self.snapshot.failure,
            {"calls": self.snapshot.program.num_calls, "elements": self.snapshot.num_elements},
            self.oracle.signature.summary(),
            self.oracle.checks,
            self._verdicts(),
            time.monotonic() - self.started,
            self.reproduces,
            [],
            is_minimal,
            list(self.log),
        )

    def _verdicts(self) -> dict[str, int]:
        return {verdict.value: self.oracle.verdicts[verdict.value] for verdict in Verdict}


def _told(outcomes: list[Failure | None]) -> str:
    """What happened instead, in a few words."""
    failure = next((found for found in outcomes if found is not None), None)
    if failure is None:
        return "nothing goes wrong in a replay"
    return f"a replay gives {failure.kind} from `{failure.call or failure.input_name}` in the {failure.phase} phase"
