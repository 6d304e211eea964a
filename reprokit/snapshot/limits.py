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

from reprokit import native, torch_private
from reprokit.errors import SnapshotError, UsageError

VARIABLE = "REPROKIT_LIMITS"
_TYPES = frozenset({dict, list, tuple, str, int, float, bool, type(None)})
_DEEPEST = 200  # what the recursion of all readers has room for
_COPIED_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)  # `clone` refuses the others
_SHARED = 8  # how often tensors may hold what is stored once


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may hold: calls, tensors, items of lists and dicts, levels of nesting, characters in a text, and
    elements that tensors have beyond what is stored (a step of GPT-2 has 2,700 calls and 60,000 items)."""

    calls: float = 200_000
    tensors: float = 100_000
    items: float = 4_000_000
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
    """Raise `ValueError` for an archive that unpacks to more than it is, and `BadZipFile` for one that is none.

    An archive with a comment may end differently for torch, which reads it with another library.
    """
    with zipfile.ZipFile(path) as archive:
        entries, comment = archive.infolist(), archive.comment
    if comment:
        raise ValueError("the archive has a comment")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("it unpacks to more than it is; torch stores everything as it is")


def require_bounded(content: Any, path: Path) -> None:
    """Raise `SnapshotError` if nested data and tensors exceed the limits, or are of other types than files hold."""
    allowed = limits()
    measure = _Measure(min(allowed.depth, _DEEPEST))
    try:
        items, characters = measure.size(content, 0)
    except (ValueError, RuntimeError) as error:  # what torch says of a sparse tensor that contradicts itself
        raise SnapshotError(f"`{path}` is damaged: {str(error).splitlines()[0]}", hint="make it again") from error
    program = content.get("program") if isinstance(content, dict) else None
    calls = program.get("calls") if isinstance(program, dict) else None
    # Elements that tensors have beyond those stored, because they were expanded, are sparse or share storage. Tied
    # weights share theirs, so that all of it may be there a few times.
    tensors = list(measure.tensors.values())
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    size = {native.untyped_storage(tensor).data_ptr(): native.untyped_storage(tensor).nbytes() for tensor in strided}
    sparse = sum(native.numel(tensor) for tensor in tensors if tensor.layout is not torch.strided)
    beyond = sparse + sum(
        max(0, native.numel(t) - native.untyped_storage(t).nbytes() // max(1, native.element_size(t))) for t in strided
    )
    shared = sum(native.numel(tensor) * native.element_size(tensor) for tensor in strided) - _SHARED * sum(
        size.values()
    )
    used = {
        "calls": len(calls) if isinstance(calls, (list, tuple)) else 0,
        "tensors": len(measure.tensors),
        "items": items,
        "depth": measure.depth,
        "characters": characters,
        "elements": max(beyond, shared),
    }
    for name, count in used.items():
        require_within(path, name, count)


def require_within(path: Path, name: str, count: float) -> None:
    """Raise `SnapshotError` if a file has more of something than the limit ``name`` allows."""
    allowed = getattr(limits(), name)
    if count > allowed:
        raise SnapshotError(
            f"`{path}` has more than {allowed:,.0f} {name}",
            hint=f"if you trust it, set {VARIABLE}={name}=... to a higher number",
        )


class _Measure:
    """Counts what nested data would be without its sharing; every object is looked at once.

    ``depth`` is the deepest level met, at most one more than was asked for; nothing below that is counted.
    """

    def __init__(self, deepest: float) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.depth = 0
        self._deepest = deepest
        self._known: dict[int, tuple[int, int]] = {}

    def size(self, value: Any, depth: int) -> tuple[int, int]:
        """Items and characters."""
        self.depth = max(self.depth, depth)
        if isinstance(value, str):
            return 1, len(value)
        if type(value) is torch.Tensor:
            _require_plain(value)
            self.tensors[id(value)] = value
        elif type(value) not in _TYPES:
            raise ValueError(f"it holds a `{type(value).__name__}`")
        if not isinstance(value, (dict, list, tuple)) or depth > self._deepest:
            return 1, 0
        if id(value) not in self._known:
            parts = [part for item in value.items() for part in item] if isinstance(value, dict) else value
            sizes = [self.size(part, depth + 1) for part in parts]
            self._known[id(value)] = 1 + sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        return self._known[id(value)]


def _require_plain(tensor: torch.Tensor) -> None:
    """Raise for a tensor with attributes (they may hide its methods), of no fixed shape, or with indices beyond it."""
    if vars(tensor) or tensor.is_nested:
        raise ValueError("it holds a tensor that is not plain")
    if tensor.is_quantized and native.qscheme(tensor) not in _COPIED_SCHEMES:
        raise ValueError("it holds a tensor that is quantized in a way that torch cannot copy")
    if tensor.layout is torch.sparse_coo:
        given = torch_private.sparse_indices(tensor), torch_private.sparse_values(tensor), tensor.shape
        native.sparse_coo_tensor(*given, is_coalesced=native.is_coalesced(tensor), check_invariants=True)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = native.crow_indices(tensor), native.col_indices(tensor), native.values(tensor), tensor.shape
        native.sparse_compressed_tensor(*parts, layout=tensor.layout, check_invariants=True)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = native.ccol_indices(tensor), native.row_indices(tensor), native.values(tensor), tensor.shape
        native.sparse_compressed_tensor(*parts, layout=tensor.layout, check_invariants=True)
