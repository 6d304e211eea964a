"""Sizes that change together, and shrinking them.

Axes of inputs that have one size are taken for one dimension, and integers that equal it follow in the arguments of
functions that take sizes: whether that fits is found by running it. Shrinking keeps some of the indexes: input data is
sliced, index tensors are renumbered to stay in range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.leaves import Path, leaves, with_changed_indexes, with_leaf

_TAKE_SIZES = (
    "view", "reshape", "expand", "repeat", "unflatten", "fold", "split", "one_hot", "group_norm", "layer_norm",
    "rms_norm", "zeros", "ones", "full", "empty", "rand", "arange", "linspace", "eye",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputAxis:
    """One dimension of an input."""

    value: int
    axis: int


@dataclass(frozen=True, slots=True)
class Constant:
    """An integer in the arguments of a call."""

    call: int
    path: Path


@dataclass(frozen=True, slots=True)
class Class:
    """Axes of one size, and the integers that are as large."""

    size: int
    axes: tuple[InputAxis, ...]
    constants: tuple[Constant, ...] = ()

    @property
    def parts(self) -> list[Class]:
        """What else may belong together: the axes without the integers, each axis with them and for itself."""
        single = [(axis,) for axis in self.axes]
        parts = [(axes, constants) for axes in (self.axes, *single) for constants in (self.constants, ())]
        return [Class(self.size, axes, constants) for axes, constants in dict.fromkeys(parts)][1:]


def shrink_to(candidate: Candidate, kept: Mapping[Class, Sequence[int]], *, renumber: bool = False) -> Candidate:
    """The candidate with only the ``kept`` indexes of each class.

    With ``renumber`` integers in arguments that are indexes follow as well, as in ``x[:, 5]``.
    """
    tensors = dict(candidate.tensors)
    calls = list(candidate.program.calls)
    for group, indexes in kept.items():  # before anything is sliced, or what is left looks like other indexes
        numbers = _new_numbers(group.size, indexes)
        tensors = {value: _followed(tensor, group.size, numbers, len(indexes)) for value, tensor in tensors.items()}
    for group, indexes in kept.items():
        chosen = torch.tensor(list(indexes))
        for member in group.axes:
            if tensors[member.value].shape[member.axis] == group.size:
                tensors[member.value] = _sliced(tensors[member.value], member.axis, chosen)
                tensors.update(_parts_of(candidate, member, group, indexes))
        for number in group.constants:
            calls[number.call] = with_leaf(calls[number.call], number.path, len(indexes))
        numbers = _new_numbers(group.size, indexes)
        gone = range(len(indexes), group.size)
        calls = [with_changed_indexes(call, gone, numbers) if renumber else call for call in calls]
    return Candidate(replace(candidate.program, calls=tuple(calls)), tensors)


def _followed(tensor: torch.Tensor, size: int, numbers: torch.Tensor, few: int) -> torch.Tensor:
    """Indexes up to a size renumbered, lengths up to it lowered; other tensors as they are."""
    largest = int(tensor.max()) if _is_index(tensor) else 0
    if largest == size:
        return tensor.clamp(max=few)
    if not few <= largest < size:
        return tensor
    return torch.where(tensor >= 0, numbers.to(tensor.dtype)[tensor.clamp(min=0).long()], tensor)


def _parts_of(candidate: Candidate, counts: InputAxis, group: Class, indexes: Sequence[int]) -> dict[int, torch.Tensor]:
    """The parts whose lengths are kept of a tensor made of parts, such as the labels of all samples in one row."""
    lengths = candidate.tensors[counts.value]
    if not _is_index(lengths) or lengths.dim() != 1 or int(lengths.min()) < 0:
        return {}
    members = {member.value for member in group.axes}
    others = {value: tensor for value, tensor in candidate.tensors.items() if value not in members}
    flat = {value: tensor for value, tensor in others.items() if tensor.shape == (int(lengths.sum()),)}
    owners = torch.arange(len(lengths)).repeat_interleave(lengths.cpu())
    kept = torch.cat([(owners == index).nonzero().flatten() for index in indexes])
    return {value: tensor[kept.to(tensor.device)] for value, tensor in flat.items()}


def _is_index(tensor: torch.Tensor) -> bool:
    """True if a tensor may hold indexes."""
    return tensor.dtype in (torch.int64, torch.int32) and tensor.numel() > 0


def find_classes(candidate: Candidate) -> list[Class]:
    """The classes of all sizes above 1."""
    axes: dict[int, list[InputAxis]] = {}
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if item.role != "rng" and tensor.layout in (torch.strided, torch.sparse_coo):
            for axis, size in enumerate(tensor.shape):
                axes.setdefault(size, []).append(InputAxis(item.value, axis))
    numbers: dict[int, list[Constant]] = {}
    for index, call in enumerate(candidate.program.calls):
        for path, leaf in leaves(call) if any(word in call.name for word in _TAKE_SIZES) else ():
            if isinstance(leaf, int):
                numbers.setdefault(leaf, []).append(Constant(index, path))
    return [Class(size, tuple(found), tuple(numbers.get(size, ()))) for size, found in axes.items() if size > 1]


def _sliced(tensor: torch.Tensor, axis: int, indexes: torch.Tensor) -> torch.Tensor:
    """The kept indexes of one axis, laid out in the order of dimensions that the tensor has in memory."""
    changed = tensor.index_select(axis, indexes)
    if tensor.layout is not torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return changed
    order = sorted(range(tensor.dim()), key=lambda other: -tensor.stride()[other])
    places = [order.index(other) for other in range(tensor.dim())]
    return changed.permute(order).contiguous().permute(places)


def _new_numbers(size: int, indexes: Sequence[int]) -> torch.Tensor:
    """For every index the place it has among the kept ones; one that goes gives way to the last."""
    table = torch.arange(size).clamp(max=len(indexes) - 1)
    table[torch.tensor(list(indexes))] = torch.arange(len(indexes))
    return table
