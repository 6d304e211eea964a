"""Integers in arguments: 1 where it will do, then 0 and 2: kernels, groups, heads, numbers of classes, diagonals.

What an integer means for the shapes is not known. It is lowered alone, together with its equals in the same call, and
last together with one other, as a kernel only gets smaller with the image it moves over. A dimension is lowered with
them when a probe of the shapes finds that this fits: in proportion or with the square first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch

from reprokit.program.ir import Call
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Class, InputAxis, shrink_to
from reprokit.shrink.leaves import Path, leaves, with_leaf
from reprokit.shrink.probe import Form, forms_of
from reprokit.shrink.problem import Problem, focus
from reprokit.shrink.search import find_integer

_MAX_CALLS = 8  # every integer of every call costs checks
_MAX_PAIRED = 6  # integers of a call; pairs of more take too many checks
_MAX_SIZE = 64  # sizes that are tried one by one
Integer = tuple[Path, int]
Ratios = Sequence[Fraction] | None


def lower_integers(problem: Problem) -> None:
    """Lower every integer of 2 and more."""
    if len(problem.best.program.calls) > _MAX_CALLS:
        return
    for index, call in enumerate(problem.best.program.calls):
        if not (call.is_differentiation or call.is_optimizer_step):
            for path, number in _integers(call):
                _lower(problem, index, path, number)
            _lower_together(problem, index)


def _integers(call: Call) -> list[Integer]:
    return [(path, leaf) for path, leaf in leaves(call) if isinstance(leaf, int) and leaf >= 2]


def _lower(problem: Problem, index: int, path: Path, number: int) -> None:
    call = problem.best.program.calls[index]
    if (path, number) not in _integers(call):
        return  # lowered together with an equal one
    for lower in (1, 0, 2):
        for changed in _lowered(call, path, number, lower) if lower < number else ():
            ratio = Fraction(lower, number)
            if _consider(problem, index, changed, (ratio, ratio**2), f"{lower} instead of {number}"):
                return


def _lowered(call: Call, path: Path, number: int, lower: int) -> Iterator[Call]:
    """All equal integers of the call lowered, then the one alone."""
    equal = [other for other, leaf in _integers(call) if leaf == number]
    together = call
    for other in equal:
        together = with_leaf(together, other, lower)
    yield together
    if len(equal) > 1:
        yield with_leaf(call, path, lower)


def _lower_together(problem: Problem, index: int) -> None:
    """Lower two integers that only get smaller together: both to 1, else by as much as will do; so each alone."""
    paths = [path for path, _ in _integers(problem.best.program.calls[index])]
    for number in (2, 1) if len(paths) <= _MAX_PAIRED else ():
        for some in itertools.combinations(paths, number):
            _lower_some(problem, index, some)


def _lower_some(problem: Problem, index: int, paths: tuple[Path, ...]) -> None:
    numbers = dict(_integers(problem.best.program.calls[index]))
    if any(path not in numbers for path in paths):
        return

    def is_enough(lowered: Mapping[Path, int]) -> bool:
        changed = problem.best.program.calls[index]
        for path, number in lowered.items():
            changed = with_leaf(changed, path, number)
        return _consider(problem, index, changed, None, "lower numbers")

    if not is_enough(dict.fromkeys(paths, 1)):
        most = min(numbers[path] for path in paths) - 1
        find_integer(lambda less: is_enough({path: numbers[path] - less for path in paths}), most)


def _consider(problem: Problem, index: int, call: Call, ratios: Ratios, change: str) -> bool:
    candidate = next(_fitting(problem, index, call, ratios), None)
    return candidate is not None and problem.consider(candidate, change)


def _fitting(problem: Problem, index: int, call: Call, ratios: Ratios) -> Iterator[Candidate]:
    """The best candidate with this call, if need be with one dimension lowered as well: by one of these ratios, or
    without any to whatever size fits."""
    best, prober = problem.best, problem.prober
    plain = best.with_call(index, call)
    for candidate in (plain, *_with_lower_dimension(problem, plain, ratios)):
        is_smaller = candidate.pruned().is_smaller_than(best)
        if is_smaller and not prober.refuses(candidate, best, raises=problem.oracle.signature.kind == "exception"):
            yield candidate


def _with_lower_dimension(problem: Problem, candidate: Candidate, ratios: Ratios) -> Iterator[Candidate]:
    if problem.prober.ground(candidate) is not None:
        return  # it fits as it is
    for value, form in forms_of(candidate).items():
        for axis, size in enumerate(form.shape):
            group = Class(size, (InputAxis(value, axis),))
            for smaller in _smaller_sizes(form, size, ratios):
                yield shrink_to(candidate, {group: sorted(focus(problem, group)[:smaller])})


def _smaller_sizes(form: Form, size: int, ratios: Ratios) -> list[int]:
    if form.dtype is torch.uint8:
        return []
    if ratios is None:
        return list(range(1, min(size, _MAX_SIZE)))
    return [int(size * ratio) for ratio in ratios if (size * ratio).denominator == 1 and ratio]
