"""Mismatch: the results of a program differ from those of a reference, by the first call that differs by itself.

A call is blamed when its own output differs although it was given identical inputs. Where no call does, as with errors
that add up or kernels that a compiler fuses, the whole program is the failure and its origin is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from reprokit.locate.blame import exception_failure
from reprokit.locate.failure import Failure, module_of
from reprokit.program.functions import display_name
from reprokit.program.ir import OPAQUE, ZERO_GRAD, Call, Input, Program, Ref
from reprokit.program.run import Outcome, run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.difference import (
    Difference,
    Incomparable,
    differences,
    halves_in,
    is_above_noise,
    results_of,
)
from reprokit.shrink.checks.protocol import SignatureCheck
from reprokit.shrink.checks.references import Double, Reference
from reprokit.shrink.oracle import Verdict
from reprokit.shrink.recording import copy_of

MISMATCH = "mismatch"
NOT_FINITE = ", not finite"
_EAGER_RUNS = 2


@dataclass(frozen=True)
class MismatchCheck(SignatureCheck):
    """A difference from a reference. ``way`` of its failures is the reference's name, and whether numbers differ or one
    side has a NaN or infinity in their place: these are different failures."""

    reference: Reference = field(default_factory=Double)
    way: str = ""

    def recognises(self, failure: Failure) -> bool:
        """True if results differ."""
        return failure.kind == MISMATCH

    @property
    def spec(self) -> str:
        """``mismatch:fp64``."""
        return f"{MISMATCH}:{self.reference.name}"

    def observe(self, candidate: Candidate) -> Failure | None:
        """Compare the whole program, then single calls."""
        program = candidate.program
        found = compare(candidate, self.reference)
        if isinstance(found, Failure) or found is None:
            return found
        target = self.wanted.call if self.wanted is not None else None
        if self.wanted is None or target is not None:
            blamed = _Blame(self.reference, program, target).of(candidate)
            if blamed is not None:
                return blamed
        phase = "backward" if found.is_gradient else "forward"
        return _failure(found, self.reference, phase)

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program."""
        return replace(super().adopted(failure, whole), way=failure.way)

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """Like any check, and different numbers stay different numbers."""
        verdict = super().judge(observation, candidate)
        is_other_way = observation is not None and observation.way != self.way
        return Verdict.OTHER if verdict is Verdict.SAME and is_other_way else verdict


def compare(candidate: Candidate, reference: Reference) -> Difference | Failure | None:
    """The first result that differs, an exception, or ``None``; raises when the reference alone cannot be run."""
    program = candidate.program
    keep = frozenset(results_of(program))
    try:
        actual, expected = reference.pair(candidate, keep)
    except Exception as error:  # compilers and devices fail in as many ways as there are
        said = (str(error).strip().splitlines() or [""])[0]
        raise Incomparable(
            f"the reference `{reference.name}` cannot be run: {type(error).__name__}: {said}",
            hint="see whether it runs on the whole step, or use another check",
        ) from error
    for outcome in (actual, expected):
        if outcome.error is not None:
            return exception_failure(program, outcome) if outcome.error_call is not None else None
    halves = halves_in(program, candidate.tensors)
    found = list(differences(_ordered(actual, program), _ordered(expected, program), halves))
    if not found:
        return None
    eager = _eager_runs(candidate, keep)
    return next((one for one in found if is_above_noise(one, actual, expected, eager)), None)


def _eager_runs(candidate: Candidate, keep: frozenset[int]) -> list[Outcome]:
    """Two runs as they are; the second one with another number of threads, which adds up in another order."""
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for number in range(_EAGER_RUNS):
            torch.set_num_threads(threads if number == 0 else 1 if threads > 1 else 2)
            outcomes.append(run(candidate.program, candidate.tensors, keep=keep))
    finally:
        torch.set_num_threads(threads)
    if any(outcome.error is not None for outcome in outcomes):
        raise Incomparable("an eager run ended early")
    return outcomes


def _ordered(outcome: Outcome, program: Program) -> Outcome:
    """The outcome with its values in the order in which results are looked at, which a set does not keep."""
    values = {value: outcome.values[value] for value in results_of(program) if value in outcome.values}
    gradients = {i.value: outcome.gradients[i.value] for i in program.inputs if i.value in outcome.gradients}
    return Outcome(values, gradients, outcome.inputs)


class _Stop(Exception):
    """Ends the run at the first call that is to blame."""


@dataclass
class _Blame:
    """An observer of an eager run that compares every call by itself; with ``target`` only calls of that name."""

    reference: Reference
    program: Program
    target: str | None
    found: Failure | None = None
    _given: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Failure | None:
        """The first call that differs although its inputs are identical."""
        with contextlib.suppress(_Stop):
            run(candidate.program, candidate.tensors, observer=self, keep=frozenset())
        return self.found

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what the call reads."""
        self._given = {v: copy_of(values[v]) for v in call.input_refs()} if self._is_asked(call) else {}

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare the call alone."""
        if not self._is_asked(call):
            return
        outputs = tuple(Ref(value) for value in call.output_refs())
        inputs = tuple(Input(value, f"v{value}") for value in self._given)
        alone = Candidate(Program((call,), inputs, outputs), self._given)
        try:
            found = compare(alone, self.reference)
        except Exception:  # what the reference cannot do with one call says nothing about that call
            return
        if isinstance(found, Difference):
            self.found = _failure(found, self.reference, "forward", index, call)
            raise _Stop

    def _is_asked(self, call: Call) -> bool:
        is_special = call.is_differentiation or call.is_optimizer_step or call.target in (ZERO_GRAD, OPAQUE)
        if is_special or call.mode.rng is not None or not call.output_refs():
            return False
        return self.target is None or display_name(call.target) == self.target


def _failure(
    found: Difference, reference: Reference, phase: str, index: int | None = None, call: Call | None = None
) -> Failure:
    return Failure(
        phase,
        MISMATCH,
        reference.name if found.is_finite else reference.name + NOT_FINITE,
        display_name(call.target) if call is not None else None,
        index,
        module=module_of(call) if call is not None else None,
        site=call.site if call is not None else None,
        value=found.value,
        element=found.element,
        num_bad=found.num_bad,
        num_elements=found.num_elements,
    )
