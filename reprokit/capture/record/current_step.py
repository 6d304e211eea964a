"""The step that is running: what the loop has done since its parameters last changed.

Entries hold references, not copies. What nobody can use any more is let go of, and so are the oldest results that no
gradient flows through when the step holds too much: they are used by value then.

An evaluation between two steps must not pile up on the tape, nor an epoch of prepared data. A result can still be used
if something other than the tape refers to it, or if a later entry that matters was given it. References are counted:
what the tape's own entries hold is subtracted from what Python counts. Calls that made a NaN stay.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import TENSORS, Entry, PlainEntry, unwrapped
from reprokit.capture.record.inplace_writes import WrittenMemory
from reprokit.capture.record.state import num_bytes
from reprokit.capture.record.structure import is_leaf, iter_tensors
from reprokit.errors import ignored_errors
from reprokit.locate.ways import ways_of

if TYPE_CHECKING:
    from reprokit.capture.record.screens import Suspect

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


BUDGET = 256 * 2**20  # bytes of loop-level results kept alive per step
_SWEEP_AT = 2**22  # bytes
_CALL_BYTES = _SWEEP_AT // 256  # that each call is taken to hold beside its tensors
_MODULE_BYTES = _SWEEP_AT // 2  # that a root module's results and their graphs are taken to hold
_ITEM_BYTES = 8  # for each element of a result and of the first tensor that was given: 4, or twice as many tensors


class Listener(Protocol):
    """Receives the events of a step; may raise to stop the loop."""

    def meet_module(self, module: torch.nn.Module) -> None:
        """A root module that is not known, or not for good, is about to be called."""

    def judge_start(self, entry: Entry) -> None:
        """A backward call is about to run."""

    def finish_differentiation(self, entry: Entry) -> None:
        """A backward call is over, and noted."""

    def read_bad(self, tensor: torch.Tensor) -> None:
        """The loop has read a number or a test from which it knows of a bad value."""

    def is_update(self, written: Any) -> bool:
        """The loop is about to write into its state, while there is a suspect: is that an update made of it?"""

    def before_conversion(self) -> None:
        """State is about to get another type, shape or place in a module."""

    def finish_hand_update(self) -> None:
        """The first thing after the loop changed parameters by itself is about to run: it begins a new step."""

    def note_loss(self, loss: torch.Tensor) -> None:
        """A transform that differentiates has returned a loss."""


class RunningStep:
    """``entries`` are what the loop did; ``memory`` knows what it made and wrote.

    ``raised`` is the last exception that came out of something the loop called, with its entry. ``is_hand_updated``
    says whether the loop has changed parameters itself. ``generators`` are the states of Python's and NumPy's
    generators for the module that is about to be called. ``suspect`` is a bad value that the loop may still deal with.
    ``gaps`` are calls that an exception has ended after they may have written something, ``None`` for work that is no
    entry. ``on_lost(entries)`` is called with dropped entries, of which there were ``num_dropped``.
    ``num_bytes`` is an estimate of what the entries keep alive. ``is_noted``: the functions that the loop calls in this
    step are among the entries. ``differentiations`` are the entries of backward calls.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.memory = WrittenMemory()
        self.raised: tuple[BaseException, Entry] | None = None
        self.gaps: list[Entry | None] = []
        self.is_hand_updated = False
        self.suspect: Suspect | None = None
        self.is_noted = True
        self.generators: dict[str, Any] | None = None
        self.on_lost: Callable[[list[Entry]], None] = lambda entries: None
        self.differentiations: list[Entry] = []
        self._budget = BUDGET
        self._given: set[int] = set()  # ids of tensors that are part of `num_bytes`
        self.num_bytes = self.num_dropped = 0
        self._sweep_at = _SWEEP_AT

    @property
    def current(self) -> list[Entry]:
        """The entries without those of steps that the loop has skipped."""
        return [entry for entry in self.entries if not entry.is_skipped]

    def restart(self) -> None:
        """Forget the step: parameters have just changed."""
        self.entries = []
        self.memory.restart()
        self.raised = None
        self.gaps = []
        self.suspect = None
        self.is_hand_updated = False
        self.differentiations = []
        self._budget = BUDGET
        self.num_dropped = 0
        self._given = set()
        self._sweep_at = min(self._sweep_at, BUDGET)
        self.num_bytes = 0

    def fail(self, error: BaseException, entry: Entry) -> None:
        """An exception came out of a call."""
        self.raised = (error, entry)
        self.note_gap(entry)

    def note_gap(self, entry: Entry) -> None:
        """A call is not noted as a whole; remember it if it has written, or if that cannot be known."""
        has_written = True
        with ignored_errors():  # of a module with methods of its own
            has_written = _has_written(entry)
        if has_written:
            self.gaps.append(entry)

    def forget_gradients(self) -> None:
        """All gradients are gone, and with them those of interrupted backward calls."""
        self.gaps = [gap for gap in self.gaps if gap is None or gap.kind is not kinds.BACKWARD]

    def add(self, entry: Entry) -> None:
        """Note a call with everything that it made; of a root module, when it is about to run."""
        self.entries.append(entry)
        self.num_bytes += _bytes_of(entry, self._given)
        if self.num_bytes > self._sweep_at:
            self._sweep()

    def add_plain(self, entry: PlainEntry, result: torch.Tensor) -> None:
        """Note a call in the usual case, that it made one tensor of tensors."""
        self.entries.append(entry)
        size = 0 if entry.is_write else result.numel()
        first = entry.args[0] if entry.args else None
        if first.__class__ in TENSORS and (given := first.numel()) > size and id(first) not in self._given:
            self._given.add(id(first))
            size += given
        self.num_bytes += _CALL_BYTES + _ITEM_BYTES * size
        if self.num_bytes > self._sweep_at:
            self._sweep()

    def add_differentiation(self, entry: Entry) -> None:
        """Note a backward call."""
        self.differentiations.append(entry)
        if entry.output is None:
            self.entries.append(entry)
        else:
            self.add(entry)

    def finish_module(self, entry: Entry, output: Any) -> None:
        """A root module has returned.

        Of a structure its tensors are noted, because it may change later: a distribution computes attributes when they
        are first read, and a loop adds its own to a dict.
        """
        is_tensor = output is None or output.__class__ is torch.Tensor
        entry.output = output if is_tensor else list(iter_tensors(output))
        self.memory.note_made(entry)

    def _sweep(self) -> None:
        """Let go of what nobody can use; the less that is, the longer until the next look."""
        num_entries, before, has_dropped = len(self.entries), self.num_bytes, drop_unused(self.entries)
        lost: list[Entry] = []
        if self._count() > _SWEEP_AT:
            useful = set(map(id, still_useful(self.entries)))
            lost = [entry for entry in self.entries if id(entry) not in useful]
            self.entries[:] = [entry for entry in self.entries if id(entry) in useful]
        if lost or has_dropped:
            self.memory.recount(self.entries)
            self.on_lost(lost)
        self.num_bytes = self._count()
        if self.num_bytes > self._budget:
            self._make_room()
        self.num_dropped += num_entries - len(self.entries)
        wait = 2 * (self.num_bytes if 2 * self.num_bytes < before else before)
        self._sweep_at = max(_SWEEP_AT, min(wait, self._budget))

    def _count(self) -> int:
        self._given.clear()
        return sum(_bytes_of(entry, self._given) for entry in self.entries)

    def _make_room(self) -> None:
        """Let go of the oldest calls that no gradient flows through: their results are used by value then."""
        users = Counter(id(tensor) for entry in self.entries for tensor in _held(entry))
        sizes = {id(tensor): num_bytes([tensor]) for entry in self.entries for tensor in _held(entry)}
        self.num_bytes = sum(sizes.values())
        if self.num_bytes <= self._budget // 2:
            return
        kept: list[Entry] = []
        lost: list[Entry] = []
        for entry in self.entries:
            if self.num_bytes <= self._budget // 2 or not _is_by_value(entry):
                kept.append(entry)
                continue
            lost.append(entry)
            for tensor in _held(entry):
                users[id(tensor)] -= 1
                self.num_bytes -= 0 if users[id(tensor)] else sizes[id(tensor)]
        self.entries[:] = kept
        self.memory.recount(kept)
        self.on_lost(lost)
        while self.num_bytes > self._budget // 2:
            self._budget *= 2  # nothing more can go: gradients need all of it anyway


def _bytes_of(entry: Entry, given: set[int]) -> int:
    """An estimate of what an entry keeps alive, without tensors that were ``given`` before; adds to these."""
    first = entry.args[0] if entry.args else None
    tensors = [] if entry.output is None else list(iter_tensors(entry.output))
    if first.__class__ in TENSORS:
        tensors.append(first)
    size = 0
    for tensor in tensors:
        if id(tensor) not in given:
            given.add(id(tensor))
            size += tensor.numel()
    return (_MODULE_BYTES if entry.kind is kinds.MODULE else _CALL_BYTES) + _ITEM_BYTES * size


def _has_written(entry: Entry) -> bool:
    if entry.kind is kinds.MODULE:
        return entry.is_training and any(module._buffers for module in unwrapped(entry.target).modules())
    if entry.kind is kinds.BACKWARD and entry.target is not torch.autograd.grad:
        return True  # some gradients
    return any(t._version != v for t, v in entry.versions if v >= 0)


def _held(entry: Entry) -> list[torch.Tensor]:
    tensors = (*(tensor for tensor, _ in entry.versions or ()), *iter_tensors(entry.output))
    return list({id(tensor): tensor for tensor in tensors if not is_leaf(tensor)}.values())


def _is_by_value(entry: Entry) -> bool:
    """True if what a call returned can be used by value: no gradient flows through it, and it has changed nothing."""
    if entry.kind not in kinds.FORWARD or entry.writes_state or entry.writes_view:
        return False
    outputs = list(iter_tensors(entry.output))
    return bool(outputs) and not any(tensor.requires_grad for tensor in outputs)
