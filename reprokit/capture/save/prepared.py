"""Data that the loop prepared before the step needed it: where that took very many calls, its results go by value.

An epoch of images that is transformed before the first backward pass belongs to the first step. What is finite and has
no gradient cannot be the origin, so a replay starts behind it. Calls that made a NaN or an infinity stay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.structure import iter_tensors
from reprokit.locate.ways import ways_of

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
    """True if all that a call did was to make tensors without gradient."""
    outputs = list(iter_tensors(entry.output))
    is_pure = entry.kind is kinds.FUNCTION and bool(entry.name) and not entry.writes_state
    is_pure = is_pure or (entry.kind is kinds.MODULE and next(entry.target.buffers(), None) is None)
    return is_pure and bool(outputs) and not any(tensor.requires_grad for tensor in outputs)
