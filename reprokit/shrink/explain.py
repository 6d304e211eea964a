"""Explain: which of the surviving inputs and constants matter, and the nearest variant that passes.

A part is free when the program fails in the same way with several other plain and random contents. Everything is run;
a variant that is invalid says nothing. The number of runs is bounded, so that a large result is not explained for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reprokit.shrink.arguments import leaves
from reprokit.shrink.budget import OutOfBudget
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.oracle import Verdict
from reprokit.shrink.parts import Change, ConstantPart, InputPart, Nearest, Part, Varied
from reprokit.shrink.plainness import shortened
from reprokit.shrink.problem import Problem
from reprokit.shrink.safety import is_safe

MAX_RUNS = 120
_MAX_CONSTANTS = 16
_MAX_STEPS = 16
_MAX_CHANGES = 3


@dataclass
class Explanation:
    """Items for inputs and for constants, each with ``free``, and the nearest change that passes, if one was found.

    An item that could not be varied has ``tried`` false and counts as not free. ``is_complete`` is false when the
    budget of the whole reduction was spent on the way.
    """

    inputs: list[Varied] = field(default_factory=list)
    constants: list[Varied] = field(default_factory=list)
    nearest: Nearest | None = None
    is_complete: bool = True


def explain(problem: Problem) -> Explanation:
    """Vary what is left of the best candidate, one part at a time."""
    trials = _Trials(problem)
    found = Explanation()
    parts: list[tuple[bool | None, Part]] = []
    for item in problem.best.program.inputs:
        if item.role != "rng":
            part = InputPart(problem.best, item)
            free = trials.is_free(part)
            found.inputs.append(_varied(free, input=item.name))
            parts.append((free, part))
    for constant in _constants(problem.best, trials):
        free = trials.is_free(constant)
        found.constants.append(_varied(free, call=constant.call, argument=constant.name, value=constant.number))
        parts.append((free, constant))
    found.nearest = _nearest(trials, [part for free, part in parts if free is False])
    found.is_complete = not trials.is_over
    return found


class _Trials:
    """Runs variants until the budget for explaining is spent."""

    def __init__(self, problem: Problem) -> None:
        self._oracle = problem.oracle
        self._limit = problem.oracle.checks + MAX_RUNS
        self.is_over = False

    def verdict(self, candidate: Candidate, change: str) -> Verdict:
        """The verdict on a variant; invalid, which says nothing, when it may not be run."""
        if self.is_over or self._oracle.checks >= self._limit or not is_safe(candidate.program, candidate.shapes):
            return Verdict.INVALID
        try:
            return self._oracle.check(candidate, change)
        except OutOfBudget:
            self.is_over = True
            return Verdict.INVALID

    def passes(self, change: Change, number: float | int | bool) -> bool:
        """True if nothing goes wrong with this number in place of another one."""
        return self.verdict(change.apply(number), f"{change.name} = {number:.6g}") is Verdict.PASSES

    def is_free(self, part: Part) -> bool | None:
        """True if every variant fails in the same way; ``None`` when none could be run."""
        was_run = False
        for candidate in part.variants():
            verdict = self.verdict(candidate, f"other contents of {part.name}")
            if verdict in (Verdict.PASSES, Verdict.OTHER):
                return False
            was_run = was_run or verdict is Verdict.SAME
        return True if was_run and not self.is_over else None


def _varied(free: bool | None, **place: Any) -> Varied:
    return Varied(**place, free=bool(free), tried=False if free is None else None)


def _constants(best: Candidate, trials: _Trials) -> list[ConstantPart]:
    """The numbers in arguments; whole ones only where a fraction would do, since others are sizes and places."""
    found: list[ConstantPart] = []
    for index, call in enumerate(best.program.calls):
        for path, leaf in () if call.is_differentiation else leaves(call):
            if isinstance(leaf, bool) or not isinstance(leaf, (int, float)) or len(found) == _MAX_CONSTANTS:
                continue
            part = ConstantPart(best, index, path, leaf)
            if (
                isinstance(leaf, float)
                or trials.verdict(part.apply(float(leaf) + 0.5), f"a fraction for {part.name}") is not Verdict.INVALID
            ):
                found.append(part)
    return found


def _nearest(trials: _Trials, parts: list[Part]) -> Nearest | None:
    """The smallest change of one number that passes, among the first few that were found."""
    found: list[tuple[float, Nearest]] = []
    for part in parts:
        for change in part.changes():
            target = next((n for n in _targets(change) if trials.passes(change, n)), None)
            if target is not None:
                near = _nearer(trials, change, target)
                place = change.place
                at = (place.input, place.element, place.call, place.argument, place.value)
                found.append((_distance(change.old, near), Nearest(*at, from_=change.old, to=near)))
                break
        if len(found) == _MAX_CHANGES:
            break
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _targets(change: Change) -> Iterator[float | int | bool]:
    """Numbers that may pass, the plainest first."""
    old = change.old
    if isinstance(old, bool):
        yield not old
    elif not change.dtype.is_floating_point:
        yield from (number for number in dict.fromkeys((old - 1, 0, 1)) if 0 <= number != old)
    else:
        yield from (number for number in (0.0, 1.0, -1.0) if number != old)


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
    """Half the way, in orders of magnitude where these differ."""
    if first * second > 0 and not 0.25 < first / second < 4:
        return math.copysign(math.sqrt(abs(first)) * math.sqrt(abs(second)), first)
    if 0.0 in (first, second):
        return (first + second) * 1e-4
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
    if not math.isfinite(old):
        return math.inf
    return abs(float(new) - float(old)) / max(1.0, abs(float(old)), abs(float(new)))
