"""How large a file may be in what it asks for: a few bytes can describe more than any machine holds.

References make nested lists that double at every level, and a tensor may repeat one stored number 10^12 times.
Everything is counted as it would be copied, before anything else looks at it. ``REPROKIT_LIMITS`` raises a limit:
``calls=1e6``.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from reprokit.errors import SnapshotError, UsageError

VARIABLE = "REPROKIT_LIMITS"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may hold: calls, tensors, items of lists and dicts, levels of nesting, characters in a text, and
    elements that tensors have beyond what is stored (a step of GPT-2 has 2,700 calls and 60,000 items)."""

    calls: float = 200_000
    tensors: float = 100_000
    items: float = 20_000_000
    depth: float = 64
    characters: float = 50_000_000
    elements: float = 2.0**26


def limits() -> Limits:
    """The limits, with those that the environment sets; raises `UsageError` for what is none."""
    given = dict(part.partition("=")[::2] for part in os.environ.get(VARIABLE, "").replace(",", " ").split())
    known = {item.name for item in fields(Limits)}
    try:
        return replace(Limits(), **{name: float(value) for name, value in given.items()})
    except (TypeError, ValueError):
        hint = f"give numbers for {', '.join(sorted(known))}: {VARIABLE}='calls=1e6 elements=1e9'"
        raise UsageError(f"`{VARIABLE}` is `{os.environ[VARIABLE]}`", hint=hint) from None


def require_stored(path: Path) -> None:
    """Raise `ValueError` for an archive that unpacks to more than it is, and `BadZipFile` for one that is none."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("it unpacks to more than it is; torch stores everything as it is")


def require_bounded(content: Any, path: Path) -> None:
    """Raise `SnapshotError` if nested data and tensors exceed the limits."""
    allowed = limits()
    measure = _Measure(int(allowed.depth))
    items, characters = measure.size(content, 0)
    program = content.get("program") if isinstance(content, dict) else None
    calls = program.get("calls") if isinstance(program, dict) else None
    used = {
        "calls": len(calls) if isinstance(calls, (list, tuple)) else 0,
        "tensors": len(measure.tensors),
        "items": items,
        "depth": measure.depth,
        "characters": characters,
        "elements": sum(map(_unstored, measure.tensors.values())),
    }
    for name, count in used.items():
        if count > getattr(allowed, name):
            raise SnapshotError(
                f"`{path}` has more than {getattr(allowed, name):,.0f} {name}",
                hint=f"if you trust it, set {VARIABLE}={name}=... to a higher number",
            )


class _Measure:
    """Counts what nested data would be without its sharing; every object is looked at once.

    ``depth`` is the deepest level met, at most one more than was asked for; nothing below that is counted.
    """

    def __init__(self, deepest: int) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.depth = 0
        self._deepest = deepest
        self._known: dict[int, tuple[int, int]] = {}

    def size(self, value: Any, depth: int) -> tuple[int, int]:
        """Items and characters."""
        self.depth = max(self.depth, depth)
        if isinstance(value, str):
            return 1, len(value)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        if not isinstance(value, (dict, list, tuple, set, frozenset)) or depth > self._deepest:
            return 1, 0
        if id(value) not in self._known:
            parts = [part for item in value.items() for part in item] if isinstance(value, dict) else value
            sizes = [self.size(part, depth + 1) for part in parts]
            self._known[id(value)] = 1 + sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        return self._known[id(value)]


def _unstored(tensor: torch.Tensor) -> int:
    """Elements that a tensor has beyond those in its storage, as one that was expanded does."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return max(0, tensor.numel() - tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))
