"""The signs an entry of the catalogue asks for: small predicates over a scene, by the subject of their modules.

Each returns the numbers it saw, which the entry's evidence is worded with, or ``None`` when the sign is not there. The
catalogue names them, so a sign is a public word: change its meaning and the entries that name it change. A sign that
asks for an argument which the origin does not have is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reprokit.locate.domains import COMPARISONS
from reprokit.locate.ways import HALVES

Numbers = dict[str, Any]
Sign = Callable[..., Numbers | None]
SIGNS: dict[str, Sign] = {}


def sign(function: Sign) -> Sign:
    """Register a predicate under its name."""
    SIGNS[function.__name__] = function
    return function


def seen(scene: Any, name: str, /, **parameters: Any) -> Numbers | None:
    """The numbers of a sign; ``None`` also for arguments of a form that it does not know, say of other shapes."""
    try:
        return SIGNS[name](scene, **parameters)
    except (RuntimeError, LookupError, TypeError, ValueError):
        return None


def places(mask: torch.Tensor | None, **more: Any) -> Numbers | None:
    """The count of elements in a mask, its size, and ``more`` numbers; ``None`` for an empty mask."""
    count = int(mask.sum()) if mask is not None else 0
    return {"count": count, "total": mask.numel(), **more} if mask is not None and count else None


def is_wanted(number: Any, wanted: dict[str, float]) -> bool:
    """True if a plain number compares as wanted."""
    return isinstance(number, (int, float)) and all(COMPARISONS[name](number, wanted[name]) for name in wanted)


def is_half(tensor: torch.Tensor) -> bool:
    """True if a tensor is in half precision."""
    return tensor.dtype in HALVES


def dtype_name(tensor: torch.Tensor) -> str:
    """``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a dtype, below which everything is zero."""
    return float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)


def is_lost(number: object, dtype: torch.dtype) -> bool:
    """True if a dtype rounds a number to zero that is not zero."""
    return isinstance(number, float) and number != 0 and float(torch.tensor(number, dtype=dtype)) == 0
