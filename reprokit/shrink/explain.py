"""Explain: which of the surviving inputs matter. An input is free when it fails with other plain contents as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from reprokit.shrink.constants import is_number
from reprokit.shrink.oracle import Oracle, OutOfBudget, Verdict
from reprokit.shrink.plainness import constant_of
from reprokit.shrink.problem import Problem


def explain(problem: Problem) -> list[dict[str, Any]]:
    """For every input that holds values: its name, and whether its value is free."""
    return [
        {"input": item.name, "free": _is_free(problem, problem.oracle, item.value)}
        for item in problem.best.program.inputs
        if item.role != "rng"
    ]


def _is_free(problem: Problem, oracle: Oracle, value: int) -> bool:
    variants = list(_variants(problem.best.tensors[value]))
    try:
        return bool(variants) and all(
            oracle.check(problem.best.with_tensors({value: other}), "explain") is Verdict.SAME for other in variants
        )
    except OutOfBudget:
        return False


def _variants(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other contents: of zeros, ones and halves, those that the tensor does not hold."""
    if is_number(tensor):
        for number in (0.0, 1.0, 0.5):
            if constant_of(tensor) != number:
                yield torch.full_like(tensor, number)
    elif tensor.dtype is torch.bool:
        yield ~tensor
