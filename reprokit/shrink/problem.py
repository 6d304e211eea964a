"""What a pass works on: the best candidate so far, a way to propose a better one, and which indexes it needs most.

Axes of inputs that have one size are taken for one dimension, and integers that equal it follow in the arguments of
functions that take sizes: whether that fits is found by running it. Shrinking keeps some of the indexes: input data is
sliced, index tensors are renumbered to stay in range.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.interpreter import run
from reprokit.program.step import Step
from reprokit.shrink.leaves import Path, leaves, with_changed_indexes, with_leaf
from reprokit.shrink.oracle import Oracle, Proposal
from reprokit.shrink.order import is_smaller
from reprokit.shrink.recording import shapes_of
from reprokit.shrink.safety import is_safe

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


def shrink_to(candidate: Step, kept: Mapping[Class, Sequence[int]], *, renumber: bool = False) -> Step:
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
    return Step(replace(candidate.program, calls=tuple(calls)), tensors)


def _followed(tensor: torch.Tensor, size: int, numbers: torch.Tensor, few: int) -> torch.Tensor:
    """Indexes up to a size renumbered, lengths up to it lowered; other tensors as they are."""
    largest = int(tensor.max()) if _is_index(tensor) else 0
    if largest == size:
        return tensor.clamp(max=few)
    if not few <= largest < size:
        return tensor
    return torch.where(tensor >= 0, numbers.to(tensor.dtype)[tensor.clamp(min=0).long()], tensor)


def _parts_of(candidate: Step, counts: InputAxis, group: Class, indexes: Sequence[int]) -> dict[int, torch.Tensor]:
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


def find_classes(candidate: Step) -> list[Class]:
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


@dataclass
class Problem:
    """The best candidate and the oracle. Invariant: ``best`` was confirmed by the oracle and only ever gets smaller."""

    best: Step
    oracle: Oracle
    on_accept: Callable[[Step], None] | None = None
    tried_extremes: set[str] = field(default_factory=set)  # shapes for which plain numbers were tried
    is_exhaustive: bool = True  # no pass has left single edits untried
    max_stretches: int = 256  # so many edits are not too many
    accepts: Callable[[Step], bool] = lambda candidate: True  # what else a candidate must be
    keeps: Callable[[Step, Class], bool] = lambda candidate, group: False  # which sizes stay as they are
    fixed: Callable[[Step], Collection[int]] = lambda candidate: ()  # the calls that stay

    def classes(self) -> list[Class]:
        """The classes of sizes of the best candidate that may get smaller."""
        found = find_classes(self.best)
        return [group for group in found if not self.keeps(self.best, group)]

    def consider(self, candidate: Step, change: str) -> bool:
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
            is_better = is_smaller(candidate, self.best) and self.accepts(candidate)
            if is_better and is_safe(candidate.program, candidate.shapes):
                yield change, candidate

    @property
    def failure(self) -> Failure:
        """The failure of the best candidate, with its place."""
        found = self.oracle.known_failure(self.best)
        assert found is not None, "the best candidate fails"
        return found


def warns(candidate: Step) -> bool:
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


def _scores(candidate: Step, group: Class, sign: float | None) -> torch.Tensor:
    """How remarkable the numbers at each index are."""
    scores = torch.zeros(group.size, dtype=torch.float64)
    for member in group.axes:
        tensor = candidate.tensors[member.value]
        if tensor.is_floating_point() and tensor.numel():
            sized = (tensor.abs() if sign is None else sign * tensor).detach().to_dense().double()
            rows = sized.movedim(member.axis, 0).reshape(group.size, -1)
            largest = rows.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).amax(dim=1)
            # the logarithm of the largest element, with its sign; an infinity outweighs everything
            scores += (largest.sign() * largest.abs().log1p()).clamp(-1e6, 1e6)
    return scores


def _pointed_to(candidate: Step, group: Class) -> set[int]:
    found: set[int] = set()
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if tensor.dtype in (torch.int64, torch.int32) and 0 < tensor.numel() <= 4096:
            found.update(int(index) for index in tensor.flatten().tolist() if 0 <= int(index) < group.size)
    return found if len(found) < group.size else set()
