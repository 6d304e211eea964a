"""What a pass works on: the best candidate so far, a way to propose a better one, and which indexes it needs most."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from reprokit.locate.failure import Failure
from reprokit.program.interpreter import run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Class, InputAxis, find_classes
from reprokit.shrink.oracle import Oracle, Proposal
from reprokit.shrink.recording import shapes_of
from reprokit.shrink.risks import is_safe


@dataclass
class Problem:
    """The best candidate and the oracle. Invariant: ``best`` was confirmed by the oracle and only ever gets smaller.

    ``tried_extremes`` remembers for which shapes plain numbers were tried in place of recorded ones. ``is_exhaustive``
    is given up by a pass that leaves single edits untried because there are too many; ``max_stretches`` is how many are
    not. ``accepts`` says what else a candidate must be, ``keeps`` which classes of sizes stay as they are.
    """

    best: Candidate
    oracle: Oracle
    on_accept: Callable[[Candidate], None] | None = None
    tried_extremes: set[str] = field(default_factory=set)
    is_exhaustive: bool = True
    max_stretches: int = 256
    accepts: Callable[[Candidate], bool] = lambda candidate: True
    keeps: Callable[[Candidate, Class], bool] = lambda candidate, group: False

    def classes(self) -> list[Class]:
        """The classes of sizes of the best candidate that may get smaller."""
        found = find_classes(self.best)
        return [group for group in found if not self.keeps(self.best, group)]

    def consider(self, candidate: Candidate, change: str) -> bool:
        """Accept ``candidate`` if it is smaller than the best one and fails the same way.

        ``change`` says in a few words what was done.
        """
        return self.first([(change, candidate)])

    def first(self, proposals: Iterable[Proposal]) -> bool:
        """Accept the first of the proposed candidates that `consider` would accept and that gives no new warning.

        The proposals are pairs of a change and a candidate. They may be made one by one as they are asked for, but must
        not depend on the verdict on an earlier one.
        """
        remaining = self._worth_a_check(proposals)
        accepted = self.oracle.first(remaining)
        while accepted is not None and warns(accepted) and not warns(self.best):
            accepted = self.oracle.first(remaining)
        if accepted is None:
            return False
        self.best = accepted
        if self.on_accept is not None:
            self.on_accept(accepted)
        return True

    def _worth_a_check(self, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
        """Those that are smaller than the best candidate."""
        for change, proposed in proposals:
            self.oracle.require_time()
            candidate = proposed.pruned()
            is_smaller = candidate.is_smaller_than(self.best) and self.accepts(candidate)
            if is_smaller and is_safe(candidate.program, candidate.shapes):
                yield change, candidate

    @property
    def failure(self) -> Failure:
        """The failure of the best candidate, with its place."""
        found = self.oracle.known_failure(self.best)
        assert found is not None, "the best candidate fails"
        return found


def warns(candidate: Candidate) -> bool:
    """True if a run gives a warning, which a person would have to explain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(candidate.program, candidate.tensors, keep=frozenset())
    return bool(caught)


def focus(problem: Problem, group: Class, sign: float | None = None) -> Sequence[int]:
    """The indexes of a class, the one most likely needed first.

    That is where the bad element sits, if the class reaches it, otherwise where infinities and large numbers are (with
    ``sign``, only those of one sign count); second comes an index that an index tensor points to.
    """
    candidate = problem.best
    place = bad_index(problem, group)
    scores = _scores(candidate, group, sign)
    order: list[int] = scores.argsort(descending=True, stable=True).tolist()
    pointed = sorted(_pointed_to(candidate, group))
    first = [place] if place is not None else order[:1]
    return list(dict.fromkeys((*first, *pointed[:1], *order)))


def bad_index(problem: Problem, group: Class) -> int | None:
    """The index of the bad element along the class, if the tensor it sits in has that dimension."""
    failure = problem.failure
    if failure.value is None or failure.element is None:
        return None
    direct = [member.axis for member in group.axes if member.value == failure.value]
    shape = shapes_of(problem.best).get(failure.value, ())
    axes = direct or [axis for axis, size in enumerate(shape) if size == group.size]
    usable = [axis for axis in axes if axis < len(failure.element)]
    return failure.element[usable[0]] % group.size if usable else None


def _scores(candidate: Candidate, group: Class, sign: float | None) -> torch.Tensor:
    """How remarkable the numbers at each index are."""
    scores = torch.zeros(group.size, dtype=torch.float64)
    for member in group.axes:
        tensor = candidate.tensors[member.value]
        if tensor.is_floating_point() and tensor.numel():
            scores += _sizes_along(tensor.abs() if sign is None else sign * tensor, member, group.size)
    return scores


def _sizes_along(tensor: torch.Tensor, member: InputAxis, size: int) -> torch.Tensor:
    """The logarithm of the largest element at each index, with its sign; an infinity outweighs everything."""
    rows = tensor.detach().to_dense().double().movedim(member.axis, 0).reshape(size, -1)
    largest = rows.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).amax(dim=1)
    return (largest.sign() * largest.abs().log1p()).clamp(-1e6, 1e6)


def _pointed_to(candidate: Candidate, group: Class) -> set[int]:
    found: set[int] = set()
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if tensor.dtype in (torch.int64, torch.int32) and 0 < tensor.numel() <= 4096:
            found.update(int(index) for index in tensor.flatten().tolist() if 0 <= int(index) < group.size)
    return found if len(found) < group.size else set()
