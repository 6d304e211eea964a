"""Mismatch: the results of a program differ from those of a reference, by the first call that differs by itself.

A call is blamed when its own output differs although it was given identical inputs. Where no call does, as with errors
that add up or kernels that a compiler fuses, the whole program is the failure and its origin is none. Tolerances are
those of ``torch.testing.assert_close`` (its documentation lists them), so that a repro can assert with it; where a
program computes in half precision, half precision's hold for all that it returns. Equal NaNs and infinities are equal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from reprokit import native
from reprokit.compare.quantity import at_call
from reprokit.errors import ReprokitError
from reprokit.limits import CpuLimit
from reprokit.locate.blame import exception_failure
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import MISMATCH
from reprokit.locate.notes import starts_of
from reprokit.locate.ways import place_of
from reprokit.program.dataflow import contents
from reprokit.program.functions import display_name
from reprokit.program.interpreter import Outcome, Tensors, run
from reprokit.program.ir import (
    AUTOGRAD_GRAD,
    OPAQUE,
    ZERO_GRAD,
    Call,
    Input,
    Phase,
    Program,
    Ref,
    Symbol,
    iter_leaves,
    iter_refs,
)
from reprokit.program.observe import Trace, copied
from reprokit.program.step import HasProgram, Step

MARGIN = 10.0  # how many times larger than the noise of eager runs a difference has to be
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_EXACT = (0.0, 0.0)
_HALVES = {"torch.float16": torch.float16, "torch.half": torch.float16, "torch.bfloat16": torch.bfloat16}
_CASTS = {"torch.Tensor.half": torch.float16, "torch.Tensor.bfloat16": torch.bfloat16}
OTHER_WAY = "other"  # the reference of a program that makes a result in two ways
NOT_FINITE = ", not finite"


class Reference(Protocol):
    """Another way to run a program."""

    @property
    def name(self) -> str:
        """What follows ``mismatch:`` on the command line."""

    def require(self) -> None:
        """Raise `UsageError` when this machine cannot run it."""

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """What is under suspicion, and what it should equal."""


class Incomparable(ReprokitError):
    """Two results that should be alike have different shapes, or one of them is missing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that differs: a value of the program or the ``.grad`` of one, where, and in how many elements."""

    value: int
    is_gradient: bool
    is_finite: bool  # two different numbers, not a number beside a NaN or an infinity
    element: tuple[int, ...]
    num_bad: int
    num_elements: int


def results_of(program: Program) -> list[int]:
    """The values that a comparison looks at: outputs, what differentiation starts from, its results, parameters."""
    found = dict.fromkeys(ref.value for ref in program.outputs)
    for call in program.calls:
        if call.is_differentiation:
            found.update(dict.fromkeys(starts_of(call)))
        if call.target == AUTOGRAD_GRAD:
            found.update(dict.fromkeys(call.output_refs()))
        elif call.is_optimizer_step:
            found.update(dict.fromkeys(ref.value for ref in iter_refs(call.kwargs["params"])))
    return list(found)


def halves_in(program: Program, tensors: Tensors) -> frozenset[torch.dtype]:
    """The half-precision formats that a program computes in: inputs, casts, arguments and autocast."""
    found = {tensors[item.value].dtype for item in program.inputs}
    for call in program.calls:
        named = iter_leaves((call.args, call.kwargs), Symbol)
        found.update(_HALVES[symbol.name] for symbol in named if symbol.name in _HALVES)
        found.update(_HALVES[name] for _, name in call.mode.autocast if name in _HALVES)
        found.update(dtype for target, dtype in _CASTS.items() if target == call.target)
    return frozenset(found & set(_HALVES.values()))


def tolerances(dtype: torch.dtype, halves: frozenset[torch.dtype]) -> tuple[float, float]:
    """Relative and absolute tolerance for a result of a program that computes in these half-precision formats."""
    if dtype not in _TOLERANCES:
        return _EXACT
    return max(_TOLERANCES[known] for known in (dtype, *halves))


def _difference(
    value: int, is_gradient: bool, actual: torch.Tensor, expected: torch.Tensor, allowed: tuple[float, float]
) -> Difference | None:
    one, other = real_numbers(actual), real_numbers(native.to(expected, actual.dtype))
    if one.shape != other.shape:
        raise Incomparable(f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    relative, absolute = allowed
    finite = native.isfinite(one) & native.isfinite(other)
    far = finite & (native.abs(one - other) > absolute + relative * native.abs(other))
    unlike = ~finite & (one != other) & ~(native.isnan(one) & native.isnan(other))
    is_finite = bool(native.any(far))
    bad = far if is_finite else unlike
    if not bool(native.any(bad)):
        return None
    gaps = native.where(bad, native.abs(one - other) if is_finite else native.ones_like(one), -1.0)
    worst = int(native.argmax(gaps))
    place = place_of(worst, bad.shape)
    num_bad = int(native.sum(native.any(bad, dim=-1) if native.is_complex(actual) else bad))
    return Difference(value, is_gradient, is_finite, place[: native.dim(actual)], num_bad, native.numel(actual))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest gap between two results; infinite where only one of them is finite."""
    first, second = real_numbers(one), real_numbers(native.to(other, one.dtype))
    return largest_gap(first, second) if first.shape == second.shape else float("inf")


def largest_gap(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference of `real_numbers` of one shape; infinite where only one of them is finite."""
    equal = (first == second) | (native.isnan(first) & native.isnan(second))
    gaps = native.nan_to_num(
        native.where(equal, 0.0, native.abs(first - second)), nan=float("inf"), posinf=float("inf")
    )
    return float(native.max(gaps)) if native.numel(gaps) else 0.0


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements on the CPU in float64; of a complex tensor both parts, in a last dimension of 2."""
    plain = native.reshape(contents(native.cpu(tensor)), tensor.shape)
    return native.double(native.view_as_real(plain)) if native.is_complex(plain) else native.double(plain)


def compare(step: HasProgram, reference: Reference, way: str | None = None) -> Difference | Failure | None:
    """The first result that differs (in this ``way`` of a failure), an exception, or ``None``.

    Values come before gradients. The largest difference of a result has to be clearly larger than any between eager
    runs. Raises `Incomparable` when the reference alone cannot be run.
    """
    program = step.program
    results = results_of(program)
    actual, expected = _pair(reference, step, frozenset(results))
    for outcome in (actual, expected):
        if outcome.error is not None:
            return exception_failure(program, outcome) if outcome.error_call is not None else None
    halves = halves_in(program, step.tensors)
    eager = _EagerRuns(step, frozenset(results))
    places = [(value, False) for value in results] + [(item.value, True) for item in program.inputs]
    for value, is_gradient in places:
        one, other = (_result(outcome, value, is_gradient) for outcome in (actual, expected))
        if one is None:
            continue
        if other is None:
            raise Incomparable(f"value {value} is missing")
        found = _difference(value, is_gradient, one, other, tolerances(one.dtype, halves))
        is_of_way = found is not None and way in (None, way_of(found, reference))
        if is_of_way and _largest(one, other) > MARGIN * eager.noise(value, is_gradient):
            return found
    return None


def _pair(reference: Reference, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
    try:
        return reference.pair(step, keep)
    except Exception as error:  # compilers and devices fail in as many ways as there are
        said = (str(error).strip().splitlines() or [""])[0]
        raise Incomparable(
            f"the reference `{reference.name}` cannot be run: {type(error).__name__}: {said}",
            hint="see whether it runs on the whole step, or use another check",
        ) from error


def _result(outcome: Outcome, value: int, is_gradient: bool) -> torch.Tensor | None:
    return (outcome.gradients if is_gradient else outcome.values).get(value)


class _EagerRuns:
    """Two runs as they are, made when they are needed."""

    def __init__(self, step: HasProgram, keep: frozenset[int]) -> None:
        self._step = step
        self._keep = keep

    def noise(self, value: int, is_gradient: bool) -> float:
        """The largest difference between both at one result."""
        results = [_result(outcome, value, is_gradient) for outcome in self._outcomes]
        known = [result for result in results if result is not None]
        return max((_largest(first, second) for first in known for second in known), default=0.0)

    @functools.cached_property
    def _outcomes(self) -> list[Outcome]:
        """The second one with another number of threads, which adds up in another order."""
        program, tensors = self._step.program, self._step.tensors
        threads = native.get_num_threads()
        outcomes = [run(program, tensors, keep=self._keep)]
        try:
            native.set_num_threads(1 if threads > 1 else 2)
            outcomes.append(run(program, tensors, keep=self._keep))
        finally:
            native.set_num_threads(threads)
        if any(outcome.error is not None for outcome in outcomes):
            raise Incomparable("an eager run ended early")
        return outcomes


def way_of(found: Difference, reference: Reference) -> str:
    """The way of a failure: the reference, and whether numbers differ or one side has a NaN or infinity."""
    return reference.name if found.is_finite else reference.name + NOT_FINITE


def first_difference(
    step: HasProgram,
    reference: Reference,
    way: str | None = None,
    *,
    is_whole: bool = False,
    target: str | None = None,
    seconds: float = math.inf,
) -> Failure | None:
    """The first call whose own result differs although it was given identical inputs, else the whole program's failure.

    ``way`` as in `compare`. With ``is_whole`` no call is looked at by itself, with ``target`` only calls of that name,
    after ``seconds`` of CPU time none any more.
    """
    found = compare(step, reference, way)
    if not isinstance(found, Difference):
        return found
    if reference.name == OTHER_WAY:  # the last call of the user's makes the result in the other way
        calls, failure = step.program.calls, _failure(found, reference, Phase.FORWARD)
        return at_call(failure, step.program, max((n for n, c in enumerate(calls) if c.site), default=len(calls) - 1))
    if not is_whole:
        alone = _LoneCalls(step.program, reference, way, target, CpuLimit(seconds, wall=_WAITS * seconds))
        with contextlib.suppress(_Stop):
            alone.run(step.tensors)
        if alone.found is not None:
            return alone.found
    return _failure(found, reference, Phase.BACKWARD if found.is_gradient else Phase.FORWARD)


_WAITS = 10  # times the CPU seconds, by the clock: a compiler may wait for its own processes


class _Stop(Exception):
    """Ends the run at the first call that is to blame."""


class _LoneCalls(Trace[torch.Tensor]):
    """Observes an eager run, and compares every call by itself."""

    def __init__(
        self, program: Program, reference: Reference, way: str | None, target: str | None, limit: CpuLimit
    ) -> None:
        super().__init__(program, copied, {n for n, call in enumerate(program.calls) if _is_comparable(call, target)})
        self.found: Failure | None = None
        self._reference, self._way, self._limit = reference, way, limit

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare the call alone."""
        given = self.reads.pop(index, None)
        self._known.clear()  # one call's operands are held at a time
        if given is None or self._limit.is_spent:
            return
        inputs = tuple(Input(value, f"v{value}") for value in given)
        alone = Step(Program((call,), inputs, tuple(map(Ref, call.output_refs()))), given)
        try:
            found = compare(alone, self._reference, self._way)
        except Exception:  # what the reference cannot do with one call says nothing about that call
            return
        if isinstance(found, Difference):
            self.found = at_call(_failure(found, self._reference, Phase.FORWARD), self.program, index)
            raise _Stop


def _is_comparable(call: Call, target: str | None) -> bool:
    is_special = call.is_differentiation or call.is_optimizer_step or call.target in (ZERO_GRAD, OPAQUE)
    if is_special or call.mode.rng is not None or not call.output_refs():
        return False
    return target is None or display_name(call.target) == target


def _failure(found: Difference, reference: Reference, phase: Phase) -> Failure:
    return Failure(
        phase,
        MISMATCH,
        way_of(found, reference),
        value=found.value,
        element=found.element,
        num_bad=found.num_bad,
        num_elements=found.num_elements,
    )
