"""Mismatch: the results of a candidate differ from those of a reference (`locate.differences`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from reprokit.locate.differences import MISMATCH, LoneCalls, Reference, compare, mismatch
from reprokit.locate.failure import Failure
from reprokit.program.ir import Phase
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.references import Double
from reprokit.shrink.signature import SignatureCheck, Verdict


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
        found = compare(candidate, self.reference, self.way or None)
        if isinstance(found, Failure) or found is None:
            return found
        target = self.wanted.call if self.wanted is not None else None
        if self.wanted is None or target is not None:
            blamed = LoneCalls(self.reference, program, target, self.way or None).of(candidate)
            if blamed is not None:
                return blamed
        phase = Phase.BACKWARD if found.is_gradient else Phase.FORWARD
        return mismatch(found, self.reference, phase)

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program."""
        return replace(super().adopted(failure, whole), way=failure.way)

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """Like any check, and different numbers stay different numbers."""
        verdict = super().judge(observation, candidate)
        is_other_way = observation is not None and observation.way != self.way
        return Verdict.OTHER if verdict is Verdict.SAME and is_other_way else verdict
