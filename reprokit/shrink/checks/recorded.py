"""Checks of failures that a snapshot records: values that are not finite, and exceptions.

Out of memory is not reduced: what is refused here is granted on the next machine, or on this one an hour later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from reprokit.errors import NotReproduced
from reprokit.locate.blame import exception_failure, locate, locate_exception
from reprokit.locate.failure import EXCEPTION, Failure, is_vacuous
from reprokit.locate.ways import MINUS, PLUS, ways_of
from reprokit.program.interpreter import run
from reprokit.program.ir import OPAQUE, Phase, Program
from reprokit.program.step import Step
from reprokit.shrink.exact import origin_of
from reprokit.shrink.given import given_input
from reprokit.shrink.recording import record
from reprokit.shrink.signature import (
    ALL_WAYS,
    Given,
    Signature,
    SignatureCheck,
    Signed,
    given_by,
    is_clean,
    ways_given,
)

_OUT_OF_MEMORY = re.compile("tried to allocate|out of memory|invalid buffer size", re.IGNORECASE)


@dataclass(frozen=True)
class NonfiniteCheck(SignatureCheck):
    """NaN or infinity with the same origin, kind and phase.

    Both infinities are one kind, so for an infinity both are forbidden in inputs, unless the snapshot itself was given
    the other one (a mask filled with ``-inf``). ``given`` are the inputs and constants of the snapshot that are bad: a
    NaN that marks a missing label, parameters that an earlier step ruined. ``through`` is `Failure.through`.
    """

    given: Given = frozenset()
    through: int | None = None

    def recognises(self, failure: Failure) -> bool:
        """True if it is a value that is not finite."""
        return failure.kind != EXCEPTION

    @property
    def spec(self) -> str:
        """``nonfinite``."""
        return "nonfinite"

    def observe(self, candidate: Step) -> Failure | None:
        """Follow what is bad to its origin; a program that is only given a bad value to start from shows nothing.

        A result that is too large for its dtype stays one, and does not become a sum that overflows on the way. A
        matrix with repeated singular values does not become one of lower rank.
        """
        is_gradient = self.wanted is not None and self.wanted.backward_node is not None
        found = locate(candidate.program, candidate.tensors, looks_into_backward=is_gradient, through=self.through)
        if found is None or is_vacuous(found, candidate.program):
            return None
        is_compared = self.wanted is not None and (self.wanted.is_overflow or self.wanted.spectrum)
        return _compared(found, candidate) if is_compared else found

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole program; `NotReproduced` if no call of it computes that."""
        if is_vacuous(failure, whole.program):
            raise NotReproduced(
                f"no recorded call computes `{failure.input_name}`, so there is nothing to reduce",
                hint=_hint(failure, whole.program),
            )
        if failure.is_given:
            raise given_input(failure, whole.program, whole.tensors)
        given = given_by(whole.program, whole.tensors)
        if failure.through is not None:  # what the origin reads may become an input
            read = record(whole, frozenset({failure.call_index or 0})).inputs
            given |= {(value, way) for (_, value), tensor in read.items() for way in ways_of(tensor)}
        forbidden = frozenset({failure.way})
        if failure.kind == "inf":
            forbidden |= {PLUS, MINUS} - {way for _, way in given}
        wanted = Signature.of(_compared(failure, whole), whole.program)
        return replace(self, wanted=wanted, forbidden=forbidden - {""}, given=given, through=failure.through)

    def is_clean(self, candidate: Step) -> bool:
        """True if nothing is bad that was not bad in the snapshot; an incoming gradient has to be finite."""
        return is_clean(candidate.program, candidate.tensors, self.signature, self.forbidden, self.given)

    def summary(self) -> Signed:
        """The signature alone: this check is the default."""
        return self.signature.summary()


def _compared(failure: Failure, candidate: Step) -> Failure:
    """The failure with its `Failure.is_overflow` and `Failure.spectrum` filled in."""
    if failure.phase != Phase.FORWARD and not failure.is_derivative:
        return failure
    origin = origin_of(candidate.program, candidate.tensors, failure)
    if origin is None:
        return failure
    spectrum = origin.spectrum if failure.is_derivative else ""
    return replace(failure, is_overflow=origin.is_overflow(failure), spectrum=spectrum)


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
class ExceptionCheck(SignatureCheck):
    """An exception of a call, whatever values are bad before it."""

    def recognises(self, failure: Failure) -> bool:
        """True if a call raised."""
        return failure.kind == EXCEPTION

    @property
    def spec(self) -> str:
        """``exception``."""
        return "exception"

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole program; what makes the bad value behind the exception stays.

        Raises `NotReproduced` for a refused allocation.
        """
        if is_out_of_memory(failure):
            raise NotReproduced(
                "out of memory depends on the machine; not reduced",
                hint="look at what is held at the failing line, on a GPU with `torch.cuda.memory_summary()`",
            )
        check = super().adopted(failure, whole)
        if failure.cause is None:
            return check
        return replace(check, forbidden=ALL_WAYS - ways_given(whole.program, whole.tensors))

    def observe(self, candidate: Step) -> Failure | None:
        """Run until a call raises."""
        if self.wanted is not None and self.wanted.cause is not None:
            return locate_exception(candidate.program, candidate.tensors)
        outcome = run(candidate.program, candidate.tensors, keep=frozenset())
        return exception_failure(candidate.program, outcome) if outcome.error is not None else None

    def summary(self) -> Signed:
        """The signature alone: its kind says which check it is."""
        return self.signature.summary()


def is_out_of_memory(failure: Failure) -> bool:
    """True if an allocation was refused."""
    return failure.exception is not None and _OUT_OF_MEMORY.search(failure.exception[1]) is not None
