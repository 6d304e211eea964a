"""Which sizes belong together, found by asking: a size is changed, and what has to change with it is probed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reprokit.shrink.arguments import leaves, lists_of_tensors
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Axis, Class, Constant, Length, Member, resized
from reprokit.shrink.indexes import parts_of
from reprokit.shrink.probe import Ground, Prober, forms_of, without_last

_MAX_FACTOR = 16
_MAX_PROBES = 3000
_MAX_CALLS = 40
_MAX_PAIRED = 8
_SMALL = 2


def find_classes(candidate: Candidate, prober: Prober) -> list[Class]:
    """The classes of all sizes above 1 in a candidate that is known to run, or to raise in its last call."""
    if len(candidate.program.calls) > _MAX_CALLS:
        return _by_equal_size(_sizes(candidate), is_guess=False)  # one by one would take too long
    ground = prober.ground(candidate)
    if ground is not None:
        return _Search(candidate, prober, ground, _sizes(candidate)).classes()
    start = without_last(candidate)
    ground = prober.ground(start) if start.program.calls else None
    if ground is None:
        return _by_equal_size(_sizes(candidate))
    sizes = _sizes(start)
    others = {member: size for member, size in _sizes(candidate).items() if member not in sizes}
    return [*_Search(start, prober, ground, sizes).classes(), *_by_equal_size(others)]


def axes_of_output(group: Class, candidate: Candidate, prober: Prober, value: int) -> list[int]:
    """Which dimensions of a value grow when the class does."""
    ground = prober.ground(candidate)
    if ground is None:
        return []
    program, forms = candidate.program, forms_of(candidate)
    before = prober.shapes(program, forms, ground)
    larger = (resized(program, forms, group.members, size) for size in (group.size + 1, group.size * 2))
    after = next((found for found in (prober.shapes(*changed, ground) for changed in larger) if found), None)
    if before is None or after is None or value not in before or len(before[value]) != len(after[value]):
        return []
    return [axis for axis, size in enumerate(before[value]) if after[value][axis] != size]


def _sizes(candidate: Candidate) -> dict[Member, int]:
    """All sizes of 2 and more, other than those that follow from the lengths of parts."""
    sizes: dict[Member, int] = {}
    flat = {parts.flat for call in candidate.program.calls for parts in parts_of(call, candidate.tensors)}
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        can_be_sliced = tensor.layout in (torch.strided, torch.sparse_coo) and item.value not in flat
        if item.role != "rng" and can_be_sliced:
            for axis, size in enumerate(tensor.shape):
                sizes[Axis(item.value, axis)] = size
    for index, call in enumerate(candidate.program.calls):
        if not (call.is_differentiation or call.is_optimizer_step):
            for path, leaf in leaves(call):
                if isinstance(leaf, int) and not isinstance(leaf, bool):
                    sizes[Constant(index, path)] = leaf
            for path, refs in lists_of_tensors(call):
                sizes[Length(index, path)] = len(refs)
    return {member: size for member, size in sizes.items() if size >= 2}


def _by_equal_size(sizes: Mapping[Member, int], *, is_guess: bool = True) -> list[Class]:
    """Without probes: axes of one size belong together."""
    groups: dict[int, list[Member]] = {}
    for member, size in sizes.items():
        if isinstance(member, Axis):
            groups.setdefault(size, []).append(member)
    return [Class(size, tuple(members), is_guess) for size, members in groups.items()]


class _Search:
    """Finds the smallest set of sizes around each one that can change together.

    What was found is made small in ``_program`` and ``_forms``, so that later probes are cheap: a recurrent layer is
    run step by step on the meta device.
    """

    def __init__(self, candidate: Candidate, prober: Prober, ground: Ground, sizes: Mapping[Member, int]) -> None:
        self._program = candidate.program
        self._forms = forms_of(candidate)
        self._prober = prober
        self._ground = ground
        self._sizes = sizes
        self._probes_left = _MAX_PROBES

    def classes(self) -> list[Class]:
        """Every class with something to slice in it.

        Sizes are made one larger first, since what is 1 fits anything; twice as large only when nothing fits one more,
        as with groups of channels; and one smaller when nothing larger fits, as with a kernel as large as the image.
        """
        found: list[Class] = []
        taken: set[tuple[Any, ...]] = set()
        for factor, more in ((1, 1), (2, 0), (1, -1)):
            for seed, size in self._sizes.items():
                changed = size * factor + more
                group = self._around(seed, size, changed, taken) if _place(seed) not in taken else None
                if group is not None and not all(isinstance(member, Constant) for member in group.members):
                    found.append(group)
                    taken.update(_place(member) for member in group.members)
                    self._make_small(group)
        return found

    def _around(self, seed: Member, size: int, changed: int, taken: set[tuple[Any, ...]]) -> Class | None:
        """The smallest set that can change; where it can only grow, one that can do both, such as a length and the
        number that says how much of it is used."""
        pools = self._pools(seed, taken)
        found = self._first_of(seed, pools, (changed,))
        if found and changed > size > 1 and not self._is_valid(found, size - 1):
            pairs = [[seed, member] for member in pools[-1][1:] if isinstance(member, Constant)]
            found = self._first_of(seed, [*pools, *pairs], (changed, size - 1)) or found
        return Class(size, tuple(found)) if found else None

    def _first_of(self, seed: Member, pools: Iterable[list[Member]], sizes: Sequence[int]) -> list[Member]:
        for pool in pools:
            if self._are_valid(pool, sizes):
                return self._smallest(seed, pool, sizes)
        return []

    def _make_small(self, group: Class) -> None:
        if group.size > _SMALL and self._is_valid(group.members, _SMALL):
            self._program, self._forms = resized(self._program, self._forms, group.members, _SMALL)

    def _pools(self, seed: Member, taken: set[tuple[Any, ...]]) -> list[list[Member]]:
        """Sets to try: the seed alone, axes of its size, integers too, lists too, multiples too."""
        size = self._sizes[seed]
        free = [(member, other) for member, other in self._sizes.items() if _place(member) not in taken]
        equal = [member for member, other in free if other == size and member != seed]
        axes = [member for member in equal if isinstance(member, Axis)]
        multiples = [
            replace(member, factor=other // size)
            for member, other in free
            if other > size and other % size == 0 and other // size <= _MAX_FACTOR
        ]
        numbers = [member for member in equal if not isinstance(member, Length)]
        pools = [[seed], [seed, *axes], [seed, *numbers], [seed, *equal]]
        pools += [[seed, *axes, *multiples], [seed, *equal, *multiples]]
        return [pool for index, pool in enumerate(pools) if pool not in pools[:index]]

    def _smallest(self, seed: Member, pool: list[Member], sizes: Sequence[int]) -> list[Member]:
        """The pool without what need not change: all multiples of one factor, then one member at a time, and then two,
        which may only go together."""
        kept = list(pool)
        for factor in sorted({member.factor for member in pool} - {1}, reverse=True):
            fewer = [member for member in kept if member.factor != factor]
            kept = fewer if self._are_valid(fewer, sizes) else kept
        for number in (1, 2) if len(pool) <= _MAX_PAIRED else (1,):
            others = [member for member in reversed(kept) if member != seed]
            for leaving in itertools.combinations(others, number):
                fewer = [member for member in kept if member not in leaving]
                if len(kept) - len(fewer) == number and self._are_valid(fewer, sizes):
                    kept = fewer
        return kept

    def _are_valid(self, members: Iterable[Member], sizes: Sequence[int]) -> bool:
        return all(self._is_valid(members, size) for size in sizes)

    def _is_valid(self, members: Iterable[Member], size: int) -> bool:
        self._probes_left -= 1
        if self._probes_left < 0:
            return False
        return self._prober.shapes(*resized(self._program, self._forms, members, size), self._ground) is not None


def _place(member: Member) -> tuple[Any, ...]:
    if isinstance(member, Axis):
        return member.value, member.axis
    return member.call, member.path, type(member).__name__
