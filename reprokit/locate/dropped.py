"""NaN values that the forward pass drops before the loss, such as those in the branch that a ``where`` does not take.

The loss is finite. The backward pass gives the dropped elements a gradient of zero, and zero times a derivative that is
computed from a NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Set

from reprokit.locate.calls import short_name
from reprokit.locate.domains import SPREADING
from reprokit.locate.notes import Notes
from reprokit.locate.ways import NAN


def find_drop(
    notes: Notes, values: Set[int], after: int, before: int, differentiated: Set[int], *, through_layers: bool
) -> int | None:
    """The first call that reads a NaN which one of ``values`` led to and returns none.

    ``after`` is the call that made them, ``before`` the backward call. Only calls whose derivative was taken count. A
    NaN behind a layer is followed with ``through_layers`` only.
    """
    led_to = set(values)
    for index in range(after + 1, before):
        reads, writes = notes.reads.get(index, {}), notes.writes.get(index, {})
        if led_to.isdisjoint(reads):
            continue
        if any(NAN in ways for ways in writes.values()) or not _reads_nan(reads, led_to):
            if through_layers or short_name(notes.program.calls[index]) not in SPREADING:
                led_to.update(writes)
        elif index in differentiated:
            return index
    return None


def _reads_nan(reads: dict[int, frozenset[str]], values: Set[int]) -> bool:
    return any(NAN in reads[value] for value in values if value in reads)
