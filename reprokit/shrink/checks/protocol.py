"""What the oracle asks of a check, and the part that all checks share: judging by signature.

An observation is a `Failure`, or ``None`` when nothing goes wrong. It is made where the candidate runs, which may be
another process; the judgement needs no run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol, Self

from reprokit.errors import ReprokitError
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.oracle import Verdict
from reprokit.shrink.recording import record
from reprokit.shrink.signature import Signature, Signed, same, ways_given

ALL_WAYS = frozenset({NAN, PLUS, MINUS})


class Check(Protocol):
    """A predicate. Frozen and picklable, so that a worker can observe with it."""

    @property
    def signature(self) -> Signature:
        """What must stay the same; raises ``LookupError`` before the check has adopted a failure."""

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run a candidate; may raise for one that cannot be run or compared."""

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """True if the observed failure is the wanted one."""

    def is_clean(self, candidate: Candidate) -> bool:
        """True if nothing that the candidate is given is bad already."""

    def summary(self) -> Signed:
        """The signature as plain data."""


@dataclass(frozen=True)
class SignatureCheck(ABC):
    """A check that knows its failure by a signature. ``forbidden`` are the ways in which no input may be bad.

    A check without a signature has not seen its failure yet; `adopted` gives one that has.
    """

    wanted: Signature | None = None
    forbidden: frozenset[str] = frozenset()

    @property
    def is_settled(self) -> bool:
        """True if the failure in question is known."""
        return self.wanted is not None

    def complaint(self, observation: Failure | None) -> ReprokitError | None:
        """What to say when a run of the snapshot shows that the check itself does not work."""
        return None

    @abstractmethod
    def recognises(self, failure: Failure) -> bool:
        """True if a failure is of the kind that this check is about."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The check as it is written on the command line."""

    @abstractmethod
    def observe(self, candidate: Candidate) -> Failure | None:
        """Run a candidate."""

    @property
    def signature(self) -> Signature:
        """What must stay the same."""
        if self.wanted is None:
            raise LookupError("the check has not seen its failure yet")
        return self.wanted

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program."""
        forbidden = ALL_WAYS - _ways_that_reach(whole, failure)
        return replace(self, wanted=Signature.of(failure, whole.program), forbidden=forbidden)

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """Compare signatures; an exception that is not the failure is a crash."""
        if observation is None:
            return Verdict.PASSES
        if self.wanted is not None and same(Signature.of(observation, candidate.program), self.wanted):
            return Verdict.SAME
        return Verdict.INVALID if observation.kind == EXCEPTION else Verdict.OTHER

    def is_clean(self, candidate: Candidate) -> bool:
        """True if no input or constant is bad in a forbidden way."""
        return not ways_given(candidate.program, candidate.tensors) & self.forbidden

    def summary(self) -> Signed:
        """The signature, and the check that it belongs to."""
        return replace(self.signature.summary(), check=self.spec)


def _ways_that_reach(whole: Candidate, failure: Failure) -> frozenset[str]:
    """Ways in which the snapshot's inputs are bad, or what its origin call reads."""
    ways = ways_given(whole.program, whole.tensors)
    if failure.call_index is None:
        return ways
    recording = record(whole, frozenset({failure.call_index}))
    return ways.union(*(ways_of(tensor) for tensor in recording.inputs.values()))
