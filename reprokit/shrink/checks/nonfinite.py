"""The default check: values that are not finite, by the call that made the first of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from reprokit.locate.blame import locate
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.locate.ways import MINUS, PLUS
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.protocol import SignatureCheck
from reprokit.shrink.signature import Signature, constant_ways, is_clean, ways_given


@dataclass(frozen=True)
class NonfiniteCheck(SignatureCheck):
    """NaN or infinity with the same origin, kind and phase.

    Both infinities are one kind, so for an infinity both are forbidden in inputs, unless the snapshot itself was given
    the other one (a mask filled with ``-inf``). ``told`` are the ways in which the origin's constants are bad.
    """

    told: frozenset[str] = frozenset()

    def recognises(self, failure: Failure) -> bool:
        """Whether it is a value that is not finite."""
        return failure.kind != EXCEPTION

    @property
    def spec(self) -> str:
        """``nonfinite``."""
        return "nonfinite"

    def observe(self, candidate: Candidate) -> Failure | None:
        """Follow what is bad to its origin."""
        return locate(candidate.program, candidate.tensors)

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program."""
        forbidden = frozenset({failure.way})
        if failure.kind == "inf":
            forbidden |= {PLUS, MINUS} - ways_given(whole.program, whole.tensors)
        told = constant_ways(whole.program.calls[failure.call_index]) if failure.call_index is not None else ()
        wanted = Signature.of(failure, whole.program)
        return replace(self, wanted=wanted, forbidden=forbidden - {""}, told=frozenset(told))

    def is_clean(self, candidate: Candidate) -> bool:
        """A NaN is never fine, an incoming gradient has to be finite, and no infinity of the failure's way is."""
        return is_clean(candidate.program, candidate.tensors, self.signature, self.forbidden, self.told)

    def summary(self) -> dict[str, Any]:
        """The signature alone: this check is what is meant when nothing is said."""
        return self.signature.summary()
