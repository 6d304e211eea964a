"""Exceptions: the same type, the same message less its numbers, raised by the same call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from reprokit.locate.blame import exception_failure, locate_exception
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.program.run import run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.protocol import ALL_WAYS, SignatureCheck
from reprokit.shrink.signature import Signed, ways_given


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

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program; what makes the bad value behind the exception stays."""
        check = super().adopted(failure, whole)
        if failure.cause is None:
            return check
        return replace(check, forbidden=ALL_WAYS - ways_given(whole.program, whole.tensors))

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run until a call raises."""
        if self.wanted is not None and self.wanted.cause is not None:
            return locate_exception(candidate.program, candidate.tensors)
        outcome = run(candidate.program, candidate.tensors, keep=frozenset())
        return exception_failure(candidate.program, outcome) if outcome.error is not None else None

    def summary(self) -> Signed:
        """The signature alone: its kind says which check it is."""
        return self.signature.summary()
