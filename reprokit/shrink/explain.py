"""Explain: which of the surviving inputs and constants matter, and the nearest variant that passes.

An input or a number in the arguments is free when the program fails in the same way with several other plain and random
contents. Everything is run; a variant that is invalid says nothing. The number of runs is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from reprokit.grammar import Count, Later, Name
from reprokit.locate.spelling import signature_of
from reprokit.locate.ways import place_of
from reprokit.program.dataflow import contents
from reprokit.program.ir import Call, Input
from reprokit.program.step import Step, is_number
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.leaves import Path, leaves, with_leaf
from reprokit.shrink.oracle import OutOfBudget
from reprokit.shrink.plainness import constant_of, shortened
from reprokit.shrink.problem import Problem
from reprokit.shrink.safety import is_safe, trusts_arguments

_MAX_ELEMENTS = 16  # each may cost a bisection
_PLAIN = (0.0, 1.0, -1.0, 0.5)
MAX_RUNS = 120  # so that a large result is not explained for ever
_MAX_CONSTANTS = 16  # each costs up to six runs
_MAX_STEPS = 16  # of a bisection
_LEAST = 1e-3  # the smallest number next to zero that a person would call ordinary
# Whole numbers that decide what is computed, of `ctc_loss` (test_explain.py); others are sizes and places.
_DECIDING = ("input_lengths", "target_lengths")
Number = float | bool


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """An input, one of its elements, or an argument of a call."""

    input: Later[Name] = None
    element: Later[tuple[Count, ...]] = None
    call: Later[Name] = None
    argument: Later[Name] = None
    value: Later[Number] = None


@dataclass(frozen=True, slots=True)
class VariedPart(ProgramPart):
    """A part of the result."""

    free: bool = False  # every other content fails too
    tried: Later[bool] = None  # false if that is not known, and no other content passes


@dataclass(frozen=True, slots=True)
class Nearest(ProgramPart):
    """The smallest change of one number that passes."""

    from_: Number = 0.0
    to: Number = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """One number of the result exchanged."""

    name: str
    place: ProgramPart
    old: float | int | bool
    dtype: torch.dtype
    may_grow: bool  # else a larger whole number could point behind the end of a tensor, and the call does not look
    apply: Callable[[float | int | bool], Step]  # what makes a candidate of a new number


@dataclass(frozen=True, slots=True)
class Part:
    """An input or a number in the arguments: the candidate with other contents there, and the numbers it is made of."""

    name: str
    place: ProgramPart
    variants: Iterator[Step]
    changes: Iterator[Change]


def _input_part(best: Step, item: Input) -> Part:
    tensor, may_index = best.tensors[item.value], not trusts_arguments(best.program)
    others = (new for new in _other_contents(tensor, may_index) if not torch.equal(contents(new), contents(tensor)))
    variants = (best.with_tensors({item.value: new}) for new in others)
    return Part(item.name, ProgramPart(item.name), variants, _elements(best, item, may_index))


def _elements(best: Step, item: Input, may_index: bool) -> Iterator[Change]:
    """The first elements."""
    tensor = best.tensors[item.value]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
        return
    for index in range(min(tensor.numel(), _MAX_ELEMENTS)):
        place = place_of(index, tensor.shape)
        apply = partial(_with_element, best, item.value, place)
        yield Change(item.name, ProgramPart(item.name, place), tensor[place].item(), tensor.dtype, may_index, apply)


def _with_element(best: Step, value: int, place: tuple[int, ...], number: float | int | bool) -> Step:
    changed = best.tensors[value].detach().clone(memory_format=torch.preserve_format)
    changed[place] = number
    return best.with_tensors({value: changed})


def _other_contents(tensor: torch.Tensor, may_index: bool) -> Iterator[torch.Tensor]:
    """Plain contents, then random ones."""
    random = torch.Generator().manual_seed(0)
    if is_number(tensor):
        for number in _PLAIN:
            if constant_of(tensor) != number:
                yield torch.full_like(tensor, number)
        for scale in (1.0, 10.0):
            yield torch.empty_like(tensor).copy_(torch.randn(tensor.shape, generator=random) * scale)  # same strides
    elif tensor.layout is torch.strided and tensor.dtype is torch.bool:
        yield from (~tensor, torch.zeros_like(tensor), torch.ones_like(tensor))
    elif tensor.layout is torch.strided and tensor.numel() and not tensor.is_quantized:
        largest = int(tensor.to(torch.int64).max())
        if not may_index:  # nothing larger than what is there
            yield from ((tensor - 1).clamp(min=0), torch.zeros_like(tensor))
        elif largest == 0:
            yield torch.ones_like(tensor)
        elif largest > 0:
            yield from (torch.zeros_like(tensor), torch.full_like(tensor, largest))
            yield torch.randint(0, largest + 1, tensor.shape, generator=random).to(tensor.device, tensor.dtype)


def _constant_part(best: Step, index: int, path: Path, number: float | int) -> Part:
    call = best.program.calls[index]
    name = _argument_name(call, path)
    dtype = torch.int64 if isinstance(number, int) else torch.float64

    def apply(other: float | int | bool) -> Step:
        return best.with_call(index, with_leaf(call, path, other))

    may_grow = not trusts_arguments(best.program)
    change = Change(name, ProgramPart(call=call.target, argument=name), number, dtype, may_grow, apply)
    near = _whole_numbers(change) if isinstance(number, int) else (0.0, 1.0, -number, number * 2, number / 2)
    others: dict[float, None] = dict.fromkeys(near)
    variants = (change.apply(other) for other in others if other != number)
    return Part(change.name, replace(change.place, value=number), variants, iter((change,)))


def _argument_name(call: Call, path: Path) -> str:
    words = [word for word in path[1:] if isinstance(word, str)]
    if words:
        return words[-1]
    names = list(signature_of(call.target))
    place = path[1]
    return names[place] if place < len(names) else f"argument {place + 1}"


@dataclass
class Explanation:
    """Items for inputs and for constants, and the nearest change that passes, if one was found."""

    inputs: list[VariedPart] = field(default_factory=list)
    constants: list[VariedPart] = field(default_factory=list)
    nearest: Nearest | None = None


def explain(problem: Problem) -> Explanation:
    """Vary what is left of the best candidate, one part at a time."""
    trials, best = _Trials(problem), problem.best
    inputs = [_input_part(best, item) for item in best.program.inputs if item.role != "rng"]
    free = [trials.is_free(part) for part in inputs]
    constants = _constants(best)
    free += [trials.is_free(part) for part in constants]
    parts = [*inputs, *constants]
    items = [_varied(part.place, is_free) for part, is_free in zip(parts, free, strict=True)]
    nearest = _nearest(trials, [part for part, is_free in zip(parts, free, strict=True) if is_free is False])
    return Explanation(items[: len(inputs)], items[len(inputs) :], nearest)


class _Trials:
    """Runs variants until the budget for explaining is spent."""

    def __init__(self, problem: Problem) -> None:
        self._oracle = problem.oracle
        self._limit = problem.oracle.checks + MAX_RUNS
        self.is_over = False

    def verdict(self, candidate: Step, change: str) -> Ruling:
        """The verdict on a variant; invalid, which says nothing, when it may not be run."""
        is_fit = is_safe(candidate.program, candidate.shapes) and self._oracle.predicate.allows(candidate)
        if self.is_over or self._oracle.checks >= self._limit or not is_fit:
            return Ruling.INVALID
        try:
            return self._oracle.check(candidate, change)
        except OutOfBudget:
            self.is_over = True
            return Ruling.INVALID

    def passes(self, change: Change, number: float | int | bool) -> bool:
        """True if the program runs to its end without the failure, with this number in place of another one."""
        return self.verdict(change.apply(number), f"{change.name} = {number:.6g}") is Ruling.PASSES

    def is_free(self, part: Part) -> bool | None:
        """True if every variant that can run fails in the same way, false if one passes; else ``None``."""
        seen = set()
        for candidate in part.variants:
            seen.add(self.verdict(candidate, f"other contents of {part.name}"))
            if Ruling.PASSES in seen:
                return False
        return True if Ruling.SAME in seen and Ruling.OTHER not in seen and not self.is_over else None


def _varied(place: ProgramPart, free: bool | None) -> VariedPart:
    return VariedPart(**asdict(place), free=bool(free), tried=False if free is None else None)


def _constants(best: Step) -> list[Part]:
    """The first numbers in arguments that decide what is computed."""
    calls = enumerate(best.program.calls)
    found = ((n, path, leaf) for n, call in calls if not call.is_differentiation for path, leaf in leaves(call))
    numbers = [
        (n, path, leaf)
        for n, path, leaf in found
        if type(leaf) is float or (type(leaf) is int and _argument_name(best.program.calls[n], path) in _DECIDING)
    ]
    return [_constant_part(best, *place) for place in numbers[:_MAX_CONSTANTS]]


def _nearest(trials: _Trials, parts: list[Part]) -> Nearest | None:
    """A small change of one number that passes: of the first number where there is one."""
    for change in (change for part in parts for change in part.changes):
        target = next((number for number in _targets(change) if trials.passes(change, number)), None)
        if target is not None:
            return Nearest(**asdict(change.place), from_=change.old, to=_nearer(trials, change, target))
    return None


def _targets(change: Change) -> Iterator[float | int | bool]:
    """Numbers that may pass, the plainest first."""
    old = change.old
    if isinstance(old, bool):
        yield not old
    elif not change.dtype.is_floating_point:
        yield from _whole_numbers(change)
    else:
        yield from (number for number in (0.0, 1.0, -1.0) if number != old)


def _whole_numbers(change: Change) -> Iterator[int]:
    """Whole numbers to try in place of one, the nearest first."""
    old = int(change.old)
    for number in dict.fromkeys((old - 1, old + 1, 1, 0)):
        if 0 <= number != old and (number < old or change.may_grow):
            yield number


def _nearer(trials: _Trials, change: Change, target: float | int | bool) -> float | int | bool:
    """A number between the old one and ``target`` that still passes, to about a hundredth, with few digits."""
    if not change.dtype.is_floating_point or not math.isfinite(change.old):
        return target
    fails, passes = float(change.old), float(target)
    for _ in range(_MAX_STEPS):
        middle = _middle(fails, passes)
        if abs(passes - fails) <= 0.01 * max(abs(passes), abs(fails)) or middle in (fails, passes):
            break
        middle = shortened(middle, 6, change.dtype)
        if trials.passes(change, middle):
            passes = middle
        else:
            fails = middle
    return _short(trials, change, passes)


def _middle(first: float, second: float) -> float:
    """Half the way, in orders of magnitude where these differ; never between zero and an ordinary number, since a
    border there is zero itself."""
    if first * second > 0 and not 0.25 < first / second < 4:
        return math.copysign(math.sqrt(abs(first)) * math.sqrt(abs(second)), first)
    if 0.0 in (first, second):
        other = first + second
        return math.copysign(max(abs(other) * 1e-4, _LEAST), other) if abs(other) > _LEAST else other
    if first * second < 0:
        return 0.0
    return first / 2 + second / 2


def _short(trials: _Trials, change: Change, number: float) -> float:
    """The number with the fewest digits that still passes and is not much further away."""
    limit = 1.02 * _distance(change.old, number)
    for digits in (1, 2, 3):
        short = shortened(number, digits, change.dtype)
        if _distance(change.old, short) <= limit and short != change.old and trials.passes(change, short):
            return float(f"{number:.{digits}g}")
    return number


def _distance(old: float | int | bool, new: float | int | bool) -> float:
    """How far apart two numbers are, relative to the larger one if that is above one."""
    return abs(float(new) - float(old)) / max(1.0, abs(float(old)), abs(float(new)))
