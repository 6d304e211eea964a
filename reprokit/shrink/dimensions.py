"""Sizes that change together, and shrinking them.

A `Class` holds axes of inputs, integers in arguments and lengths of lists that are one size (or a fixed multiple of
it). Shrinking a class keeps some of its indexes: input data is sliced, integers and lists follow, index tensors are
renumbered to stay in range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.program.ir import Call, Program
from reprokit.shrink.arguments import Path, lists_of_tensors, with_changed_indexes, with_leaf
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.indexes import Parts, new_numbers, numbers_after, parts_of, uses_of
from reprokit.shrink.probe import Form


@dataclass(frozen=True, slots=True)
class Axis:
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


Member = Axis | Constant | Length


@dataclass(frozen=True, slots=True)
class Class:
    """Sizes that change together; ``size`` is the smallest of them. ``is_guess`` says that nothing but being equal
    tells that they belong together."""

    size: int
    members: tuple[Member, ...]
    is_guess: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The members that are dimensions of inputs."""
        return tuple(member for member in self.members if isinstance(member, Axis))

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
            if isinstance(member, Axis):
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


def shorten_part(candidate: Candidate, parts: Parts, place: int, positions: Sequence[int]) -> Candidate:
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
        if isinstance(member, Axis):
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


def _sliced(tensor: torch.Tensor, member: Axis, size: int, indexes: Sequence[int]) -> torch.Tensor:
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


def _all_parts(candidate: Candidate) -> list[Parts]:
    return [parts for call in candidate.program.calls for parts in parts_of(call, candidate.tensors)]


def _counts(candidate: Candidate, parts: Parts, lengths: Sequence[int]) -> torch.Tensor:
    return parts.counts_for(lengths, candidate.tensors[parts.counts])


def _keep_parts(
    candidate: Candidate, tensors: dict[int, torch.Tensor], group: Class, indexes: Sequence[int]
) -> None:
    """Keep of a flat tensor the parts whose lengths are kept."""
    for parts in _all_parts(candidate):
        lengths = parts.lengths(candidate.tensors)
        if Axis(parts.counts, 0) not in group.members or lengths is None:
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
        if Axis(use.bound, use.axis) in group.members:
            tensors[use.value] = numbers_after(use, tensors[use.value], group.size, indexes, renumber(call))
    known = {use.value for _, use in uses} | {parts.counts for parts in _all_parts(candidate)}
    for value in tensors.keys() - known:
        tensor = tensors[value]
        if tensor.dtype not in (torch.int64, torch.int32) or tensor.numel() == 0:
            continue
        if int(tensor.max()) < group.size and int(tensor.max()) >= len(indexes):
            table = new_numbers(group.size, indexes).to(tensor.dtype)
            tensors[value] = torch.where(tensor >= 0, table[tensor.clamp(min=0).long()], tensor)
