"""In-place writes of the loop: parameters and buffers (state), tensors of its own, results of the step.

State is not saved here: it is part of the copies that a capture goes back with. Of tensors that a replay needs as they
were before, the old content is kept; big ones only if the step has read them already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from reprokit.capture.record.entry import TENSORS, Entry, PlainEntry, is_among, new_tensors
from reprokit.capture.record.structure import is_leaf, iter_tensors
from reprokit.program.ir import AUTOGRAD_GRAD

_SMALL = 65_536  # elements that are always worth saving before a write


class WrittenMemory:
    """Knows the memory of the state, and what outside tensors held before the step wrote into them.

    ``_made`` holds the ids of tensors that modules and the entries up to ``_last`` made. ``_format`` is that of the
    last state that was converted. ``_differentiated`` is the memory of tensors that `torch.func` transforms of this
    step differentiated by. Invariant: ``_by_memory`` lists the outside tensors of the first ``_scanned`` entries by
    their memory.
    """

    def __init__(self) -> None:
        self.saved: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()
        self._state: dict[int, weakref.ref[torch.Tensor]] = {}
        self._untouched: dict[int, torch.Tensor] = {}
        self.on_first_write: Callable[[torch.Tensor, bool], None] = lambda tensor, is_trained: None
        self.on_conversion: Callable[[], None] = lambda: None
        self.on_rebound_write: Callable[[], None] = lambda: None
        self._rebound: set[int] = set()
        self._format: tuple[torch.dtype, torch.Size, torch.device] | None = None
        self._moves_from: int | None = None
        self._by_memory: dict[int, list[torch.Tensor]] = {}
        self._num_counted = self._scanned = 0
        self._differentiated: set[int] = set()
        self._last: Entry | None = None
        self.has_optimizer = False

    def restart(self) -> None:
        """A new step begins."""
        self.saved = {}
        self._differentiated = set()
        self._begin_count()

    def note_differentiated(self, tensors: Iterable[torch.Tensor]) -> None:
        """A transform differentiates by tensors: where there is no optimizer, a write into one is an update."""
        if not self.has_optimizer:
            self._differentiated.update(p for tensor in tensors if (p := address_of(tensor)) is not None)

    def _begin_count(self) -> None:
        self._made, self._num_counted = set(), 0
        self._by_memory, self._scanned = {}, 0
        self._last = None

    def recount(self, entries: list[Entry]) -> None:
        """The step consists of these entries only; ids of what others made or were given may come back as others'."""
        self._begin_count()
        if self.saved:
            held = ((entry.output, entry.args, entry.kwargs) for entry in entries)
            known = {id(tensor) for values in held for tensor in iter_tensors(values)}
            self.saved = {key: content for key, content in self.saved.items() if key in known}

    def note_made(self, entry: Entry) -> None:
        """An entry has got its results."""
        output = entry.output
        if output.__class__ is torch.Tensor and not is_among(output, entry.versions):
            self._made.add(id(output))
        else:
            self._made.update(map(id, new_tensors(entry, self._made)))

    def _count(self, entries: list[Entry]) -> None:
        if self._num_counted > len(entries) or (self._num_counted and entries[self._num_counted - 1] is not self._last):
            self._begin_count()
        for entry in entries[self._num_counted :]:
            if not isinstance(entry, PlainEntry) or entry.output.__class__ not in TENSORS:
                self.note_made(entry)
            elif not entry.is_write and all(entry.output is not value for value in entry.args):
                self._made.add(id(entry.output))
        self._num_counted = len(entries)
        self._last = entries[-1] if entries else None

    def forget(self) -> None:
        """There is no state to know any more."""
        self.on_first_write = lambda tensor, is_trained: None
        self.on_conversion = self.on_rebound_write = lambda: None
        self._state, self._untouched = {}, {}

    def know_state(self, copied: Iterable[torch.Tensor], untouched: Iterable[torch.Tensor]) -> None:
        """These tensors are all the state: a capture holds copies of the ones, and of the others once they are
        written."""
        self._untouched = {p: tensor for tensor in untouched if (p := address_of(tensor)) is not None}
        state = [*self._untouched.values(), *copied]
        self._state = {p: weakref.ref(tensor) for tensor in state if (p := address_of(tensor)) is not None}

    def copied(self) -> None:
        """A copy of the state has been taken, of the buffers that forwards have put in place as well."""
        self._rebound = set()

    @property
    def has_rebound(self) -> bool:
        """True if a forward has replaced a buffer since the last copy of the state."""
        return bool(self._rebound)

    def rebind(self, old: Any, new: Any) -> None:
        """A forward puts a new tensor in the place of a buffer, whose memory may be used for something else then."""
        if isinstance(old, torch.Tensor) and (address := address_of(old)) in self._rebound:
            self._rebound.discard(address)
            self._state.pop(address, None)
        if isinstance(new, torch.Tensor) and (address := address_of(new)) is not None:
            self._rebound.add(address)
            self._state[address] = weakref.ref(new)

    def is_state(self, tensor: torch.Tensor) -> bool:
        """True if a tensor shares memory with the state."""
        return address_of(tensor) in self._state

    def judge(self, target: Any, entry: Entry, entries: list[Entry], *, is_trained: bool) -> bool | None:
        """True if a write of ``entry`` into ``target`` changes the state; ``None`` if it need not be noted.

        Old contents that a replay may need are saved on the way. ``entries`` are those before; ``is_trained``: the step
        has called backward.
        """
        if isinstance(target, (list, tuple)):
            written = [item for item in target if isinstance(item, torch.Tensor) and self.is_state(item)]
            for item in written:
                self._announce(item)
            return True if written else None
        if not isinstance(target, torch.Tensor):
            return None
        if self._rebound and address_of(target) in self._rebound:
            self.on_rebound_write()  # going back would write another tensor
        pointer = address_of(target)
        if pointer in self._state:
            self._announce(target)
            return True
        if pointer in self._differentiated or (target.requires_grad and is_leaf(target)):
            if not (is_trained or self._differentiated):
                return None  # being made, for example a parameter of a module that no root holds yet
            if pointer is not None:  # the loop trains it, though no module and no optimizer has it
                self._state[pointer] = weakref.ref(target)
            self.on_first_write(target, True)
            return True
        if target.layout is not torch.strided:
            return False
        outside: list[torch.Tensor] = []
        self._count(entries)
        if pointer is not None and not _is_sole_owner(target):
            self._scan(entries)
            outside = self._by_memory.get(pointer, [])
        if id(target) not in self._made:
            if not outside and target.numel() > _SMALL and not _carries_grad(entry):
                return None  # later calls use it by its value
            outside = [target, *outside]
        for tensor in outside:
            if id(tensor) not in self.saved:
                self.saved[id(tensor)] = tensor.detach().clone(memory_format=torch.preserve_format)
        return False

    def is_differentiated(self, written: Any) -> bool:
        """True if a transform differentiated by a tensor that is written."""
        return any(address_of(tensor) in self._differentiated for tensor in iter_tensors(written))

    def is_trained(self, written: Any, differentiations: list[Entry]) -> bool:
        """True if the loop differentiates for the state that is written, so that writing it is an update.

        A teacher gets no gradient. Where there is no optimizer, any state that could get one counts.
        """
        if self.is_differentiated(written):
            return True
        for item in written if isinstance(written, (list, tuple)) else (written,):
            reference = self._state.get(address_of(item) or 0)
            owner = reference() if reference is not None else None
            if owner is None or not owner.requires_grad or not differentiations:
                continue
            if owner.grad is not None or not self.has_optimizer or _is_differentiated(owner, differentiations):
                return True
        return False

    def before_move(self, target: torch.Tensor) -> None:
        """State is about to get other memory, or with ``p.data -= ...`` the memory that it has."""
        self._moves_from = address_of(target)
        self._format = (target.dtype, target.shape, target.device)

    def moved(self, target: torch.Tensor) -> None:
        """State has got other memory, perhaps of another shape; what it had may come back as that of a batch."""
        pointer, before = address_of(target), self._moves_from
        if before != pointer and before in self._state and self._state[before]() is target:
            del self._state[before]
        if pointer is not None:
            self._state.setdefault(pointer, weakref.ref(target))
        if self._format != (target.dtype, target.shape, target.device):
            self.on_conversion()

    def _announce(self, target: torch.Tensor) -> None:
        """State that nothing had written so far is about to change."""
        pointer = address_of(target) if self._untouched else None
        tensor = self._untouched.pop(pointer, None) if pointer is not None else None
        if tensor is not None:
            self.on_first_write(tensor, False)

    def _scan(self, entries: list[Entry]) -> None:
        for entry in entries[self._scanned :]:
            for value in entry.args:
                for tensor in (value,) if value.__class__ in TENSORS else iter_tensors(value):
                    self._scan_tensor(tensor)
            for tensor in iter_tensors(entry.kwargs) if entry.kwargs else ():
                self._scan_tensor(tensor)
        self._scanned = len(entries)

    def _scan_tensor(self, tensor: torch.Tensor) -> None:
        pointer = address_of(tensor) if id(tensor) not in self._made else None
        if pointer is not None and pointer not in self._state:
            known = self._by_memory.setdefault(pointer, [])
            if all(tensor is not other for other in known):
                known.append(tensor)


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins; ``None`` for tensors without plain memory of their own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _carries_grad(entry: Entry) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in entry.versions)


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return _num_owners is not None and _num_owners(storage._cdata) == _SOLE


_num_owners = getattr(torch._C, "_storage_Use_Count", None)
_SOLE = 2  # the tensor, and the object that stands for its storage here


def _is_differentiated(tensor: torch.Tensor, entries: list[Entry]) -> bool:
    asked = (entry.kwargs.get("inputs", entry.args[1:2]) for entry in entries if entry.name == AUTOGRAD_GRAD)
    return any(item is tensor for inputs in asked for item in iter_tensors(inputs))
