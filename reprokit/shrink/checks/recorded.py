"""Checks of failures that a snapshot records: values that are not finite, and exceptions.

Out of memory is not reduced: what is refused here is granted on the next machine, or on this one an hour later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from reprokit.errors import NotReproduced
from reprokit.locate.blame import exception_failure, locate, locate_exception
from reprokit.locate.failure import Failure, is_vacuous
from reprokit.locate.notes import operand_of
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.program.functions import display_name
from reprokit.program.interpreter import run
from reprokit.program.ir import OPAQUE, Program
from reprokit.program.observe import Copies
from reprokit.program.step import Step
from reprokit.rules.match import rule_fits, with_rule
from reprokit.shrink.checks.check import Check, given_by
from reprokit.shrink.given import given_input
from reprokit.shrink.recording import record

_OUT_OF_MEMORY = re.compile("tried to allocate|out of memory|invalid buffer size", re.IGNORECASE)


@dataclass(frozen=True)
class NonfiniteCheck(Check):
    """NaN or infinity with the same origin, kind, phase and local rule.

    The rule is of the origin's operands: a result too large for its dtype does not become a sum that overflows on the
    way, and a matrix with repeated singular values none of lower rank (test_same.py).
    """

    def recognises(self, failure: Failure) -> bool:
        """True if it is a value that is not finite."""
        return not failure.kind.raises

    @property
    def spec(self) -> str:
        """``nonfinite``."""
        return "nonfinite"

    def observe(self, step: Step) -> Failure | None:
        """Follow what is bad to its origin; a program that is only given a bad value to start from shows nothing."""
        wanted = self.wanted
        if wanted is None:
            found = locate(step.program, step.tensors)
            return None if found is None or is_vacuous(found, step.program) else found
        # The rule is of the origin's operands, and the origin has to be such a call: they are copied in the same run.
        names = [display_name(call.target) for call in step.program.calls]
        trace = Copies(step.program, {number for number, name in enumerate(names) if name == wanted.call})
        found = locate(
            step.program,
            step.tensors,
            looks_into_backward=wanted.backward_node is not None,
            through=wanted.through,
            observer=trace,
        )
        if found is None or is_vacuous(found, step.program):
            return None
        if wanted.rule is None:
            return found
        alike = replace(found, rule=wanted.rule)
        is_alike = alike.key() == wanted.key() and rule_fits(wanted.rule, found, step, trace)
        return alike if is_alike else found

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole step; `NotReproduced` if no call of it computes that.

        A new NaN is never fine. Of an infinity both signs are forbidden, unless the snapshot was given the other one (a
        mask filled with ``-inf``); in any other failure a new infinity is a legal value.
        """
        if is_vacuous(failure, whole.program):
            raise NotReproduced(
                f"no recorded call computes `{failure.input_name}`, so there is nothing to reduce",
                hint=_hint(failure, whole.program),
            )
        if failure.is_given:
            raise given_input(failure, whole.program, whole.tensors)
        if failure.operand is None and failure.call_index is not None:  # files of 0.1.0 do not say it
            call = whole.program.calls[failure.call_index]
            failure = replace(failure, operand=operand_of(call, failure.phase, failure.value))
        given, forbidden = given_by(whole), {NAN}
        if failure.through is not None:  # what the origin reads may become an input
            read = record(whole, frozenset({failure.call_index or 0})).inputs
            given |= {(value, way) for (_, value), tensor in read.items() for way in ways_of(tensor)}
        if failure.kind.is_infinite and not failure.in_backward:
            forbidden |= {failure.way} | ({PLUS, MINUS} - {way for _, way in given})
        return replace(self, wanted=with_rule(failure, whole), given=given, forbidden=frozenset(forbidden))


def _hint(failure: Failure, program: Program) -> str:
    """How to record the calls behind an input."""
    makers = (call for call in program.calls if call.target == OPAQUE and failure.value in call.output_refs())
    maker = next(makers, None)
    if maker is None:
        return "it comes from code that is not followed; if that is compiled, capture with `TORCH_COMPILE_DISABLE=1`"
    name = maker.kwargs["name"]
    if "is_scripted" in maker.kwargs:
        return f"`{name}` is compiled by `torch.jit`: capture again with `PYTORCH_JIT=0` in the environment"
    if "is_transform" in maker.kwargs:
        return f"the calls of `{name}` are not recorded: call its function on the failing row without the transform"
    if "is_compiled" in maker.kwargs or maker.kwargs["source"]:
        return f"capture again with `TORCH_COMPILE_DISABLE=1` in the environment: `{name}` is compiled"
    return f"`{name}` computes it by other means than torch calls"


@dataclass(frozen=True)
class ExceptionCheck(Check):
    """An exception of a call, whatever values are bad before it."""

    def recognises(self, failure: Failure) -> bool:
        """True if a call raised."""
        return failure.kind.raises

    @property
    def spec(self) -> str:
        """``exception``."""
        return "exception"

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole step; `NotReproduced` for a refused allocation.

        What makes the bad value behind the exception stays; without one, what the call reads may become an input.
        """
        if is_out_of_memory(failure):
            raise NotReproduced(
                "out of memory depends on the machine; not reduced",
                hint="look at what is held at the failing line, on a GPU with `torch.cuda.memory_summary()`",
            )
        check = super().adopted(failure, whole)
        if failure.cause is not None or failure.call_index is None:
            return check
        read = record(whole, frozenset({failure.call_index})).inputs.values()
        return replace(check, forbidden=check.forbidden.difference(*map(ways_of, read)))

    def observe(self, step: Step) -> Failure | None:
        """Run until a call raises."""
        if self.wanted is not None and self.wanted.cause is not None:
            return locate_exception(step.program, step.tensors)
        outcome = run(step.program, step.tensors, keep=frozenset())
        return exception_failure(step.program, outcome) if outcome.error is not None else None


def is_out_of_memory(failure: Failure) -> bool:
    """True if an allocation was refused."""
    return failure.exception is not None and _OUT_OF_MEMORY.search(failure.exception[1]) is not None
