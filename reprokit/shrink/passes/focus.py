"""Which indexes of a dimension are needed most likely: where the bad value sits, and where numbers are remarkable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.classes import axes_of_output
from reprokit.shrink.dimensions import Axis, Class
from reprokit.shrink.indexes import fits
from reprokit.shrink.problem import Problem


def focus(problem: Problem, group: Class, sign: float | None = None) -> Sequence[int]:
    """The indexes of a class, the one most likely needed first. Any order will do where values do not matter.

    That is where the bad element sits, if the class reaches it, otherwise where infinities and large numbers are (with
    ``sign``, only those of one sign count); second comes an index that an index tensor points to.
    """
    if problem.is_about_sizes:
        return range(group.size)
    candidate = problem.best
    place = bad_index(problem, group)
    scores = _scores(candidate, group, sign)
    order: list[int] = scores.argsort(descending=True, stable=True).tolist()
    pointed = sorted(_pointed_to(candidate, group))
    first = [place] if place is not None else order[:1]
    return list(dict.fromkeys((*first, *pointed[:1], *order)))


def bad_index(problem: Problem, group: Class) -> int | None:
    """The index of the bad element along the class, if the tensor it sits in has that dimension."""
    failure: Failure = problem.failure
    if failure.value is None or failure.element is None:
        return None
    direct = [member.axis for member in group.axes if member.value == failure.value]
    axes = direct or axes_of_output(group, problem.best, problem.prober, failure.value)
    usable = [axis for axis in axes if axis < len(failure.element)]
    return failure.element[usable[0]] % group.size if usable else None


def _scores(candidate: Candidate, group: Class, sign: float | None) -> torch.Tensor:
    """How remarkable the numbers at each index are."""
    scores = torch.zeros(group.size, dtype=torch.float64)
    is_by_index = not fits(candidate.program.calls, candidate.tensors)  # then a large index is what matters
    for member in group.axes:
        tensor = candidate.tensors[member.value]
        if (tensor.is_floating_point() or is_by_index) and tensor.numel():
            scores += _sizes_along(tensor.abs() if sign is None else sign * tensor, member, group.size)
    return scores


def _sizes_along(tensor: torch.Tensor, member: Axis, size: int) -> torch.Tensor:
    """The logarithm of the largest element at each index, with its sign; an infinity outweighs everything."""
    rows = tensor.detach().to_dense().double().movedim(member.axis, 0).reshape(member.factor, size, -1)
    largest = rows.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).amax(dim=(0, 2))
    return (largest.sign() * largest.abs().log1p()).clamp(-1e6, 1e6)


def _pointed_to(candidate: Candidate, group: Class) -> set[int]:
    found: set[int] = set()
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if tensor.dtype in (torch.int64, torch.int32) and 0 < tensor.numel() <= 4096:
            found.update(int(index) for index in tensor.flatten().tolist() if 0 <= int(index) < group.size)
    return found if len(found) < group.size else set()
