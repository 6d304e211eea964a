"""Sizes that change together, and shrinking them.

A `Class` holds axes of inputs, integers in arguments and lengths of lists that are one size (or a fixed multiple of
it). Shrinking a class keeps some of its indexes: input data is sliced, integers and lists follow, index tensors are
renumbered to stay in range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit.program.ir import Call, Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.indexes import FlatParts, new_numbers, numbers_after, parts_of, uses_of
from reprokit.shrink.leaves import Path, leaves, lists_of_tensors, with_changed_indexes, with_leaf
from reprokit.shrink.probe import Form, Ground, Prober, forms_of, without_last

_MAX_FACTOR = 16
_MAX_PROBES = 3000  # one costs about a run of the program
_MAX_CALLS = 40  # the number of probes grows with calls times sizes
_MAX_PAIRED = 8  # members; pairs of more take too many probes
_SMALL = 2


@dataclass(frozen=True, slots=True)
class InputAxis:
    """One dimension of an input, ``factor`` times the size of its class."""

    value: int
    axis: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Constant:
    """An integer in the arguments of a call, ``factor`` times the size of its class."""

    call: int
    path: Path
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Length:
    """How many tensors a list in the arguments holds, ``factor`` of them for each unit, like the weights of a layer."""

    call: int
    path: Path
    factor: int = 1


Member = InputAxis | Constant | Length


@dataclass(frozen=True, slots=True)
class Class:
    """Sizes that change together; ``size`` is the smallest of them. ``is_guess`` says that nothing but being equal
    tells that they belong together."""

    size: int
    members: tuple[Member, ...]
    is_guess: bool = False

    @property
    def axes(self) -> tuple[InputAxis, ...]:
        """The members that are dimensions of inputs."""
        return tuple(member for member in self.members if isinstance(member, InputAxis))

    @property
    def parts(self) -> list[Class]:
        """Every dimension for itself, where it is only a guess that they belong together."""
        return [Class(self.size, (axis,)) for axis in self.axes] if self.is_guess and len(self.axes) > 1 else []


def shrink_to(
    candidate: Candidate, kept: Mapping[Class, Sequence[int]], *, renumber: Callable[[Call], bool] = lambda call: False
) -> Candidate:
    """The candidate with only the ``kept`` indexes of each class.

    In calls that ``renumber`` is true for, integers that are indexes follow as well, as in ``x[:, 5]``.
    """
    tensors = dict(candidate.tensors)
    calls = list(candidate.program.calls)
    for group, indexes in kept.items():
        for member in group.members:
            if isinstance(member, InputAxis):
                tensors[member.value] = _sliced(tensors[member.value], member, group.size, indexes)
            elif isinstance(member, Constant):
                calls[member.call] = with_leaf(calls[member.call], member.path, member.factor * len(indexes))
            else:
                calls[member.call] = _with_parts(calls[member.call], member, indexes)
        _keep_parts(candidate, tensors, group, indexes)
        _renumber_tensors(candidate, tensors, group, indexes, renumber)
        if any(map(renumber, calls)):
            numbers, gone = new_numbers(group.size, indexes), range(len(indexes), group.size)
            calls = [with_changed_indexes(call, gone, numbers) if renumber(call) else call for call in calls]
    return Candidate(replace(candidate.program, calls=tuple(calls)), tensors)


def shorten_part(candidate: Candidate, parts: FlatParts, place: int, positions: Sequence[int]) -> Candidate:
    """The candidate with only these positions of one part of a flat tensor."""
    lengths = parts.lengths(candidate.tensors)
    assert lengths is not None, "the parts fill the tensor"
    start = sum(lengths[:place])
    stop = start + lengths[place]
    kept = [*range(start), *(start + position for position in positions), *range(stop, sum(lengths))]
    tensors = {parts.counts: _counts(candidate, parts, [*lengths[:place], len(positions), *lengths[place + 1 :]])}
    for other in _all_parts(candidate):
        if other.counts == parts.counts:
            tensors[other.flat] = candidate.tensors[other.flat][torch.tensor(kept, dtype=torch.int64)]
    return candidate.with_tensors(tensors)


def resized(
    program: Program, forms: Mapping[int, Form], members: Iterable[Member], size: int
) -> tuple[Program, dict[int, Form]]:
    """The program and the forms of its inputs with another size for these members."""
    calls = list(program.calls)
    changed = dict(forms)
    for member in members:
        if isinstance(member, InputAxis):
            form = changed[member.value]
            shape = list(form.shape)
            shape[member.axis] = size * member.factor
            changed[member.value] = Form(tuple(shape), form.dtype)
        elif isinstance(member, Constant):
            calls[member.call] = with_leaf(calls[member.call], member.path, size * member.factor)
        else:
            calls[member.call] = _with_parts(calls[member.call], member, range(size))
    return replace(program, calls=tuple(calls)), changed


def _with_parts(call: Call, member: Length, indexes: Sequence[int]) -> Call:
    """The call with only the chosen parts of a list; a part that it does not have is like its last one."""
    refs = next(refs for path, refs in lists_of_tensors(call) if path == member.path)
    last = len(refs) // member.factor - 1
    starts = [min(index, last) * member.factor for index in indexes]
    return with_leaf(call, member.path, [ref for start in starts for ref in refs[start : start + member.factor]])


def _sliced(tensor: torch.Tensor, member: InputAxis, size: int, indexes: Sequence[int]) -> torch.Tensor:
    """The kept indexes of one axis; a multiple of the size is made of blocks, like the gates of an LSTM."""
    kept = torch.arange(len(indexes)) if indexes == range(len(indexes)) else torch.tensor(list(indexes))
    positions = torch.cat([block * size + kept for block in range(member.factor)])
    return _with_order_of(tensor, tensor.index_select(member.axis, positions))


def _with_order_of(tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """The changed tensor laid out in the order of dimensions that the tensor has in memory."""
    if tensor.is_contiguous() or 0 in tensor.stride():
        return changed
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    places = [order.index(axis) for axis in range(tensor.dim())]
    return changed.permute(order).contiguous().permute(places)


def _all_parts(candidate: Candidate) -> list[FlatParts]:
    return [parts for call in candidate.program.calls for parts in parts_of(call, candidate.tensors)]


def _counts(candidate: Candidate, parts: FlatParts, lengths: Sequence[int]) -> torch.Tensor:
    return parts.counts_for(lengths, candidate.tensors[parts.counts])


def _keep_parts(candidate: Candidate, tensors: dict[int, torch.Tensor], group: Class, indexes: Sequence[int]) -> None:
    """Keep of a flat tensor the parts whose lengths are kept."""
    for parts in _all_parts(candidate):
        lengths = parts.lengths(candidate.tensors)
        if InputAxis(parts.counts, 0) not in group.members or lengths is None:
            continue
        starts = [0, *itertools.accumulate(lengths)]
        kept = [position for index in indexes for position in range(starts[index], starts[index] + lengths[index])]
        tensors[parts.flat] = tensors[parts.flat][torch.tensor(kept, dtype=torch.int64)]
        tensors[parts.counts] = _counts(candidate, parts, [lengths[index] for index in indexes])


def _renumber_tensors(
    candidate: Candidate,
    tensors: dict[int, torch.Tensor],
    group: Class,
    indexes: Sequence[int],
    renumber: Callable[[Call], bool],
) -> None:
    """Let index tensors follow: where it is known what reads them by rule, else if all their numbers are in range."""
    uses = [(call, use) for call in candidate.program.calls for use in uses_of(call, candidate.tensors)]
    for call, use in uses:
        if InputAxis(use.bound, use.axis) in group.members:
            tensors[use.value] = numbers_after(use, tensors[use.value], group.size, indexes, renumber(call))
    known = {use.value for _, use in uses} | {parts.counts for parts in _all_parts(candidate)}
    for value in tensors.keys() - known:
        tensor = tensors[value]
        if tensor.dtype not in (torch.int64, torch.int32) or tensor.numel() == 0:
            continue
        if int(tensor.max()) < group.size and int(tensor.max()) >= len(indexes):
            table = new_numbers(group.size, indexes).to(tensor.dtype)
            tensors[value] = torch.where(tensor >= 0, table[tensor.clamp(min=0).long()], tensor)


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
                sizes[InputAxis(item.value, axis)] = size
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
        if isinstance(member, InputAxis):
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
        axes = [member for member in equal if isinstance(member, InputAxis)]
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
    if isinstance(member, InputAxis):
        return member.value, member.axis
    return member.call, member.path, type(member).__name__
