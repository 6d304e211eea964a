"""Entries that may go: an evaluation between two steps must not pile up on the tape, nor an epoch of prepared data.

A result can still be used if something other than the tape refers to it, or if a later entry that matters was given it.
References are counted: what the tape's own entries hold is subtracted from what Python counts. Data prepared by very
many calls are used by value: what is finite and has no gradient cannot be the origin. Calls that made a NaN stay.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import TENSORS, Entry, PlainEntry
from reprokit.capture.record.structure import iter_tensors
from reprokit.locate.ways import ways_of

_CONTAINERS = (list, tuple, dict, set)


def drop_unused(entries: list[Entry]) -> bool:
    """Take plain entries with a result that nothing else refers to out of ``entries``; true if there were any.

    The last one first, because it is what refers to the results of those before it.
    """
    kept: list[Entry | None] = list(entries)
    entries.clear()
    for position in range(len(kept) - 1, -1, -1):
        entry = kept[position]
        if isinstance(entry, PlainEntry) and not entry.is_write and _is_alone(entry):
            kept[position] = None
    entries += [entry for entry in kept if entry is not None]
    return len(entries) < len(kept)


def _is_alone(entry: Entry) -> bool:
    """True if an entry has the only reference to its result."""
    if entry.output.__class__ not in TENSORS:
        return False
    count = sys.getrefcount(entry.output)
    if count > _ALONE and _COUNTS_OWNERS and entry.output._use_count() > 1:
        count -= 1
    return count == _ALONE


def still_useful(entries: list[Entry]) -> list[Entry]:
    """The entries that later ones may depend on, in order; all those that change something are."""
    held = _Held()
    for entry in entries:
        held.add_entry(entry)
    needed: set[int] = set()
    useful: list[Entry] = []
    for entry in reversed(entries):
        outputs = {id(tensor) for tensor in iter_tensors(entry.output)}
        if _changes_something(entry) or outputs & needed or held.is_used_elsewhere(id(entry.output)):
            useful.append(entry)
            needed.update(id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs)))
    return useful[::-1]


def _changes_something(entry: Entry) -> bool:
    is_pure = entry.kind in kinds.FORWARD and not (entry.writes_state or entry.writes_view)
    return not is_pure or entry.output is None


class _Held:
    """Objects that the tape refers to, each with how often it does."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._counts: dict[int, int] = {}
        self._extra = 0
        self._extra = self._num_references(self.add([]))

    def add_entry(self, entry: Entry) -> None:
        """Count what an entry refers to."""
        for value in (entry.args, entry.kwargs, entry.versions, entry.output):
            self.add(value)

    def add(self, value: Any) -> int:
        """Count one more reference to ``value``, and those from it if it is new; its id."""
        key = id(value)
        if key in self._objects:
            self._counts[key] += 1
            return key
        self._objects[key] = value
        self._counts[key] = 1
        for inner in _inner(value):
            self.add(inner)
        return key

    def is_used_elsewhere(self, root: int) -> bool:
        """True if something other than the tape refers to an object, or to anything in it that can be looked into."""
        waiting, seen = [root], set()
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            if self._num_references(key) - self._extra > self._counts[key]:
                return True
            waiting += [id(inner) for inner in _inner(self._objects[key])]
        return False

    def _num_references(self, key: int) -> int:
        count = sys.getrefcount(self._objects[key])
        if _COUNTS_OWNERS and isinstance(self._objects[key], torch.Tensor) and self._objects[key]._use_count() > 1:
            count -= 1
        return count


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or not (isinstance(value, _CONTAINERS) or _is_record(value)):
        return
    for inner in gc.get_referents(value):
        if isinstance(inner, (torch.Tensor, *_CONTAINERS)) or _is_record(inner):
            yield inner


def _counts_owners() -> bool:
    """True if this torch counts one reference more when a graph or a view holds a tensor; older ones do not."""
    if not hasattr(torch.Tensor, "_use_count"):
        return False
    with torch._C.DisableTorchFunction():
        tensor = torch.zeros(1)
        before = sys.getrefcount(tensor)
        view = tensor.view(1)
        return sys.getrefcount(tensor) > before and view is not tensor


_COUNTS_OWNERS = _counts_owners()
_ALONE = 2  # references to an object in one slot, as `getrefcount` counts them


def _is_record(value: Any) -> bool:
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)) or callable(value):
        return False
    return hasattr(value, "__dict__")


MOST_CALLS = 256  # a loop's own arithmetic on masks and weights takes tens of calls, a data set thousands


def without_preparation(entries: list[Entry], saved: Mapping[int, torch.Tensor]) -> list[Entry]:
    """``entries`` less those whose results the others can use as they are now; all, if those are not very many."""
    prepared = [entry for entry in entries if _is_preparation(entry)]
    if len(prepared) <= MOST_CALLS:
        return entries
    values = {id(t): t for entry in prepared for t in iter_tensors(entry.output) if id(t) not in saved}
    usable = {key for key, tensor in values.items() if not ways_of(tensor)}
    dropped: set[int] = set()
    while True:
        before = len(usable)
        dropped = {id(e) for e in prepared if all(id(tensor) in usable for tensor in iter_tensors(e.output))}
        for entry in entries:
            if id(entry) not in dropped:
                usable -= {id(t) for t, version in entry.versions if version >= 0 and t._version != version}
                usable -= {id(tensor) for tensor in iter_tensors(entry.output)}
        if len(usable) == before:
            return [entry for entry in entries if id(entry) not in dropped]


def _is_preparation(entry: Entry) -> bool:
    outputs = list(iter_tensors(entry.output))
    is_pure = entry.kind is kinds.FUNCTION and bool(entry.name) and not entry.writes_state
    is_pure = is_pure or (entry.kind is kinds.MODULE and next(entry.target.buffers(), None) is None)
    return is_pure and bool(outputs) and not any(tensor.requires_grad for tensor in outputs)
