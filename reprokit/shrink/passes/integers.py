"""Integers in arguments: 1 where it will do, then 0 and 2: kernels, groups, heads, numbers of classes, diagonals.

What an integer means for the shapes is not known. It is lowered alone and together with its equals in the same call,
and a dimension is lowered with it, in proportion or with its square, when a probe of the shapes finds that this fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from reprokit.program.ir import Call
from reprokit.shrink.arguments import Path, leaves, with_leaf
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Axis, Class, shrink_to
from reprokit.shrink.probe import Prober, forms_of
from reprokit.shrink.problem import Problem

_MAX_CALLS = 8


def lower_integers(problem: Problem) -> None:
    """Lower every integer of 2 and more."""
    if len(problem.best.program.calls) > _MAX_CALLS:
        return
    for index, call in enumerate(problem.best.program.calls):
        if not (call.is_differentiation or call.is_optimizer_step):
            for path, number in _integers(call):
                _lower(problem, index, path, number)


def _integers(call: Call) -> list[tuple[Path, int]]:
    return [(path, leaf) for path, leaf in leaves(call) if isinstance(leaf, int) and leaf >= 2]


def _lower(problem: Problem, index: int, path: Path, number: int) -> None:
    call = problem.best.program.calls[index]
    if (path, number) not in _integers(call):
        return  # lowered together with an equal one
    for lower in (1, 0, 2):
        for changed in _lowered(call, path, number, lower) if lower < number else ():
            candidate = next(_fitting(problem, index, changed, number, lower), None)
            if candidate is not None and problem.consider(candidate, f"{lower} instead of {number}"):
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


def _fitting(problem: Problem, index: int, call: Call, number: int, lower: int) -> Iterator[Candidate]:
    """The best candidate with this call, if need be with one dimension lowered as well."""
    best, prober = problem.best, problem.prober
    calls = (*best.program.calls[:index], call, *best.program.calls[index + 1 :])
    plain = replace(best, program=replace(best.program, calls=calls))
    for candidate in (plain, *_with_lower_dimension(plain, prober, number, lower)):
        is_smaller = candidate.pruned().sort_key < best.sort_key
        if is_smaller and not prober.refuses(candidate, best, raises=problem.oracle.signature.kind == "exception"):
            yield candidate


def _with_lower_dimension(candidate: Candidate, prober: Prober, number: int, lower: int) -> Iterator[Candidate]:
    if prober.ground(candidate) is not None or lower == 0:
        return  # it fits as it is
    for value, form in forms_of(candidate).items():
        for axis, size in enumerate(form.shape):
            for power in (1, 2):
                smaller, rest = divmod(size * lower**power, number**power)
                if rest == 0 and 0 < smaller < size and form.dtype is not torch.uint8:
                    yield shrink_to(candidate, {Class(size, (Axis(value, axis),)): range(smaller)})
