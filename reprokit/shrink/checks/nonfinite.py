"""The default check: values that are not finite, by the call that made the first of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from reprokit.errors import NotReproduced
from reprokit.locate.blame import locate
from reprokit.locate.failure import EXCEPTION, Failure, is_vacuous
from reprokit.locate.ways import MINUS, PLUS
from reprokit.program.ir import OPAQUE, Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.protocol import SignatureCheck
from reprokit.shrink.exact import origin_of
from reprokit.shrink.signature import Given, Signature, Signed, given_by, is_clean


@dataclass(frozen=True)
class NonfiniteCheck(SignatureCheck):
    """NaN or infinity with the same origin, kind and phase.

    Both infinities are one kind, so for an infinity both are forbidden in inputs, unless the snapshot itself was given
    the other one (a mask filled with ``-inf``). ``given`` are the inputs and constants of the snapshot that are bad: a
    NaN that marks a missing label, parameters that an earlier step ruined.
    """

    given: Given = frozenset()

    def recognises(self, failure: Failure) -> bool:
        """True if it is a value that is not finite."""
        return failure.kind != EXCEPTION

    @property
    def spec(self) -> str:
        """``nonfinite``."""
        return "nonfinite"

    def observe(self, candidate: Candidate) -> Failure | None:
        """Follow what is bad to its origin; a program that is only given a bad value to start from shows nothing.

        A result that is too large for its dtype stays one, and does not become a sum that overflows on the way. A
        matrix with repeated singular values does not become one of lower rank.
        """
        found = locate(candidate.program, candidate.tensors)
        if found is None or is_vacuous(found, candidate.program):
            return None
        is_compared = self.wanted is not None and (self.wanted.is_overflow or self.wanted.spectrum)
        return _compared(found, candidate) if is_compared else found

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program; raises `NotReproduced` if no call of it computes that."""
        if is_vacuous(failure, whole.program):
            raise NotReproduced(
                f"no recorded call computes `{failure.input_name}`, so there is nothing to reduce",
                hint=_hint(failure, whole.program),
            )
        given = given_by(whole.program, whole.tensors)
        forbidden = frozenset({failure.way})
        if failure.kind == "inf":
            forbidden |= {PLUS, MINUS} - {way for _, way in given}
        wanted = Signature.of(_compared(failure, whole), whole.program)
        return replace(self, wanted=wanted, forbidden=forbidden - {""}, given=given)

    def is_clean(self, candidate: Candidate) -> bool:
        """True if nothing is bad that was not bad in the snapshot; an incoming gradient has to be finite."""
        return is_clean(candidate.program, candidate.tensors, self.signature, self.forbidden, self.given)

    def summary(self) -> Signed:
        """The signature alone: this check is the default."""
        return self.signature.summary()


def _compared(failure: Failure, candidate: Candidate) -> Failure:
    """The failure with its `Failure.is_overflow` and `Failure.spectrum` filled in."""
    if failure.phase != "forward" and not failure.is_derivative:
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
        return f"the calls of `{name}` are too many to record: capture with fewer rows"
    if "is_compiled" in maker.kwargs or maker.kwargs["source"]:
        return f"capture again with `TORCH_COMPILE_DISABLE=1` in the environment: `{name}` is compiled"
    return f"`{name}` computes it by other means than torch calls"
