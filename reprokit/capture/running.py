"""The step that is running: what the loop has done since its parameters last changed.

Entries hold references, not copies. What nobody can use any more is let go of, and so are the oldest results that no
gradient flows through when the step holds too much: they are used by value then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reprokit.capture.entry import Entry, is_among, new_tensors
from reprokit.capture.state import num_bytes
from reprokit.capture.structure import is_leaf, iter_tensors
from reprokit.capture.sweep import still_useful
from reprokit.capture.written import WrittenMemory

if TYPE_CHECKING:
    from reprokit.capture.suspects import Suspect

BUDGET = 256 * 2**20  # bytes of loop-level results kept alive per step
_MODULE_LOAD = 16  # how much more than a function's a root module's results weigh
_SWEEP_AT = 32
_GIVEN_BYTES = 8  # for each element of a call's first tensor: 4 of its own, and as much again for a second one


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


class RunningStep:
    """``entries`` are what the loop did; ``memory`` knows what it made and wrote.

    ``raised`` is the last exception that came out of something the loop called, with its entry. ``is_hand_updated``
    says whether the loop has changed parameters itself. ``generators`` are the states of Python's and NumPy's
    generators for the module that is about to be called. ``suspect`` is a bad value that the loop may still deal with.
    ``on_lost(entries)`` is called with dropped entries.
    ``num_bytes`` is an estimate of what the entries keep alive.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.memory = WrittenMemory()
        self.raised: tuple[BaseException, Entry] | None = None
        self.is_hand_updated = False
        self.suspect: Suspect | None = None
        self.generators: dict[str, Any] | None = None
        self.on_lost: Callable[[list[Entry]], None] = lambda entries: None
        self._budget = BUDGET
        self.num_bytes = 0
        self._load = 0
        self._load_limit = _SWEEP_AT

    @property
    def current(self) -> list[Entry]:
        """The entries without those of steps that the loop has skipped."""
        return [entry for entry in self.entries if not entry.is_skipped]

    def restart(self) -> None:
        """Forget the step: parameters have just changed."""
        self.entries = []
        self.memory.restart()
        self.raised = None
        self.suspect = None
        self.is_hand_updated = False
        self._budget = BUDGET
        self.num_bytes = 0
        self._load = 0

    def add(self, entry: Entry) -> None:
        """Note a call with everything that it made."""
        self.entries.append(entry)
        self._load += 1
        if self._load > self._load_limit:
            self._sweep()
        made = self.memory.made
        for tensor in new_tensors(entry, made):
            made.add(id(tensor))
            self.num_bytes += tensor.numel() * tensor.element_size()
        if entry.versions:
            self.num_bytes += _GIVEN_BYTES * entry.versions[0][0].numel()
        if self.num_bytes > self._budget:
            self._make_room()

    def add_result(self, entry: Entry, result: torch.Tensor) -> None:
        """Note a call in the usual case, that it made one tensor of tensors."""
        self.entries.append(entry)
        self._load += 1
        if self._load > self._load_limit:
            self._sweep()
        made = self.memory.made
        if id(result) in made or not is_among(result, entry.versions):
            made.add(id(result))
            self.num_bytes += result.numel() * result.element_size() + _GIVEN_BYTES * entry.versions[0][0].numel()
            if self.num_bytes > self._budget:
                self._make_room()

    def begin_module(self, entry: Entry) -> None:
        """Note the call of a root module, which is about to run."""
        self.entries.append(entry)
        self._load += _MODULE_LOAD
        if self._load > self._load_limit:
            self._sweep()
        if entry.versions:
            self.num_bytes += _GIVEN_BYTES * entry.versions[0][0].numel()
            if self.num_bytes > self._budget:
                self._make_room()

    def finish_module(self, entry: Entry, output: Any) -> None:
        """A root module has returned.

        Of a structure its tensors are noted, because it may change later: a distribution computes attributes when they
        are first read, and a loop adds its own to a dict.
        """
        is_tensor = output is None or output.__class__ is torch.Tensor
        entry.output = output if is_tensor else list(iter_tensors(output))
        made = self.memory.made
        if output.__class__ is torch.Tensor and not is_among(output, entry.versions):
            made.add(id(output))
        else:
            made.update(map(id, new_tensors(entry, made)))

    def _make_room(self) -> None:
        """Let go of what nobody can use, then of the oldest calls that no gradient flows through: their results are
        used by value then. ``num_bytes`` is estimated call by call, and counted here."""
        self._sweep()
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
            self.memory.made.difference_update(map(id, iter_tensors(entry.output)))
            for tensor in _held(entry):
                users[id(tensor)] -= 1
                self.num_bytes -= 0 if users[id(tensor)] else sizes[id(tensor)]
        self.entries = kept
        self.on_lost(lost)
        while self.num_bytes > self._budget // 2:
            self._budget *= 2  # nothing more can go: gradients need all of it anyway

    def _sweep(self) -> None:
        """Let go of what nobody can use any more; the less that is, the longer until the next look."""
        before, self._load = self._load, 0
        useful = still_useful(self.entries)
        if len(useful) < len(self.entries):
            gone = {id(entry) for entry in self.entries} - {id(entry) for entry in useful}
            self.on_lost([entry for entry in self.entries if id(entry) in gone])
            self.entries = useful
            self.memory.keep_only(useful)
        self._load = sum(_MODULE_LOAD if entry.kind == "module" else 1 for entry in self.entries)
        self._load_limit = max(_SWEEP_AT, 2 * (self._load if 2 * self._load < before else before))


def _held(entry: Entry) -> list[torch.Tensor]:
    """The tensors that an entry keeps alive, without parameters."""
    tensors = (*(tensor for tensor, _ in entry.versions or ()), *iter_tensors(entry.output))
    return list({id(tensor): tensor for tensor in tensors if not is_leaf(tensor)}.values())


def _is_by_value(entry: Entry) -> bool:
    """True if what a call returned can be used by value: no gradient flows through it, and it has changed nothing."""
    if entry.kind not in ("function", "module", "transform") or entry.writes_state or entry.writes_view:
        return False
    outputs = list(iter_tensors(entry.output))
    return bool(outputs) and not any(tensor.requires_grad for tensor in outputs)
