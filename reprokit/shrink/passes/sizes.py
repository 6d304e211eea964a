"""Sizes: shrink dimensions that must agree together, keeping the place where the bad value sits.

All to 1 at once first, on recorded numbers and then on plain ones, then all but one; then each class of sizes for
itself: to 1, to 2, and then by bisection. Last, dimensions of size 1 go altogether.

`simplify_recurrent`: the first layer of several, one feature, no biases. The weights of all layers are one list and the
rows of all gates one weight, so none of this is a matter of one size or one argument. Corpus case `rnn_relu_lr20` has 4
elements with this and 29 without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reprokit.locate.kinds import FailureKind
from reprokit.program.ir import Call, Ref, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.leaves import leaves, with_leaf
from reprokit.shrink.oracle import Proposal
from reprokit.shrink.passes.setting import with_seeds
from reprokit.shrink.plainness import filled, ladder, largest_of, sign_of
from reprokit.shrink.problem import Class, Problem, bad_index, focus, shrink_to
from reprokit.shrink.safety import GATES, RECURRENT, place_of_weights

_NUM_SEEDS = 4  # each costs a check
_LARGE = {torch.float16: 10.0}  # in other formats 1e3
_DIMENSION_WORDS = frozenset({"dim", "axis", "dims", "dim0", "dim1"})


def shrink_sizes(problem: Problem) -> None:
    """Make every dimension as small as the failure allows."""
    classes = problem.classes()
    if not classes:
        return
    if any(_try_slice(problem, kept, "all sizes 1") for kept in _single_indexes(problem, classes)):
        return
    single = {group: focus(problem, group)[:1] for group in classes}
    seeded = with_seeds(_slices(problem, single)[-1], range(_NUM_SEEDS))
    if any(problem.consider(candidate, f"all sizes 1, {seed}") for seed, candidate in seeded):
        return
    if _try_kept(problem, single, "all sizes 1"):
        return
    for group in classes:  # one that has to be larger, among sizes that are products of each other
        others = {other: indexes for other, indexes in single.items() if other is not group}
        if others and _try_slice(problem, others, f"all sizes 1 but {group.size}"):
            break
    for size in dict.fromkeys(group.size for group in classes):
        _shrink_size(problem, size)


def _single_indexes(problem: Problem, classes: Sequence[Class]) -> Iterator[dict[Class, Sequence[int]]]:
    """One index for each class, then for each axis. When nothing tells where the bad value sits, as in a sum over
    everything, the places of the largest, the greatest and the least number are all worth a look."""
    yield {group: focus(problem, group)[:1] for group in classes}
    if all(bad_index(problem, group) is None for group in classes):
        for sign in (1.0, -1.0):
            yield {group: focus(problem, group, sign)[:1] for group in classes}
    axes = [Class(group.size, (axis,)) for group in classes for axis in group.axes]
    yield {group: focus(problem, group)[:1] for group in axes}


def drop_dimensions(problem: Problem) -> None:
    """Drop leading dimensions of size 1 from all inputs alike: down to none, to one, to two."""
    best = problem.best
    items = [item for item in best.program.inputs if item.role != "rng"]
    plain = {i.value: t for i in items if (t := best.tensors[i.value]).layout is torch.strided}
    for keep in (0, 1, 2):
        ones = {value: [axis for axis, size in enumerate(t.shape) if size == 1] for value, t in plain.items()}
        gone = {value: axes[: max(0, plain[value].dim() - keep)] for value, axes in ones.items()}
        fewer = {value: plain[value].squeeze(tuple(axes)) for value, axes in gone.items() if axes}
        variants = _with_lower_dimensions(best.with_tensors(fewer)) if fewer else ()
        if problem.first((f"at least {keep} dimensions", variant) for variant in variants):
            return


def _shrink_size(problem: Problem, size: int) -> None:
    """Shrink what has this size: all of it together, else in parts, as long as anything gets smaller."""
    before = None
    while before is not problem.best:
        before = problem.best
        group = next((group for group in problem.classes() if group.size == size), None)
        for one in (group, *group.parts) if group is not None else ():
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
    _drop_indexes(problem, start, group, order[:high])


def _drop_indexes(problem: Problem, start: Step, group: Class, order: Sequence[int]) -> None:
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
    kind, numbers = problem.failure.kind, [problem.best.tensors[item.value] for item in problem.best.number_inputs]
    # a number is so large that an overflow may be near
    may_be_large = kind.is_infinite or any(largest_of(one) > _LARGE.get(one.dtype, 1e3) for one in numbers)
    for smaller in (candidate.pruned() for candidate in _slices(problem, kept)):
        outline = _outline(smaller)
        fits = problem.oracle.verdict_without_a_run(smaller) is not Ruling.INVALID
        if fits and outline not in problem.tried_extremes:
            problem.tried_extremes.add(outline)
            plain = _extremes(smaller, kind, may_be_large)
            if problem.first((f"{change}, {name}", candidate) for name, candidate in plain):
                return True
    return False


def _try_slice(problem: Problem, kept: Mapping[Class, Sequence[int]], change: str) -> bool:
    return problem.first((change, smaller) for smaller in _slices(problem, kept))


def _slices(problem: Problem, kept: Mapping[Class, Sequence[int]]) -> list[Step]:
    """The best candidate with only the kept indexes, if need be with integers in the arguments renumbered; then without
    a change of the integers that equal a size."""
    ordered = {group: _in_order(indexes) for group, indexes in kept.items()}
    axes = {replace(group, constants=()): indexes for group, indexes in ordered.items()}
    pairs = ((chosen, renumber) for chosen in (ordered, axes) for renumber in (False, True))
    return [shrink_to(problem.best, chosen, renumber=renumber) for chosen, renumber in pairs]


def _in_order(indexes: Sequence[int]) -> Sequence[int]:
    return indexes if isinstance(indexes, range) else sorted(indexes)


def _outline(candidate: Step) -> str:
    """All that a candidate of extreme numbers has of its own: the forward calls, shapes and dtypes."""
    calls = [(call.target, call.args, call.kwargs) for call in candidate.program.calls if not call.is_differentiation]
    forms = [
        (item.value, tuple(candidate.tensors[item.value].shape), candidate.tensors[item.value].dtype)
        for item in candidate.program.inputs
        if item.role != "gradient"
    ]
    return f"{calls} {forms}"


def _with_lower_dimensions(candidate: Step) -> Iterator[Step]:
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


def _extremes(candidate: Step, kind: FailureKind, may_be_large: bool) -> Iterator[tuple[str, Step]]:
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
    is_nan = kind.is_nonfinite and not kind.is_infinite
    order = list(choices) if is_nan else ["large constants", "zeros", "large constants of recorded sign", "ones"]
    for name in order:
        if may_be_large or "large" not in name:
            yield name, candidate.with_tensors(_chosen(candidate, values, choices[name]))


def _chosen(candidate: Step, values: list[int], factors: list[float] | None) -> dict[int, torch.Tensor]:
    """Ones, or for each value so many times the largest constant."""
    tensors = [candidate.tensors[value] for value in values]
    numbers = factors and [factor * ladder(tensor.dtype)[-1] for factor, tensor in zip(factors, tensors, strict=True)]
    return {v: filled(t, number) for v, t, number in zip(values, tensors, numbers or [1.0] * len(values), strict=True)}


def simplify_recurrent(problem: Problem) -> None:
    """Take what can go out of every recurrent layer whose weights and states are inputs."""
    for index, call in enumerate(problem.best.program.calls):
        if call.target in RECURRENT and place_of_weights(call) is not None:
            while problem.first(_smaller(problem, index)):
                pass


def _smaller(problem: Problem, index: int) -> Iterator[Proposal]:
    best, call = problem.best, problem.best.program.calls[index]
    place = place_of_weights(call)
    assert place is not None
    weights, has_biases, num_layers, _, _, is_bidirectional = call.args[place : place + 6]
    states = list(iter_refs(call.args[place - 1]))
    if any(ref.value not in best.tensors for ref in (*states, *weights)):
        return
    num_directions = 2 if is_bidirectional else 1
    each = len(weights) // (num_layers * num_directions)
    first = num_directions * each
    if num_layers > 1:
        shorter = {ref.value: best.tensors[ref.value][:num_directions] for ref in states}
        args = {place: weights[:first], place + 2: 1}
        yield "the first layer", _with_args(best.with_tensors(shorter), index, call, args)
    if has_biases:
        args = {place: [ref for n, ref in enumerate(weights) if n % each not in (2, 3)], place + 1: False}
        yield "no biases", _with_args(best, index, call, args)
    if each in (2, 4):  # others have a projection
        yield from _of_one_feature(problem, call, states, weights, weights[0:first:each])


def _of_one_feature(
    problem: Problem, call: Call, states: list[Ref], weights: list[Ref], from_input: list[Ref]
) -> Iterator[Proposal]:
    """The bad feature, or else the first; ``from_input`` are the weights that the input of the layer meets."""
    tensors = problem.best.tensors
    num_gates = GATES.get(call.name, 1)
    num_features = tensors[weights[0].value].shape[0] // num_gates
    bad = problem.failure.element if problem.failure.value in call.output_refs() else None
    feature = bad[-1] % num_features if bad else 0
    chosen = {ref.value: tensors[ref.value][..., [feature]] for ref in states}
    for ref in weights:
        rows = tensors[ref.value][feature::num_features]
        columns = slice(None) if rows.dim() == 1 or ref in from_input else slice(feature, None, num_features)
        chosen[ref.value] = rows[..., columns].contiguous()
    if num_features > 1:
        yield "one feature", problem.best.with_tensors(chosen)


def _with_args(candidate: Step, index: int, call: Call, args: dict[int, Any]) -> Step:
    changed = tuple(args.get(place, value) for place, value in enumerate(call.args))
    return candidate.with_call(index, replace(call, args=changed)).pruned()
