"""Exceptions: the same type, the same message less its numbers, raised by the same call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reprokit.locate.blame import exception_failure
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.program.run import run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.protocol import SignatureCheck


@dataclass(frozen=True)
class ExceptionCheck(SignatureCheck):
    """An exception of a call, whatever values are bad before it."""

    def recognises(self, failure: Failure) -> bool:
        """Whether a call raised."""
        return failure.kind == EXCEPTION

    @property
    def spec(self) -> str:
        """``exception``."""
        return "exception"

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run until a call raises."""
        outcome = run(candidate.program, candidate.tensors, keep=frozenset())
        return exception_failure(candidate.program, outcome) if outcome.error is not None else None

    def summary(self) -> dict[str, Any]:
        """The signature alone: its kind says which check it is."""
        return self.signature.summary()
