"""Values: the plainest that still fail. Zeros, ones, one constant, few digits; all inputs together, then one by one.

Index and boolean tensors of a handful of elements stay as they are: which class or position is meant is part of the
failure's story. Incoming gradients prefer ones, which is what a sum hands back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reprokit.program.dataflow import contents
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Phase
from reprokit.program.step import Step, is_number
from reprokit.shrink.plainness import MAX_LITERALS, ONES, constant_of, filled, ladder, largest_of, plainness, rounded
from reprokit.shrink.problem import Problem

_MAX_KEPT_INDEXES = 4


def simplify_values(problem: Problem) -> None:
    """Give every input the plainest contents that still fail."""
    _simplify_together(problem)
    _lower_constants(problem)
    for item in problem.best.program.inputs:
        if item.role != "rng" and item.value in problem.best.tensors:
            is_infinite = problem.failure.kind.is_infinite
            plainer = plainer_contents(problem.best.tensors[item.value], item.role, is_infinite=is_infinite)
            candidates = (problem.best.with_tensors({item.value: plain}) for plain in plainer)
            problem.first((f"plainer `{item.name}`", candidate) for candidate in candidates)
    _drop_unit_gradient(problem)


def plainer_contents(tensor: torch.Tensor, role: str, *, is_infinite: bool = False) -> Iterator[torch.Tensor]:
    """Plainer contents for one tensor, plainest first; for an infinity also zeros with one large element."""
    if is_number(tensor):
        for number in (1.0, 0.0) if role == "gradient" else (0.0, 1.0):
            yield filled(tensor, number)
        if is_infinite and not tensor.is_complex() and constant_of(tensor) is None:
            # zeros, and one number in the place of the largest element: a spread, where a constant has none
            place = contents(tensor).abs().nan_to_num(posinf=0.0).argmax()
            for number in ladder(tensor.dtype)[1:]:
                chosen = torch.zeros_like(tensor).reshape(-1)
                chosen[place] = number
                yield torch.where(tensor.isinf(), tensor, chosen.reshape(tensor.shape))
        yield from _plainer_numbers(tensor)
    elif not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > _MAX_KEPT_INDEXES:
        yield torch.zeros_like(tensor)
        yield torch.ones_like(tensor)


def _plainer_numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.is_complex():
        return
    constant = constant_of(tensor)
    if isinstance(constant, float) and constant < 0:
        yield filled(tensor, -1.0)
    if constant is None:
        yield filled(tensor, largest_of(tensor))
    if tensor.numel() <= MAX_LITERALS:
        for digits in (1, 2, 3):
            yield rounded(tensor, digits)


def _simplify_together(problem: Problem) -> None:
    items = [item for item in problem.best.number_inputs if item.role != "gradient"]
    if len(items) < 2:
        return
    best = problem.best
    rungs: tuple[tuple[str, int | None], ...] = (("zeros", None), ("ones", 0), ("large constants", -1))
    for name, rung in rungs[: 3 if problem.failure.kind.is_infinite else 2]:
        tensors = {}
        for item in items:
            tensor = best.tensors[item.value]
            tensors[item.value] = filled(tensor, 0.0 if rung is None else (1.0, *ladder(tensor.dtype))[rung])
        if problem.consider(best.with_tensors(tensors), f"all inputs {name}"):
            return


def _lower_constants(problem: Problem) -> None:
    """Lower the large constants, all that are equal together, as far as the failure allows."""
    for constant in dict.fromkeys(_large_constants(problem.best).values()):
        for rung in range(3):
            tensors = {}
            for value, number in _large_constants(problem.best).items():
                tensor = problem.best.tensors[value]
                lower = ladder(tensor.dtype)[rung]
                if number == constant and lower < abs(number):
                    tensors[value] = filled(tensor, lower if number > 0 else -lower)
            if tensors and problem.consider(problem.best.with_tensors(tensors), "lower constants"):
                break


def _large_constants(candidate: Step) -> dict[int, float]:
    found = {}
    for item in candidate.number_inputs:
        constant = constant_of(candidate.tensors[item.value])
        if isinstance(constant, float) and 2 <= abs(constant) < float("inf"):
            found[item.value] = constant
    return found


def _drop_unit_gradient(problem: Problem) -> None:
    """``out.backward()`` instead of a gradient of one for a single output without dimensions."""
    program = problem.best.program
    last = program.calls[-1]
    if last.target != AUTOGRAD_BACKWARD or len(last.args) != 2 or len(last.args[0]) != 1:
        return
    gradient = problem.best.tensors[last.args[1][0].value]
    if gradient.dim() == 0 and plainness(gradient) == ONES:
        short = Call(BACKWARD, (last.args[0][0],), phase=Phase.BACKWARD, mode=last.mode)
        problem.consider(problem.best.with_call(len(program.calls) - 1, short), "no gradient given")
