"""What if: the same program in other precisions, on the other device, compiled, with one thread, in anomaly mode.

The table has every variant of a program, each run in a process of its own, all of it within a budget of time.

A variant that crashes, hangs or floods memory is a row like any other. Compilers, which take seconds, come last and at
once; what the budget does not reach says so.

A trial says whether the program fails the same way in a variant, and how long a run takes. A variant changes the
program, torch's settings around it, or how it is run. Compiled code has no calls to follow a bad value through, so its
results are compared with those of an eager run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import cast

import torch

from reprokit import torch_private
from reprokit.compare.compiled import Compiled, CompiledProgram
from reprokit.compare.difference import NOT_FINITE, compare, results_of
from reprokit.errors import UsageError
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import FUNCTION
from reprokit.locate.ways import ways_of
from reprokit.own_work import ignored_warnings
from reprokit.program.convert import default_dtype, in_dtype, on_device
from reprokit.program.interpreter import Outcome, Settings, determinism, run
from reprokit.program.step import Step
from reprokit.shrink import apart
from reprokit.shrink.apart import Isolation, NotObserved, Report, RunLimits, Task, peak_bytes
from reprokit.shrink.checks.check import Check, Ruling
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.checks.mismatch import MismatchCheck
from reprokit.shrink.reduction import Answered, Reduction, WhatIfResult
from reprokit.snapshot.format import Snapshot

AS_IT_IS = "as_it_is"
ANOMALY = "detect_anomaly"
COMPILED = "compile:"
Change = Callable[[Step], Step]
Around = Callable[[], contextlib.AbstractContextManager[None]]
MIN_RUN_TIME = 0.05  # seconds that the benchmark runs a program over and over
_SLOW = 0.5  # seconds from which on one run has to do
_UNSUPPORTED = ("not implemented", "not supported", "unsupported", "does not have a deterministic", "CUBLAS_WORKSPACE",
                "No viable backend", "No available kernel")  # fmt: skip
_ANOMALY_WORDS = "returned nan values"
_ANOMALY_IS_SILENT = "anomaly mode reports nothing in the captured step: it looks for NaN in the backward pass only"
_MAX_WORDS = 160  # a row of the table stays readable
_Bad = dict[tuple[int, bool], frozenset[str]]


class Unsuitable(Exception):
    """A variant that cannot be run here; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a program."""

    key: str  # for machines
    name: str  # for people
    change: Change = lambda candidate: candidate  # makes the other program
    around: Around = contextlib.nullcontext  # holds torch's settings while it runs
    is_of_interest: Callable[[Step], bool] = lambda candidate: True  # it is another way at all
    backend: str = ""  # that compiles the program
    is_of_mismatch: bool = False  # about compilers that differ from eager only

    @property
    def is_slow(self) -> bool:
        """True if it takes seconds to start."""
        return bool(self.backend)


def home_of(candidate: Step) -> str:
    """The kind of device that a candidate runs on."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    kinds = (candidate.tensors[item.value].device.type for item in items)
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _on(kind: str, candidate: Step) -> Step:
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsuitable("torch sees no GPU")
    return on_device(candidate, kind)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms, without the compiler that the public switch imports, which takes seconds."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch_private.set_deterministic(True, warn_only=False)
    try:
        yield
    finally:
        torch_private.set_deterministic(before, warn_only=warn_only)


@contextlib.contextmanager
def _attention(backend: str) -> Iterator[None]:
    """One implementation of attention only; the call raises where that does not exist for its device or arguments."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        yield


def _precision(dtype: torch.dtype) -> Variant:
    name = str(dtype).removeprefix("torch.")
    return Variant(name, name, lambda candidate: in_dtype(candidate, dtype), partial(default_dtype, dtype))


def _device(kind: str, name: str) -> Variant:
    return Variant(kind, f"on {name}", partial(_on, kind), is_of_interest=lambda candidate: home_of(candidate) != kind)


def _kernel(key: str, name: str, backend: str) -> Variant:
    def has_attention(candidate: Step) -> bool:
        return any(call.name == "scaled_dot_product_attention" for call in candidate.program.calls)

    around = partial(_attention, backend)
    return Variant(f"attention:{key}", f"attention by the {name} kernel", around=around, is_of_interest=has_attention)


VARIANTS = (
    Variant(AS_IT_IS, "as it is"),
    *map(_precision, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    Variant(
        "autocast_off",
        "autocast off",
        lambda candidate: candidate.with_modes(lambda mode: replace(mode, autocast=())),
        is_of_interest=lambda candidate: any(call.mode.autocast for call in candidate.program.calls),
    ),
    Variant("deterministic", "deterministic algorithms", around=_deterministic),
    Variant("one_thread", "one thread", around=partial(determinism, Settings(num_threads=1))),
    Variant(ANOMALY, "`set_detect_anomaly`, captured step", around=partial(torch.autograd.set_detect_anomaly, True)),
    _kernel("math", "math", "MATH"),
    _kernel("flash", "flash", "FLASH_ATTENTION"),
    _kernel("efficient", "memory-efficient", "EFFICIENT_ATTENTION"),
    _device("cpu", "the CPU"),
    _device("cuda", "CUDA"),
    Variant(f"{COMPILED}eager", "`torch.compile`, graph only (`eager`)", backend="eager", is_of_mismatch=True),
    Variant(f"{COMPILED}aot_eager", "`torch.compile`, aot_eager", backend="aot_eager"),
    Variant(f"{COMPILED}inductor", "`torch.compile`, inductor", backend="inductor"),
)

BY_KEY = {variant.key: variant for variant in VARIANTS}


class Answer(Enum):
    """How a variant ended."""

    SAME = "same"
    OTHER = "other"
    PASSES = "passes"
    CANNOT_RUN = "cannot_run"


@dataclass(frozen=True, slots=True)
class Trial:
    """The answer, one line on how or why, and the median seconds of a run, where it was timed."""

    answer: Answer
    detail: str = ""
    seconds: float | None = None


def trial_of(plain: Step, check: Check, key: str) -> Trial:
    """Run a step in a variant; whatever else goes wrong is a reason why the variant cannot be run."""
    variant = BY_KEY[key]
    with ignored_warnings():
        try:
            changed = variant.change(plain)
            with variant.around():
                if key == ANOMALY:
                    return _in_anomaly_mode(plain, check.failure.kind.raises)
                if variant.backend:
                    return _compiled(changed, check, variant.backend)
                return _eager(changed, plain, check)
        except Exception as error:  # what cannot be converted, compiled or moved fails in as many ways
            return Trial(Answer.CANNOT_RUN, str(error) if isinstance(error, Unsuitable) else one_line(error))


def one_line(error: Exception) -> str:
    """An exception in one line: ``RuntimeError: expected a float``."""
    return exception_line(type(error).__name__, str(error))


def exception_line(kind: str, message: str) -> str:
    """An exception's type with the first line of its message, cut."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    text = f"{kind}: {line}" if line else kind
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 3] + "..."


def _eager(changed: Step, plain: Step, check: Check) -> Trial:
    failure = check.observe(changed)
    trial = _judged(failure, changed, plain, check)
    if trial.answer is Answer.CANNOT_RUN:
        return trial
    return replace(trial, seconds=_timed(lambda: run(changed.program, changed.tensors, keep=frozenset())))


def _in_anomaly_mode(step: Step, is_about_exceptions: bool) -> Trial:
    """Forward and backward pass of a whole step; from its results where none was recorded."""
    outcome = run(step.program, step.tensors)
    error = outcome.error
    if error is None and not any(call.is_differentiation for call in step.program.calls):
        results = [tensor for tensor in outcome.values.values() if tensor.requires_grad]
        try:
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        except RuntimeError as raised:
            error = raised
    if error is None:
        return Trial(Answer.SAME, _ANOMALY_IS_SILENT)
    is_same = _ANOMALY_WORDS in str(error) or is_about_exceptions
    return Trial(Answer.SAME if is_same else Answer.OTHER, one_line(error))


def _judged(failure: Failure | None, changed: Step, plain: Step, check: Check) -> Trial:
    if failure is None:
        return Trial(Answer.PASSES)
    if check.judge(failure) is Ruling.SAME:
        spoiled = _spoiled(plain, changed)
        if spoiled is not None:
            return Trial(Answer.OTHER, f"`{spoiled}` is not finite any more when the program begins")
        return Trial(Answer.SAME)
    if failure.exception is None:
        return Trial(Answer.OTHER, _words(failure))
    words = exception_line(*failure.exception)
    is_about_exceptions = check.failure.kind.raises
    is_missing = any(part.lower() in failure.exception[1].lower() for part in _UNSUPPORTED)
    return Trial(Answer.OTHER if is_about_exceptions and not is_missing else Answer.CANNOT_RUN, words)


def _spoiled(plain: Step, changed: Step) -> str | None:
    """An input that the change itself made bad, such as a number too large for float16."""
    for item in changed.program.inputs:
        if ways_of(changed.tensors[item.value]) - ways_of(plain.tensors[item.value]):
            return item.name
    return None


def _words(failure: Failure) -> str:
    """How it fails otherwise: ``inf from `exp` in the backward pass``."""
    if failure.call is None:
        origin = f"already in `{failure.input_name}`" if failure.input_name else "over the whole step"
    else:
        origin = f"from `{failure.call}`"
    where = " in the backward pass" if failure.in_backward else ""
    return f"{failure.kind} {origin}{where}"


def _compiled(candidate: Step, check: Check, backend: str) -> Trial:
    if isinstance(check, MismatchCheck) and isinstance(check.reference, Compiled):
        return _compared(candidate, check, backend)
    if not check.failure.kind.is_local:
        raise Unsuitable(f"`{check.spec}` is not a failure that a compiled program is checked for")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes of its own would outlive this one
    program = candidate.program
    keep = frozenset(results_of(program))
    eager = run(program, candidate.tensors, keep=keep)
    compiled = CompiledProgram(program, keep, backend)
    try:
        result = compiled.run(candidate.tensors)
    except Exception as error:  # compilers fail in as many ways as there are
        # The compiler wraps what the program raises in an exception of its own
        if eager.error is None:
            return Trial(Answer.CANNOT_RUN, one_line(error))
        if isinstance(error, type(eager.error)) or type(eager.error).__name__ in str(error):
            return Trial(Answer.SAME)
        return Trial(Answer.OTHER, one_line(error))
    found, wanted = _bad_results(result), _bad_results(eager)
    seconds = _timed(lambda: compiled.run(candidate.tensors))
    if not found:
        return Trial(Answer.PASSES, seconds=seconds)
    if eager.error is None and any(ways & wanted.get(place, frozenset()) for place, ways in found.items()):
        return Trial(Answer.SAME, seconds=seconds)
    place, ways = next(iter(found.items()))
    return Trial(Answer.OTHER, f"{'/'.join(sorted(ways))} in {_place_words(candidate, *place)}", seconds)


def _compared(candidate: Step, check: MismatchCheck, backend: str) -> Trial:
    """Does this compiler differ from eager in the way of the failure?"""
    compiler = Compiled(backend)
    found = compare(candidate, compiler, compiler.name + NOT_FINITE * check.way.endswith(NOT_FINITE))
    if isinstance(found, Failure):
        return Trial(Answer.OTHER, exception_line(*found.exception) if found.exception is not None else _words(found))
    return Trial(Answer.PASSES if found is None else Answer.SAME)


def _bad_results(outcome: Outcome) -> _Bad:
    """The results that are not finite, gradients first, with the ways in which they are bad."""
    found = {(value, True): ways_of(tensor) for value, tensor in outcome.gradients.items()}
    found |= {(value, False): ways_of(tensor) for value, tensor in outcome.values.items()}
    return {place: ways for place, ways in found.items() if ways}


def _place_words(candidate: Step, value: int, is_gradient: bool) -> str:
    name = next((item.name for item in candidate.program.inputs if item.value == value), "a result")
    return f"the gradient of `{name}`" if is_gradient else name if name == "a result" else f"`{name}`"


def _timed(step: Callable[[], object]) -> float:
    """The median seconds of a run; of one run alone if that is slow."""
    started = time.perf_counter()
    step()
    once = time.perf_counter() - started
    if once > _SLOW:
        return once
    from torch.utils.benchmark import Timer  # imports setuptools

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MIN_RUN_TIME).median)


MINIMUM, CONTEXT, SNAPSHOT = "minimum", "context", "snapshot"
NOT_DONE = "not done within"  # what the detail begins with where there was no time left
SECONDS = 10.0
_LEAST_BYTES = 4 << 30
_LEAST_SECONDS = 0.2  # less is not worth a process

Subjects = Mapping[str, tuple[Step, Check]]
OnTrial = Callable[[str, Variant, Trial], None]


def of_reduction(
    reduction: Reduction,
    settings: Settings,
    *,
    step: Step | None = None,
    seconds: float = SECONDS,
    check: str | None = None,
    on_trial: OnTrial | None = None,
) -> WhatIfResult:
    """The table of a reduction's minimum, and of its context where it has one.

    ``step`` is the captured step that the reduction was made from. ``check`` is the check that it was made with, if
    that is a function of the user's: a file that names one is no reason to run it, so without it such a reduction
    raises `UsageError`. ``on_trial`` is given every answer.
    """
    programs = {MINIMUM: (Step.of(reduction), reduction.failure)}
    if reduction.context is not None:
        programs[CONTEXT] = (Step.of(reduction.context), reduction.context.failure)
    spec = check or reduction.signature.check
    subjects = {name: (made, check_of(made, found, spec, check)) for name, (made, found) in programs.items()}
    return make_table(subjects, settings, seconds, step=step, on_trial=on_trial)


def of_snapshot(snapshot: Snapshot, *, seconds: float = SECONDS, on_trial: OnTrial | None = None) -> WhatIfResult:
    """The table of a whole snapshot. ``on_trial`` is given every answer."""
    whole = Step.of(snapshot)
    check = check_of(whole, snapshot.failure, None, None)
    return make_table({SNAPSHOT: (whole, check)}, snapshot.settings, seconds, step=whole, on_trial=on_trial)


def make_table(
    subjects: Subjects,
    settings: Settings,
    seconds: float,
    variants: Sequence[Variant] = VARIANTS,
    step: Step | None = None,
    on_trial: OnTrial | None = None,
) -> WhatIfResult:
    """The rows of every subject by its name; ``step`` is the captured step, without which anomaly mode says nothing."""
    with closing(Isolation(is_wary=True)) as places:
        return _Table(subjects, step, places, settings, seconds, variants, on_trial).make()


def _load_compilers() -> None:
    """Load what every compiled variant needs, once, for forked children."""
    for module in (torch_private.DYNAMO, torch_private.INDUCTOR):
        with suppress(Exception):  # the variant then says so itself
            import_module(module)


@dataclass
class _Table:
    """A table in the making."""

    subjects: Subjects
    step: Step | None
    places: Isolation
    settings: Settings
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
        compares = any(check.failure.kind.compares for _, check in self.subjects.values())
        for job in () if compares else quick:
            self._run([job])
        if slow and apart.can_fork():
            _load_compilers()
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
                is_asked = not variant.is_of_mismatch or check.failure.kind.compares
                if variant.key == ANOMALY:  # one run says the same of all subjects
                    is_asked = self.step is not None and name == next(iter(self.subjects))
                if is_asked and variant.is_of_interest(candidate):
                    yield name, variant

    def _run(self, jobs: Sequence[tuple[str, Variant]]) -> None:
        """Run these at once."""
        left = self.budget - (time.monotonic() - self._started)
        if left < _LEAST_SECONDS:
            self._note(jobs, repeat(self._too_late(), len(jobs)))
            return
        self.places.limits = RunLimits(left, self._memory)
        candidates = [self._program(name, variant) for name, variant in jobs]
        runs = [partial(trial_of, check=self.subjects[name][1], key=variant.key) for name, variant in jobs]
        tasks = [Task.of(run_in_variant, self.settings) for run_in_variant in runs]
        with closing(self.places.reports(candidates, tasks)) as reports:
            self._note(jobs, map(self._trial, reports))

    def _program(self, name: str, variant: Variant) -> Step:
        return self.step if variant.key == ANOMALY and self.step is not None else self.subjects[name][0]

    def _note(self, jobs: Sequence[tuple[str, Variant]], trials: Iterable[Trial]) -> None:
        for (name, variant), trial in zip(jobs, trials, strict=True):
            self.trials[name, variant.key] = trial
            if self.on_trial is not None:
                self.on_trial(name, variant, trial)

    def _trial(self, report: Report) -> Trial:
        error = report.error
        if error is None:
            return cast(Trial, report.found)
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


def check_of(candidate: Step, failure: Failure, spec: str | None, given: str | None) -> Check:
    """The check that knows the failure of a program."""
    if failure.kind == FUNCTION and given is None:
        raise UsageError(
            "this reduction was made with a check of your own, which a file is no reason to run",
            hint="the table is made by `reprokit shrink --check`",
        )
    check = choose_check(spec, Snapshot(candidate.program, dict(candidate.tensors), failure, 0, 0, ""))
    return check if check.wanted is not None else check.adopted(failure, candidate)
