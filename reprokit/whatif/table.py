"""The table: every variant of a program, each in a process of its own, all of it within a budget of time.

A variant that crashes, hangs or floods memory is a row like any other. Compilers, which take seconds, come last and at
once; what the budget does not reach says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import repeat
from typing import cast

from reprokit.errors import UsageError
from reprokit.locate.differences import MISMATCH
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.program.ir import Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.checks.function import FUNCTION
from reprokit.shrink.isolation import apart
from reprokit.shrink.isolation.apart import Child, RunLimits, peak_bytes, wait_for
from reprokit.shrink.isolation.runner import Isolation
from reprokit.shrink.isolation.task import NotObserved, Observe, Report, Task
from reprokit.shrink.reduction import Answered, Reduction, WhatIfResult
from reprokit.shrink.signature import SignatureCheck
from reprokit.snapshot.format import Snapshot
from reprokit.whatif.trial import VARIANTS, Answer, Trial, Trials, Variant, one_line

MINIMUM, CONTEXT, SNAPSHOT = "minimum", "context", "snapshot"
NOT_DONE = "not done within"  # what the detail begins with where there was no time left
SECONDS = 10.0
_LEAST_BYTES = 4 << 30
_LEAST_SECONDS = 0.2  # less is not worth a process
_SECONDS_TO_END = 60.0  # after the budget, for a table in a process of its own

Subjects = Mapping[str, tuple[Candidate, SignatureCheck]]
OnTrial = Callable[[str, Variant, Trial], None]


def of_reduction(
    reduction: Reduction,
    settings: Settings,
    *,
    seconds: float = SECONDS,
    check: str | None = None,
    on_trial: OnTrial | None = None,
) -> WhatIfResult:
    """The table of a reduction's minimum, and of its context where it has one.

    ``check`` is the check that the reduction was made with, if that is a function of the user's: a file that names one
    is no reason to run it, so without it such a reduction raises `UsageError`. ``on_trial`` is given every answer.
    """
    return make_table(_subjects_of(reduction, check), settings, seconds, on_trial=on_trial)


@contextmanager
def making_of_reduction(
    reduction: Reduction, settings: Settings, *, seconds: float = SECONDS, check: str | None = None
) -> Iterator[Callable[[], WhatIfResult]]:
    """Make `of_reduction` in a forked process; the yielded function waits for the table.

    Where the system cannot fork the table is made when it is asked for. The process ends with the block.
    """
    subjects = _subjects_of(reduction, check)

    def make(_: Candidate | None = None) -> WhatIfResult:
        return make_table(subjects, settings, seconds)

    if not apart.can_fork():
        yield make
        return
    with closing(Child(Task(cast(Observe, make)), is_forked=True)) as child:
        child.start(Candidate(Program((), ()), {}), RunLimits(2 * seconds + _SECONDS_TO_END))
        yield lambda: cast(WhatIfResult, wait_for(child, [child]).value())


def _subjects_of(reduction: Reduction, check: str | None) -> Subjects:
    programs = {MINIMUM: (Candidate(reduction.program, reduction.tensors), reduction.failure)}
    context = reduction.context
    if context is not None:
        programs[CONTEXT] = (Candidate(context.program, context.tensors), context.failure)
    spec = check or reduction.signature.check
    return {name: (made, check_of(made, found, spec, check)) for name, (made, found) in programs.items()}


def of_snapshot(snapshot: Snapshot, *, seconds: float = SECONDS, on_trial: OnTrial | None = None) -> WhatIfResult:
    """The table of a whole snapshot. ``on_trial`` is given every answer."""
    whole = Candidate(snapshot.program, snapshot.tensors)
    check = check_of(whole, snapshot.failure, None, None)
    return make_table({SNAPSHOT: (whole, check)}, snapshot.settings, seconds, on_trial=on_trial)


def make_table(
    subjects: Subjects,
    settings: Settings,
    seconds: float,
    variants: Sequence[Variant] = VARIANTS,
    on_trial: OnTrial | None = None,
) -> WhatIfResult:
    """The rows of every subject by its name."""
    checks = {candidate.digest: check for candidate, check in subjects.values()}
    # Reports carry any dataclass of reprokit's; the reducer's are failures.
    task = Task.of(cast(Observe, Trials(checks)), settings)
    with closing(Isolation(task, always_apart=True)) as places:
        return _Table(subjects, places, seconds, variants, on_trial).make()


@dataclass
class _Table:
    """A table in the making."""

    subjects: Subjects
    places: Isolation
    budget: float
    variants: Sequence[Variant]
    on_trial: OnTrial | None
    trials: dict[tuple[str, str], Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._memory = max(_LEAST_BYTES, 2 * peak_bytes())

    def make(self) -> WhatIfResult:
        """Run everything that there is time for."""
        quick = [job for job in self._jobs() if not job[1].is_slow]
        slow = [job for job in self._jobs() if job[1].is_slow]
        compares = any(check.signature.kind == MISMATCH for _, check in self.subjects.values())
        for job in () if compares else quick:
            self._run([job])
        if slow and apart.can_fork():  # what every compiled variant loads, once, for its forked children
            for module in ("torch._dynamo", "torch._inductor.compile_fx"):
                with suppress(Exception):  # the variant then says so itself
                    import_module(module)
        for name in self.subjects:
            self._run([job for job in slow if job[0] == name])
        for job in quick if compares else ():  # which compiler differs is the question
            self._run([job])
        tables = {name: tuple(self._rows(name)) for name in self.subjects}
        return WhatIfResult(self.budget, round(time.monotonic() - self._started, 3), tables)

    def _jobs(self) -> Iterator[tuple[str, Variant]]:
        """What there is to run; the whole table of one subject comes before the next one's."""
        for name, (candidate, check) in self.subjects.items():
            for variant in self.variants:
                is_asked = not variant.is_of_mismatch or check.signature.kind == MISMATCH
                if is_asked and variant.is_of_interest(candidate):
                    yield name, variant

    def _run(self, jobs: Sequence[tuple[str, Variant]]) -> None:
        """Run these at once."""
        left = self.budget - (time.monotonic() - self._started)
        if left < _LEAST_SECONDS:
            self._note(jobs, repeat(self._too_late(), len(jobs)))
            return
        self.places.limits = RunLimits(left, self._memory)
        candidates = [replace(self.subjects[name][0], variant=variant.key) for name, variant in jobs]
        with closing(self.places.reports(candidates)) as reports:
            self._note(jobs, map(self._trial, reports))

    def _note(self, jobs: Sequence[tuple[str, Variant]], trials: Iterable[Trial]) -> None:
        for (name, variant), trial in zip(jobs, trials, strict=True):
            self.trials[name, variant.key] = trial
            if self.on_trial is not None:
                self.on_trial(name, variant, trial)

    def _trial(self, report: Report) -> Trial:
        error = report.error
        if error is None:
            return cast(Trial, report.observation)
        reason = error.reason if isinstance(error, NotObserved) else "error"
        if reason == "crash":
            return Trial(Answer.OTHER, f"crashes: {error}")
        if reason == "time":
            return self._too_late()
        return Trial(Answer.CANNOT_RUN, str(error) if reason == "memory" else one_line(error))

    def _too_late(self) -> Trial:
        return Trial(Answer.CANNOT_RUN, f"{NOT_DONE} the {self.budget:g} s for this table")

    def _rows(self, name: str) -> Iterator[Answered]:
        for variant in self.variants:
            trial = self.trials.get((name, variant.key))
            if trial is not None:
                yield Answered(variant.key, variant.name, trial.answer.value, trial.detail, trial.seconds)


def check_of(candidate: Candidate, failure: Failure, spec: str | None, given: str | None) -> SignatureCheck:
    """The check that knows the failure of a program."""
    if failure.kind == FUNCTION and given is None:
        raise UsageError(
            "this reduction was made with a check of your own, which a file is no reason to run",
            hint="the table is made by `reprokit shrink --check`",
        )
    check = choose_check(spec, Snapshot(candidate.program, dict(candidate.tensors), failure, 0, 0, ""))
    return check if check.is_settled else check.adopted(failure, candidate)
