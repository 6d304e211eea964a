"""Sizes: shrink dimensions that must agree together, keeping the place where the bad value sits.

All to 1 at once first, on recorded numbers and then on plain ones; then each class of sizes for itself: to 1, to 2, and
then by bisection. Last, dimensions of size 1 go altogether.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Class, InputAxis, shorten_part, shrink_to
from reprokit.shrink.indexes import FlatParts, parts_of
from reprokit.shrink.leaves import Path, leaves, with_leaf
from reprokit.shrink.passes.integers import lower_integers
from reprokit.shrink.passes.recurrent import simplify_recurrent
from reprokit.shrink.passes.setting import with_seeds
from reprokit.shrink.plainness import filled, ladder, largest_of, sign_of
from reprokit.shrink.probe import forms_of
from reprokit.shrink.problem import Problem, bad_index, focus
from reprokit.shrink.search import delete_adaptively

_NUM_SEEDS = 4  # each costs a check
_ARITHMETIC = frozenset(["add", "sub", "mul", "div", "__rsub__", "__rtruediv__", "eq", "ne", "lt", "le", "gt", "ge"])
_LARGE = {torch.float16: 10.0}  # in other formats 1e3
_DIMENSION_WORDS = frozenset({"dim", "axis", "dims", "dim0", "dim1"})


def shrink_sizes(problem: Problem) -> None:
    """Make every dimension as small as the failure allows, and integers in arguments with them."""
    simplify_recurrent(problem)
    shrink_dimensions(problem)
    shorten_parts(problem)
    if problem.failure.event is None:  # an exponent of 1 in the place of 2 would still be above a threshold
        lower_integers(problem)


def shrink_dimensions(problem: Problem) -> None:
    """Make every dimension as small as the failure allows, and what goes with it; other integers stay."""
    classes = problem.classes()
    if not classes:
        return
    if problem.is_about_sizes:
        _shrink_by_size_alone(problem, classes)
        return
    if any(_try_slice(problem, kept, "all sizes 1") for kept in _single_indexes(problem, classes)):
        return
    if _try_seeds(problem, classes):
        return
    if _try_kept(problem, {group: focus(problem, group)[:1] for group in classes}, "all sizes 1"):
        return
    for size in dict.fromkeys(group.size for group in classes):
        _shrink_classes_of(problem, size)


def shorten_parts(problem: Problem) -> None:
    """Make the parts of flat tensors short, such as the labels of each sample in one row."""
    for parts in [found for call in problem.best.program.calls for found in parts_of(call, problem.best.tensors)]:
        for place, length in enumerate(parts.lengths(problem.best.tensors) or ()):
            delete_adaptively(range(length), partial(_try_part, problem, problem.best, parts, place))


def _try_part(problem: Problem, start: Candidate, parts: FlatParts, place: int, positions: list[int]) -> bool:
    return problem.consider(shorten_part(start, parts, place, positions), f"a part of {len(positions)}")


def _single_indexes(problem: Problem, classes: Sequence[Class]) -> Iterator[dict[Class, Sequence[int]]]:
    """One index for each class. When nothing tells where the bad value sits, as in a sum over everything, the places of
    the largest, the greatest and the least number are all worth a look."""
    yield {group: focus(problem, group)[:1] for group in classes}
    if all(bad_index(problem, group) is None for group in classes):
        for sign in (1.0, -1.0):
            yield {group: focus(problem, group, sign)[:1] for group in classes}


def drop_dimensions(problem: Problem) -> None:
    """Drop leading dimensions of size 1 from all inputs alike: down to none, to one, to two."""
    for keep in (0, 1, 2):
        if _try_dropping(problem, list(_leading_ones(problem.best, keep)), f"at least {keep} dimensions"):
            return


def _shrink_by_size_alone(problem: Problem, classes: Sequence[Class]) -> None:
    """Shrink dimensions of one size together, small ones first, then each class; no index is better than another."""
    for size in sorted({group.size for group in classes}):
        groups = [group for group in problem.classes() if group.size == size]
        _shrink_to_fewest(problem, Class(size, tuple(member for group in groups for member in group.members)))
    for group in problem.classes():
        _shrink_to_fewest(problem, group)


def _shrink_to_fewest(problem: Problem, group: Class) -> None:
    order, best = range(group.size), problem.best
    for size in (1, group.size - 1):  # what cannot be one less cannot be less
        if problem.consider(shrink_to(best, {group: order[:size]}), f"size {group.size} to {size}"):
            break
    else:
        return
    if size > 1:
        _bisect(problem, group, order)


def _shrink_classes_of(problem: Problem, size: int) -> None:
    """Shrink each class that has this size; classes are found again after every success, since sizes went."""
    tried: set[tuple[object, ...]] = set()
    while True:
        groups = problem.classes()
        group = next((g for g in groups if g.size == size and g.members not in tried), None)
        if group is None:
            return
        tried.add(group.members)
        before = problem.best
        for one in (group, *group.parts):
            if problem.best is before:
                _shrink_class(problem, one)


def _shrink_class(problem: Problem, group: Class) -> None:
    order = focus(problem, group)
    start = problem.best
    for size in (1, 2):
        if size < group.size and _try_kept(problem, {group: order[:size]}, f"size {group.size} to {size}"):
            if size == 2:
                _drop_indexes(problem, start, group, order[:2])
            return
    _bisect(problem, group, order)


def _bisect(problem: Problem, group: Class, order: Sequence[int]) -> None:
    """The fewest of the likeliest indexes that will do, then none of these that can go."""
    low, high = min(2, group.size - 1), group.size
    start = problem.best
    while high - low > 1:
        middle = (low + high) // 2
        kept = {group: _in_order(order[:middle])}
        if problem.consider(shrink_to(start, kept), f"size {group.size} to {middle}"):
            high = middle
        else:
            low = middle
    if not problem.is_about_sizes:
        _drop_indexes(problem, start, group, order[:high])


def _drop_indexes(problem: Problem, start: Candidate, group: Class, order: Sequence[int]) -> None:
    """Take out what can go of the kept indexes, unlikely ones first, in ever shorter stretches."""
    kept = list(order)
    length = len(kept) // 2
    while length and len(kept) > 1:
        for stop in range(len(kept), 0, -length):
            fewer = kept[: max(0, stop - length)] + kept[stop:]
            if fewer and problem.consider(shrink_to(start, {group: sorted(fewer)}), "fewer indexes"):
                kept = fewer
        length //= 2
        if length * problem.max_stretches < len(kept) and length:
            problem.is_exhaustive = False
            return


def _try_kept(problem: Problem, kept: Mapping[Class, Sequence[int]], change: str) -> bool:
    """Keep these indexes; with recorded numbers, then with plain ones, which are tried once for the same shapes."""
    if _try_slice(problem, kept, change):
        return True
    smaller = _slices(problem, kept)[-1]
    outline = _outline(smaller)
    if outline in problem.tried_extremes:
        return False
    problem.tried_extremes.add(outline)
    kind = problem.failure.kind
    plain = _extremes(smaller, kind, kind == "inf" or _holds_large(problem.best))
    return problem.first((f"{change}, {name}", candidate) for name, candidate in plain)


def _try_slice(problem: Problem, kept: Mapping[Class, Sequence[int]], change: str) -> bool:
    return problem.first((change, smaller) for smaller in _slices(problem, kept))


def _try_seeds(problem: Problem, classes: Sequence[Class]) -> bool:
    """All sizes 1, where a random outcome that is needed may take another seed."""
    for kept in itertools.islice(_single_indexes(problem, classes), 1):
        seeded = with_seeds(_slices(problem, kept)[-1], range(_NUM_SEEDS))
        if any(problem.consider(candidate, f"all sizes 1, {seed}") for seed, candidate in seeded):
            return True
    return False


def _slices(problem: Problem, kept: Mapping[Class, Sequence[int]]) -> list[Candidate]:
    """The best candidate with only the kept indexes; if need be with integers in the arguments renumbered."""
    ordered = {group: _in_order(indexes) for group, indexes in kept.items()}
    plain = shrink_to(problem.best, ordered)
    if not problem.prober.refuses(plain, problem.best):
        return [_with_counts(problem, plain), plain] if _counts(problem.best) else [plain]
    return [plain, shrink_to(problem.best, ordered, renumber=problem.renumbers)]


def _counts(candidate: Candidate) -> list[tuple[int, Path, int]]:
    """Integers above 1 that arithmetic works with, which may be a number of elements: ``60 - mask.sum()``."""
    return [
        (index, path, leaf)
        for index, call in enumerate(candidate.program.calls)
        if call.name in _ARITHMETIC
        for path, leaf in leaves(call)
        if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 1
    ]


def _with_counts(problem: Problem, smaller: Candidate) -> Candidate:
    """With integers that were the number of elements of a value of two dimensions or more set to that of now."""
    ground, calls = problem.prober.ground(problem.best), list(smaller.program.calls)
    if ground is None:
        return smaller
    candidates = (problem.best, smaller)
    before, after = (problem.prober.shapes(c.program, forms_of(c), ground) or {} for c in candidates)
    for index, path, count in _counts(problem.best):
        values = [v for v, shape in before.items() if len(shape) > 1 and math.prod(shape) == count]
        numbers = {math.prod(after[value]) for value in values if value in after}
        if len(numbers) == 1 and 0 not in numbers:
            calls[index] = with_leaf(calls[index], path, numbers.pop())
    return smaller.with_calls(calls)


def _in_order(indexes: Sequence[int]) -> Sequence[int]:
    return indexes if isinstance(indexes, range) else sorted(indexes)


def _outline(candidate: Candidate) -> str:
    """All that a candidate of extreme numbers has of its own: the forward calls, shapes and dtypes."""
    calls = [(call.target, call.args, call.kwargs) for call in candidate.program.calls if not call.is_differentiation]
    forms = [
        (item.value, tuple(candidate.tensors[item.value].shape), candidate.tensors[item.value].dtype)
        for item in candidate.program.inputs
        if item.role != "gradient"
    ]
    return f"{calls} {forms}"


def _leading_ones(candidate: Candidate, keep: int) -> Iterator[InputAxis]:
    """The first dimensions of size 1 of every input, as many as leave ``keep`` dimensions."""
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if item.role != "rng" and tensor.layout is torch.strided:
            axes = [InputAxis(item.value, axis) for axis, size in enumerate(tensor.shape) if size == 1]
            yield from axes[: max(0, tensor.dim() - keep)]


def _try_dropping(problem: Problem, axes: list[InputAxis], change: str) -> bool:
    if not axes:
        return False
    tensors = dict(problem.best.tensors)
    for member in sorted(axes, key=lambda member: -member.axis):
        tensors[member.value] = tensors[member.value].squeeze(member.axis)
    dropped = replace(problem.best, tensors=tensors)
    return problem.first((change, variant) for variant in _with_lower_dimensions(dropped))


def _with_lower_dimensions(candidate: Candidate) -> Iterator[Candidate]:
    """As it is, then with dimension arguments that count from the front lowered to what is left."""
    yield candidate
    depth = max((tensor.dim() for tensor in candidate.tensors.values()), default=0)
    calls = []
    for call in candidate.program.calls:
        changed = call
        for path, leaf in leaves(call):
            is_dimension = path[0] == 0 or path[1] in _DIMENSION_WORDS
            if isinstance(leaf, int) and not isinstance(leaf, bool) and is_dimension and leaf >= max(depth, 1):
                changed = with_leaf(changed, path, max(depth - 1, 0))
        calls.append(changed)
    if calls != list(candidate.program.calls):
        yield candidate.with_calls(calls)


def _extremes(candidate: Candidate, kind: str, may_be_large: bool) -> Iterator[tuple[str, Candidate]]:
    """The candidate with all numbers replaced at once by extreme ones, the likeliest to fail in this way first.

    Incoming gradients stay as they are, since zeros there hide a failure and large ones make another. A NaN by overflow
    takes terms of both signs, and is no explanation when the recorded numbers were moderate.
    """
    items = [item for item in candidate.number_inputs if item.role != "gradient"]
    values = [item.value for item in items]
    if not values:
        return
    signs = [sign_of(candidate.tensors[value]) for value in values]
    choices = {
        "zeros": [0.0] * len(values),
        "large constants": [1.0] * len(values),
        "large constants of recorded sign": signs,
        "large constants, the last one negative": [1.0] * (len(values) - 1) + [-1.0],
        "ones": None,
    }
    order = list(choices) if kind == "nan" else ["large constants", "zeros", "large constants of recorded sign", "ones"]
    for name in order:
        if may_be_large or "large" not in name:
            yield name, candidate.with_tensors(_chosen(candidate, values, choices[name]))


def _chosen(candidate: Candidate, values: list[int], factors: list[float] | None) -> dict[int, torch.Tensor]:
    """Ones, or for each value so many times the largest constant."""
    tensors = [candidate.tensors[value] for value in values]
    numbers = factors and [factor * ladder(tensor.dtype)[-1] for factor, tensor in zip(factors, tensors, strict=True)]
    return {v: filled(t, number) for v, t, number in zip(values, tensors, numbers or [1.0] * len(values), strict=True)}


def _holds_large(candidate: Candidate) -> bool:
    """True if any number is so large that an overflow may be near."""
    tensors = [candidate.tensors[item.value] for item in candidate.number_inputs]
    return any(largest_of(tensor) > _LARGE.get(tensor.dtype, 1e3) for tensor in tensors)
