"""The variants of a program, and one trial: does the program fail the same way in a variant, how long does a run take?

A variant changes the program, torch's settings around it, or how it is run. A trial happens in a process of its own and
comes back as plain data. Compiled code has no calls to follow a bad value through, so its results are compared with
those of an eager run.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch

from reprokit.locate.compiled import Compiled, CompiledProgram
from reprokit.locate.differences import NOT_FINITE, compare, results_of
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.locate.ways import ways_of
from reprokit.program.interpreter import Outcome, Settings, determinism, run
from reprokit.program.ir import Phase
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.mismatch import MismatchCheck
from reprokit.shrink.checks.references import default_dtype, in_dtype, on_device
from reprokit.shrink.signature import SignatureCheck, Verdict

AS_IT_IS = "as_it_is"
ANOMALY = "detect_anomaly"
COMPILED = "compile:"
Change = Callable[[Candidate], Candidate]
Around = Callable[[], contextlib.AbstractContextManager[None]]
MIN_RUN_TIME = 0.05  # seconds that the benchmark runs a program over and over
_SLOW = 0.5  # seconds from which on one run has to do
_UNSUPPORTED = ("not implemented", "not supported", "unsupported", "does not have a deterministic", "CUBLAS_WORKSPACE",
                "No viable backend", "No available kernel")  # fmt: skip
_ANOMALY_WORDS = "returned nan values"
_ANOMALY_IS_SILENT = "in this program anomaly mode reports nothing"  # it may in the whole step
_MAX_WORDS = 160  # a row of the table stays readable
_Bad = dict[tuple[int, bool], frozenset[str]]


class Unsuitable(Exception):
    """A variant that cannot be run here; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a program. ``key`` is for machines, ``name`` for people.

    ``change`` makes the other program, ``around`` holds torch's settings while it runs, and ``is_of_interest`` tells
    whether it is another way at all for a candidate. With a ``backend`` the program is compiled; ``is_of_mismatch``: it
    says something about compilers that differ from eager only.
    """

    key: str
    name: str
    change: Change = lambda candidate: candidate
    around: Around = contextlib.nullcontext
    is_of_interest: Callable[[Candidate], bool] = lambda candidate: True
    backend: str = ""
    is_of_mismatch: bool = False

    @property
    def is_slow(self) -> bool:
        """True if it takes seconds to start."""
        return bool(self.backend)


def home_of(candidate: Candidate) -> str:
    """The kind of device that a candidate runs on."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    kinds = (candidate.tensors[item.value].device.type for item in items)
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _on(kind: str, candidate: Candidate) -> Candidate:
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsuitable("torch sees no GPU")
    return on_device(candidate, kind)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms, without the compiler that the public switch imports, which takes seconds."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn_only)


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
    def has_attention(candidate: Candidate) -> bool:
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
    Variant(ANOMALY, "`set_detect_anomaly`", around=partial(torch.autograd.set_detect_anomaly, True)),
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


@dataclass(frozen=True)
class Trials:
    """Runs a candidate in the variant that it names. Picklable, as it goes to other processes.

    ``checks`` holds the check of every program by its digest.
    """

    checks: Mapping[str, SignatureCheck]

    def __call__(self, candidate: Candidate) -> Trial:
        """The trial; whatever else goes wrong is a reason why the variant cannot be run."""
        variant = BY_KEY[candidate.variant]
        plain = replace(candidate, variant="")
        check = self.checks[plain.digest]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                changed = variant.change(plain)
                with variant.around():
                    return (
                        _compiled(changed, check, variant.backend)
                        if variant.backend
                        else _eager(changed, plain, check, variant)
                    )
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


def _eager(changed: Candidate, plain: Candidate, check: SignatureCheck, variant: Variant) -> Trial:
    failure = check.observe(changed)
    trial = _judged(failure, changed, plain, check, variant)
    if trial.answer is Answer.CANNOT_RUN:
        return trial
    return replace(trial, seconds=_timed(lambda: run(changed.program, changed.tensors, keep=frozenset())))


def _judged(
    failure: Failure | None, changed: Candidate, plain: Candidate, check: SignatureCheck, variant: Variant
) -> Trial:
    if failure is None:
        return Trial(Answer.PASSES)
    verdict = check.judge(failure, changed)
    is_anomaly = variant.key == ANOMALY
    if verdict is Verdict.SAME:
        spoiled = _spoiled(plain, changed)
        if spoiled is not None:
            return Trial(Answer.OTHER, f"`{spoiled}` is not finite any more when the program begins")
        return Trial(Answer.SAME, _silence(failure, changed) if is_anomaly else "")
    if failure.exception is None:
        return Trial(Answer.OTHER, _words(failure))
    words = exception_line(*failure.exception)
    if is_anomaly and _ANOMALY_WORDS in failure.exception[1]:
        return Trial(Answer.SAME, words)
    is_about_exceptions = check.signature.kind == EXCEPTION
    is_missing = any(part.lower() in failure.exception[1].lower() for part in _UNSUPPORTED)
    return Trial(Answer.OTHER if is_about_exceptions and not is_missing else Answer.CANNOT_RUN, words)


def _silence(failure: Failure, candidate: Candidate) -> str:
    """The words for a failure that anomaly mode does not report, with the reason if that is known."""
    if failure.phase != Phase.BACKWARD or not any(call.is_differentiation for call in candidate.program.calls):
        return f"{_ANOMALY_IS_SILENT} (it only looks for NaN in the backward pass)"
    return f"{_ANOMALY_IS_SILENT} (it only looks for NaN)" if failure.kind == "inf" else _ANOMALY_IS_SILENT


def _spoiled(plain: Candidate, changed: Candidate) -> str | None:
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
    where = " in the backward pass" if failure.phase == Phase.BACKWARD else ""
    return f"{failure.kind} {origin}{where}"


def _compiled(candidate: Candidate, check: SignatureCheck, backend: str) -> Trial:
    if isinstance(check, MismatchCheck) and isinstance(check.reference, Compiled):
        return _compared(candidate, check, backend)
    if check.signature.kind not in ("nan", "inf", EXCEPTION):
        raise Unsuitable(f"`{check.spec}` runs the program in ways of its own")
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


def _compared(candidate: Candidate, check: MismatchCheck, backend: str) -> Trial:
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


def _place_words(candidate: Candidate, value: int, is_gradient: bool) -> str:
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
