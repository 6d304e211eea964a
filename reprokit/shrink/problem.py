"""What a pass works on: the best candidate so far, and a way to propose a better one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from reprokit.locate.failure import Failure
from reprokit.program.ir import Call
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.memory import OutOfMemoryCheck
from reprokit.shrink.classes import find_classes
from reprokit.shrink.dimensions import Class
from reprokit.shrink.oracle import Oracle, Proposal
from reprokit.shrink.probe import Prober


@dataclass
class Problem:
    """The best candidate and the oracle. Invariant: ``best`` was confirmed by the oracle and only ever gets smaller.

    ``tried_extremes`` remembers for which shapes plain numbers were tried in place of recorded ones. ``is_exhaustive``
    is given up by a pass that leaves single edits untried because there are too many; ``max_stretches`` is how many are
    not. ``accepts`` says what else a candidate must be, ``keeps`` which classes of sizes stay as they are, and
    ``renumbers`` in which calls indexes may change.
    """

    best: Candidate
    oracle: Oracle
    prober: Prober = field(default_factory=Prober)
    on_accept: Callable[[Candidate], None] | None = None
    tried_extremes: set[str] = field(default_factory=set)
    is_exhaustive: bool = True
    max_stretches: int = 256
    accepts: Callable[[Candidate], bool] = lambda candidate: True
    keeps: Callable[[Candidate, Class], bool] = lambda candidate, group: False
    renumbers: Callable[[Call], bool] = lambda call: True

    def __post_init__(self) -> None:
        self.prober.before_run = self.oracle.require_time

    def classes(self) -> list[Class]:
        """The classes of sizes of the best candidate that may get smaller."""
        found = find_classes(self.best, self.prober)
        return [group for group in found if not self.keeps(self.best, group)]

    def consider(self, candidate: Candidate, change: str) -> bool:
        """Accept ``candidate`` if it is smaller than the best one and fails the same way.

        ``change`` says in a few words what was done. A candidate whose shapes do not fit together costs no check.
        """
        return self.first([(change, candidate)])

    def first(self, proposals: Iterable[Proposal]) -> bool:
        """Accept the first of the proposed candidates that `consider` would accept; several may run at once.

        The proposals are pairs of a change and a candidate. They may be made one by one as they are asked for, but must
        not depend on the verdict on an earlier one.
        """
        accepted = self.oracle.first(self._worth_a_check(proposals))
        if accepted is None:
            return False
        self.best = accepted
        if self.on_accept is not None:
            self.on_accept(accepted)
        return True

    def _worth_a_check(self, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
        """Those that are smaller than the best candidate and may be well-formed."""
        is_exception = self.oracle.signature.kind == "exception"
        for change, proposed in proposals:
            self.oracle.require_time()
            candidate = proposed.pruned()
            if not candidate.is_smaller_than(self.best) or not self.accepts(candidate):
                continue
            if not self.prober.refuses(candidate, self.best, raises=is_exception):
                yield change, candidate

    @property
    def is_about_sizes(self) -> bool:
        """True if values do not matter, so that no index is better than another."""
        return isinstance(self.oracle.predicate, OutOfMemoryCheck)

    @property
    def failure(self) -> Failure:
        """The failure of the best candidate, with its place."""
        found = self.oracle.known_failure(self.best)
        assert found is not None, "the best candidate fails"
        return found
