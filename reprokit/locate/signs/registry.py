"""The register of signs, and what many of them say: how many elements, of which dtype."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

Numbers = dict[str, Any]
Sign = Callable[..., Numbers | None]
SIGNS: dict[str, Sign] = {}
_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "below": operator.lt, "at_most": operator.le, "above": operator.gt, "at_least": operator.ge, "equal": operator.eq,
}  # fmt: skip


def sign(function: Sign) -> Sign:
    """Register a predicate under its name."""
    SIGNS[function.__name__] = function
    return function


def places(mask: torch.Tensor | None, **more: Any) -> Numbers | None:
    """How many of how many elements, with ``more`` to say; ``None`` when there are none."""
    count = int(mask.sum()) if mask is not None else 0
    return {"count": count, "total": mask.numel(), **more} if mask is not None and count else None


def number_named(name: str | float, dtype: torch.dtype) -> float:
    """A number of the catalogue: itself, or a word for one that depends on the dtype."""
    if not isinstance(name, str):
        return float(name)
    limits = torch.finfo(dtype)
    eps = 10.0 ** math.ceil(math.log10(limits.eps))  # as people write it
    return {
        "eps": eps, "tiny": float(limits.tiny), "min": float(limits.min), "max": float(limits.max),
        "below_one": 1.0 - eps, "above_minus_one": eps - 1.0,
        "log_max": math.log(limits.max) - 1.0, "log_limit": math.log(limits.max), "log2_limit": math.log2(limits.max),
        "small": 1e-3 if dtype is torch.float16 else 1e-6,
    }[name]  # fmt: skip


def compare(values: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """Where values compare as wanted: ``below``, ``at_least``, ... a number, or a word for one."""
    dtype = values.dtype if values.is_floating_point() else torch.float32
    mask = torch.ones_like(values, dtype=torch.bool)
    for name, bound in wanted.items():
        mask &= _COMPARISONS[name](values, number_named(bound, dtype))
    return mask


def is_wanted(number: Any, wanted: dict[str, float]) -> bool:
    """Whether a plain number compares as wanted."""
    return isinstance(number, (int, float)) and all(_COMPARISONS[name](number, wanted[name]) for name in wanted)


def is_half(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in half precision."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def dtype_name(tensor: torch.Tensor) -> str:
    """``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a dtype, below which everything is zero."""
    return float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)


def is_lost(number: object, dtype: torch.dtype) -> bool:
    """Whether a dtype rounds a number to zero that is not zero."""
    return isinstance(number, float) and number != 0 and float(torch.tensor(number, dtype=dtype)) == 0
