"""Searching with few questions: how far a run of successes goes, and which items of a list can go.

Both are for passes that would otherwise walk one by one. They know nothing of programs, so they are tested on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
_SMALL = 4  # doubling costs more questions than it saves on runs up to this length


def find_integer(holds: Callable[[int], bool], limit: int | None = None) -> int:
    """A number n with ``holds(n)`` (0 always holds) where ``holds(n + 1)`` does not, in about 2 log n questions.

    Small numbers are asked one by one, since most runs are short; then the number is doubled until it fails, and the
    gap is bisected. Nothing above ``limit`` is asked. After `find_integer` of MacIver's Hypothesis
    (hypothesis.internal.conjecture.junkdrawer).
    """
    low = 0
    while low < _SMALL:
        if low == limit or not holds(low + 1):
            return low
        low += 1
    high = 2 * low
    while (limit is None or high <= limit) and holds(high):
        low, high = high, 2 * high
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def delete_adaptively(items: Sequence[Item], try_keeping: Callable[[list[Item]], bool]) -> list[Item]:
    """What is left of ``items`` when everything that can go is gone, from the end to the beginning.

    ``try_keeping`` is asked whether these will do, in their order; what it agreed to last is what is left. A run that
    can go costs the logarithm of its length; an item that has to stay costs one question.
    """
    kept = list(items)
    stop = len(kept)
    while stop > 0:
        before, after = kept[:stop], kept[stop:]
        run = find_integer(lambda n, b=before, a=after: try_keeping(b[: len(b) - n] + a), stop)  # type: ignore[misc]
        kept = before[: stop - run] + after
        stop -= run + 1
    return kept
