"""Which call of one program stands beside which call of another.

Everything that compares two steps begins with this: two runs of a step (`places`), a step beside a healthy one
(`healthy`), a captured step beside one with edited code (`reading`).

    one                  other                calls of the first by those of the second
    0 linear             0 linear             {0: 0, 2: 1}
    1 relu               1 dropout
                         2 relu
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from reprokit.program.ir import Call

Calls = Sequence[Call]
Keys = Sequence[Hashable]  # of the calls of a program: calls with equal keys may stand beside each other


@dataclass(frozen=True)
class Alignment:
    """The calls of two programs beside each other."""

    one: Calls
    other: Calls
    calls: dict[int, int]  # of the first by those of the second

    @classmethod
    def in_order(cls, one: Calls, other: Calls, *levels: tuple[Keys, Keys]) -> Alignment:
        """Calls with equal keys, in the order of both programs.

        What the keys of the first level leave over is aligned by those of the next one, between those that are known.
        """
        found: dict[int, int] = {}
        gaps = [(range(len(one)), range(len(other)))]
        for mine, others in levels:
            left: list[tuple[range, range]] = []
            for gap, gap_other in gaps:
                keys, keys_other = mine[gap.start : gap.stop], others[gap_other.start : gap_other.stop]
                matcher = SequenceMatcher(None, keys, keys_other, autojunk=False)
                at, at_other = gap.start, gap_other.start
                for block in matcher.get_matching_blocks():
                    start, start_other = gap.start + block.a, gap_other.start + block.b
                    left.append((range(at, start), range(at_other, start_other)))
                    at, at_other = start + block.size, start_other + block.size
                    found.update(zip(range(start_other, at_other), range(start, at), strict=True))
            gaps = left
        return cls(one, other, found)

    @classmethod
    def by_line(cls, one: Calls, other: Calls) -> Alignment:
        """The calls of a function in a line of code, the first beside the first, whatever is called in between."""
        places = {place: index for index, place in enumerate(_places(one))}
        pairs = ((index, places.get(place)) for index, place in enumerate(_places(other)))
        return cls(one, other, {index: partner for index, partner in pairs if partner is not None})

    @property
    def values(self) -> dict[int, int]:
        """The values of the second program by those of the first: results of like calls, and what like calls read."""
        found: dict[int, int] = {}
        for index, partner in self.calls.items():
            first, second = self.one[partner], self.other[index]
            sides = (first.input_refs(), second.input_refs()), (first.output_refs(), second.output_refs())
            for mine, others in sides:
                if len(mine) == len(others):
                    for value, value_other in zip(mine, others, strict=True):
                        found.setdefault(value, value_other)
        return found

    @property
    def only_one(self) -> list[Call]:
        """The calls that the first program alone has."""
        known = set(self.calls.values())
        return [call for index, call in enumerate(self.one) if index not in known]

    @property
    def only_other(self) -> list[Call]:
        """The calls that the second program alone has."""
        return [call for index, call in enumerate(self.other) if index not in self.calls]


def _places(calls: Calls) -> Iterator[Hashable]:
    """Function, line, and how often these came before."""
    seen = Counter[Hashable]()
    for call in calls:
        place = call.target, call.site
        yield place, seen[place]
        seen[place] += 1
