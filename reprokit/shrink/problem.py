"""What a pass works on: the best candidate so far, and a way to propose a better one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.oracle import Oracle, Verdict
from reprokit.shrink.probe import Prober


@dataclass
class Problem:
    """The best candidate and the oracle. Invariant: ``best`` was confirmed by the oracle and only ever gets smaller.

    ``tried_extremes`` remembers for which shapes plain numbers were tried in place of recorded ones. ``is_exhaustive``
    is given up by a pass that leaves single edits untried because there are too many.
    """

    best: Candidate
    oracle: Oracle
    prober: Prober = field(default_factory=Prober)
    on_accept: Callable[[Candidate], None] | None = None
    tried_extremes: set[str] = field(default_factory=set)
    is_exhaustive: bool = True

    def consider(self, candidate: Candidate, change: str) -> bool:
        """Accept ``candidate`` if it is smaller than the best one and fails the same way.

        ``change`` says in a few words what was done. A candidate whose shapes do not fit together costs no check.
        """
        candidate = candidate.pruned()
        if candidate.sort_key >= self.best.sort_key:
            return False
        if self.prober.refuses(candidate, self.best, raises=self.oracle.signature.kind == "exception"):
            return False
        if self.oracle.check(candidate, change) is not Verdict.SAME:
            return False
        self.best = candidate
        if self.on_accept is not None:
            self.on_accept(candidate)
        return True

    @property
    def failure(self) -> Failure:
        """The failure of the best candidate, with its place."""
        found = self.oracle.known_failure(self.best)
        assert found is not None, "the best candidate fails"
        return found
