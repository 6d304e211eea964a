"""How a loop deals with a bad value itself: it tests for it, drops or corrects gradients, and skips the update.

All of it is read from noted entries; `hooks/suspects.py` decides from it whether a step failed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry, gradients_read
from reprokit.capture.record.screens import is_bad
from reprokit.capture.record.structure import iter_tensors
from reprokit.program.functions import GRAD_WRITES
from reprokit.program.ir import AUTOGRAD_GRAD

Verdict = Literal["failed", "skipped", "harmless"]

_ZERO = "torch.Tensor.zero_"
_CORRECTIONS = frozenset({"nan_to_num_", "masked_fill_", "copy_", "__setitem__"})


@dataclass(slots=True, eq=False)
class Suspect:
    """An observation: a bad loss, with the backward call that started or would have started from it, or bad gradients.

    ``last`` is the last entry of the step that it belongs to; ``has_begun`` says whether backward was called.
    ``loss`` is the one of the timeline then, ``num_later`` counts the backward calls since;
    ``is_accumulated``: one of them began with a bad value too, and has added to gradients. ``is_read``: the loop has
    read a bad value since.
    """

    observed_at: Literal["loss", "gradient", "output"]
    pending: Entry | None
    last: Entry
    has_begun: bool
    loss: Any
    num_later: int = 0
    is_accumulated: bool = False
    is_read: bool = False


def is_telling(entries: Sequence[Entry], read: torch.Tensor, result: bool) -> bool:
    """True if ``result``, which was read from a tensor, follows from a test that found something not finite.

    Goes back over what may be done with the result of a test; an inversion swaps what tells.
    """
    is_inverted, wanted = False, read
    for entry in entries[: -_LOOKS_BACK - 1 : -1] if not read.requires_grad else ():
        if all(output is not wanted for output in iter_tensors(entry.output)):
            continue
        name, given = _last(entry), [tensor for tensor, _ in entry.versions]
        if name in _TESTS and given and given[-1].is_floating_point():
            return (result is not is_inverted) is _TESTS[name]
        if name in _COMPARISONS and any(_is_bad_number(tensor) for tensor in given):
            return True
        if not given or name not in _CARRIES:
            return False
        is_inverted ^= _CARRIES[name]
        wanted = given[-1]  # the one that was made last
    return False


def _is_bad_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point() and is_bad(tensor.detach())


_LOOKS_BACK = 16  # entries: a test and what combines its results into one
_TESTS = {"isfinite": False, "isnan": True, "isinf": True, "isposinf": True, "ne": True, "__ne__": True}
_COMPARISONS = frozenset({"isclose", "gt", "lt", "ge", "le", "eq", "__gt__", "__lt__", "__ge__", "__le__", "__eq__"})
_CARRIES = {  # and whether true means false then
    **dict.fromkeys(("all", "any", "sum", "max", "amax", "count_nonzero", "stack", "cat"), False),
    **dict.fromkeys(("float", "int", "long", "to", "cpu", "add", "__add__", "__radd__"), False),
    **dict.fromkeys(("__and__", "__or__", "bitwise_and", "bitwise_or", "logical_and", "logical_or"), False),
    **dict.fromkeys(("gt", "__gt__", "ne", "__ne__"), False),
    **dict.fromkeys(("__invert__", "bitwise_not", "logical_not", "eq", "__eq__"), True),
}


def was_skipped(entries: Sequence[Entry], position: int) -> bool:
    """True for a backward call at ``position`` of a past step whose gradients were cleared before its update."""
    if entries[position].kind is not kinds.BACKWARD:
        return False
    later = entries[position + 1 :]
    update = next((number for number, entry in enumerate(later) if _updates(entry)), len(later))
    optimizer = later[update].target if update < len(later) else None
    read = gradients_read(entries)
    return any(_clears(entry, entries[position], read) and _covers(entry, optimizer) for entry in later[:update])


def sets_gradients(entries: Sequence[Entry], position: int) -> bool:
    """True if the loop sets the gradients that a backward call at ``position`` gave before the update after it.

    What it sets may be finite, also where they were not. Gradients of `autograd.grad` are set in any case.
    """
    later = entries[position + 1 :]
    update = next((number for number, entry in enumerate(later) if _updates(entry)), len(later))
    if entries[position].name == AUTOGRAD_GRAD:
        return any(entry.name in GRAD_WRITES for entry in later[:update])
    read = gradients_read(entries)
    return any(_corrects(entry, read) for entry in later[:update])


def _updates(entry: Entry) -> bool:
    return entry.kind is kinds.OPTIMIZER or entry.writes_state


def _covers(entry: Entry, optimizer: Any) -> bool:
    cleared = entry.args[0] if entry.args else None
    return cleared is optimizer or not isinstance(cleared, torch.optim.Optimizer)


def _clears(entry: Entry, differentiation: Entry, read: Set[int]) -> bool:
    """True if an entry drops gradients of a backward call; ``read`` are the ids of gradients that the loop looked at.

    What is set as a gradient may be what `torch.autograd.grad` gave, and what is set to zero may be a batch.
    """
    if entry.name in GRAD_WRITES and differentiation.name == AUTOGRAD_GRAD:
        return entry.args[1] is None
    return _drops(entry, read)


def _corrects(entry: Entry, read: Set[int]) -> bool:
    return _last(entry) in _CORRECTIONS and bool(entry.args) and id(entry.args[0]) in read


def _drops(entry: Entry, read: Set[int]) -> bool:
    if entry.name == _ZERO:
        return id(entry.args[0]) in read
    return entry.kind is kinds.ZERO_GRAD or entry.name in GRAD_WRITES


def drops_in(entries: Sequence[Entry]) -> set[int]:
    """The ids of the entries that drop gradients."""
    read = gradients_read(entries)
    return {id(entry) for entry in entries if _drops(entry, read) or _corrects(entry, read)}


def _last(entry: Entry) -> str:
    return entry.name.rpartition(".")[2]
