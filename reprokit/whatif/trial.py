"""One program in one variant: does it fail the same way, and how long does a run take?

A trial happens in a process of its own and comes back as plain data. Compiled code has no calls to follow a bad value
through, so its results are compared with those of an eager run.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch.utils.benchmark import Timer

from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.locate.ways import ways_of
from reprokit.program.run import Outcome, run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.compiled import CompiledProgram
from reprokit.shrink.checks.difference import results_of
from reprokit.shrink.checks.protocol import SignatureCheck
from reprokit.shrink.oracle import Verdict
from reprokit.whatif.variants import ANOMALY, BY_KEY, Unsuitable, Variant

MIN_RUN_TIME = 0.05  # seconds that the benchmark runs a program over and over
_SLOW = 0.5  # seconds from which on one run has to do
_UNSUPPORTED = ("not implemented", "not supported", "unsupported", "does not have a deterministic", "CUBLAS_WORKSPACE",
                "No viable backend", "No available kernel")  # fmt: skip
_ANOMALY_WORDS = "returned nan values"
_ANOMALY_IS_SILENT = "in this program anomaly mode reports nothing"  # it may in the whole step
_MAX_WORDS = 160
_Bad = dict[tuple[int, bool], frozenset[str]]


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
    return told(type(error).__name__, str(error))


def told(kind: str, message: str) -> str:
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
    words = told(*failure.exception)
    if is_anomaly and _ANOMALY_WORDS in failure.exception[1]:
        return Trial(Answer.SAME, words)
    is_about_exceptions = check.signature.kind == EXCEPTION
    is_missing = any(part.lower() in failure.exception[1].lower() for part in _UNSUPPORTED)
    return Trial(Answer.OTHER if is_about_exceptions and not is_missing else Answer.CANNOT_RUN, words)


def _silence(failure: Failure, candidate: Candidate) -> str:
    """The words for a failure that anomaly mode does not report, with the reason if that is known."""
    if failure.phase != "backward" or not any(call.is_differentiation for call in candidate.program.calls):
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
    where = " in the backward pass" if failure.phase == "backward" else ""
    return f"{failure.kind} {origin}{where}"


def _compiled(candidate: Candidate, check: SignatureCheck, backend: str) -> Trial:
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
        return _compiled_raised(error, eager.error)
    found, wanted = _bad_results(result), _bad_results(eager)
    seconds = _timed(lambda: compiled.run(candidate.tensors))
    if not found:
        return Trial(Answer.PASSES, seconds=seconds)
    if eager.error is None and any(ways & wanted.get(place, frozenset()) for place, ways in found.items()):
        return Trial(Answer.SAME, seconds=seconds)
    place, ways = next(iter(found.items()))
    return Trial(Answer.OTHER, f"{'/'.join(sorted(ways))} in {_place_words(candidate, *place)}", seconds)


def _compiled_raised(error: Exception, wanted: Exception | None) -> Trial:
    """The compiler wraps what the program raises in an exception of its own."""
    if wanted is None:
        return Trial(Answer.CANNOT_RUN, one_line(error))
    if isinstance(error, type(wanted)) or type(wanted).__name__ in str(error):
        return Trial(Answer.SAME)
    return Trial(Answer.OTHER, one_line(error))


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
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MIN_RUN_TIME).median)
