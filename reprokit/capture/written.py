"""In-place writes of the loop: parameters and buffers (state), tensors of its own, results of the step.

State is not saved here: it is part of the copies that a capture goes back with. Of tensors that a replay needs as they
were before, the old content is kept; big ones only if the step has read them already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from reprokit.capture.entry import Entry
from reprokit.capture.structure import is_leaf, iter_tensors
from reprokit.program.ir import AUTOGRAD_GRAD

_SMALL = 65_536  # elements that are always worth saving before a write


class WrittenMemory:
    """Knows the memory of the state, and what outside tensors held before the step wrote into them.

    ``made`` holds the ids of tensors that the step made. ``_format`` is that of the last state that was judged.
    Invariant: ``_by_memory`` lists the outside tensors of the first ``_scanned`` entries by their memory.
    """

    def __init__(self) -> None:
        self.saved: dict[int, torch.Tensor] = {}
        self.made: set[int] = set()
        self._state: dict[int, weakref.ref[torch.Tensor]] = {}
        self._untouched: dict[int, torch.Tensor] = {}
        self.on_first_write: Callable[[torch.Tensor], None] = lambda tensor: None
        self.on_conversion: Callable[[], None] = lambda: None
        self.on_rebound_write: Callable[[], None] = lambda: None
        self._rebound: set[int] = set()
        self._format: tuple[torch.dtype, torch.Size, torch.device] | None = None
        self._by_memory: dict[int, list[torch.Tensor]] = {}
        self._scanned = 0
        self.has_optimizer = False

    def restart(self) -> None:
        """A new step begins."""
        self.saved = {}
        self.made = set()
        self._by_memory = {}
        self._scanned = 0

    def keep_only(self, entries: list[Entry]) -> None:
        """The step consists of these entries only; ids of what others made or were given may come back as others'."""
        outputs = {id(tensor) for entry in entries for tensor in iter_tensors(entry.output)}
        given = {id(tensor) for entry in entries for tensor in iter_tensors((entry.args, entry.kwargs))}
        self.made &= outputs
        self.saved = {key: content for key, content in self.saved.items() if key in given or key in outputs}
        self._by_memory, self._scanned = {}, 0

    def forget(self) -> None:
        """There is no state to know any more."""
        self.on_first_write = lambda tensor: None
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

    def judge(self, target: Any, versions: list[tuple[torch.Tensor, int]], entries: list[Entry]) -> bool | None:
        """True if a write into ``target`` changes the state; ``None`` if it need not be noted.

        Old contents that a replay may need are saved on the way.
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
        if self.is_state(target):
            self._announce(target)
            self._format = (target.dtype, target.shape, target.device)
            return True
        if target.requires_grad and is_leaf(target):
            if not any(entry.kind == "differentiate" for entry in entries):
                return None  # being made, for example a parameter of a module that no root holds yet
            pointer = address_of(target)  # the loop trains it, though no module and no optimizer has it
            self._state.update({pointer: weakref.ref(target)} if pointer is not None else {})
            self.on_first_write(target)
            return True
        if target.layout is not torch.strided:
            return False
        self._scan(entries)
        pointer = address_of(target)
        outside = self._by_memory.get(pointer, []) if pointer is not None else []
        if id(target) not in self.made:
            carries_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in versions)
            if not outside and not carries_grad and target.numel() > _SMALL:
                return None  # later calls use it by its value
            outside = [target, *outside]
        for tensor in outside:
            if id(tensor) not in self.saved:
                self.saved[id(tensor)] = tensor.detach().clone(memory_format=torch.preserve_format)
        return False

    def is_trained(self, written: Any, entries: list[Entry]) -> bool:
        """True if the loop differentiates for the state that is written, so that writing it is an update.

        A teacher gets no gradient. Where there is no optimizer, any state that could get one counts.
        """
        for item in written if isinstance(written, (list, tuple)) else (written,):
            reference = self._state.get(address_of(item) or 0)
            owner = reference() if reference is not None else None
            if owner is None or not owner.requires_grad:
                continue
            if owner.grad is not None or not self.has_optimizer or _is_differentiated(owner, entries):
                return True
        return False

    def moved(self, target: torch.Tensor) -> None:
        """State that was just judged got other memory, perhaps of another type or shape."""
        pointer = address_of(target)
        if pointer is not None:
            self._state.setdefault(pointer, weakref.ref(target))
        if self._format != (target.dtype, target.shape, target.device):
            self.on_conversion()

    def _announce(self, target: torch.Tensor) -> None:
        """State that nothing had written so far is about to change."""
        pointer = address_of(target)
        tensor = self._untouched.pop(pointer, None) if pointer is not None else None
        if tensor is not None:
            self.on_first_write(tensor)

    def _scan(self, entries: list[Entry]) -> None:
        for entry in entries[self._scanned :]:
            for tensor, _ in entry.versions:
                pointer = address_of(tensor)
                if id(tensor) not in self.made and pointer is not None and pointer not in self._state:
                    self._by_memory.setdefault(pointer, []).append(tensor)
        self._scanned = len(entries)


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins; ``None`` for tensors without plain memory of their own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _is_differentiated(tensor: torch.Tensor, entries: list[Entry]) -> bool:
    """True if `torch.autograd.grad` was asked for the gradient of a tensor."""
    asked = (entry.kwargs.get("inputs", entry.args[1:2]) for entry in entries if entry.name == AUTOGRAD_GRAD)
    return any(item is tensor for inputs in asked for item in iter_tensors(inputs))
