"""The last updates of parameters that are spread over processes, to find the one that made a parameter nan or inf.

To play a forward pass of the past would need all processes. An update needs none: each rank copies its own shards and
the optimizer's state for them from time to time, and keeps the averaged gradients of every update since, which it only
refers to. Optimizers treat elements one by one, so an update of the shards is a call with plain tensors.
"""

from __future__ import annotations

import collections
import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import CannotGoBack, Copies, num_bytes, options_of, set_options
from reprokit.capture.record.structure import iter_tensors, map_tensors
from reprokit.capture.rewind.checkpoint import DEFAULT_STATE_BYTES, DEFAULT_STEP_BYTES, SHARE
from reprokit.capture.rewind.replayer import step_without_hooks
from reprokit.locate.ways import local_part
from reprokit.program.memory import same_bits


@dataclass
class Update:
    """One update: its step, the optimizer's options, the gradients, and the version counters of those there are.

    ``writes`` are calls of the loop that wrote into parameters since the update before. ``entry`` is the loop's call of
    the optimizer, once it is over, without the optimizer.
    """

    step: int
    options: list[dict[str, Any]]
    gradients: list[torch.Tensor | None]
    versions: list[int]
    writes: list[Entry] = field(default_factory=list)
    entry: Entry | None = None

    @property
    def is_whole(self) -> bool:
        """True if nobody wrote the gradients since."""
        return _versions_of(self.gradients) == self.versions


@dataclass
class _Past:
    """The updates of one optimizer since its shards and their state were copied; none if memory was short since.

    ``ruined`` are the shards after the last of them, if some were bad when the next copy was due: nothing is kept from
    then on.
    """

    reference: weakref.ref[torch.optim.Optimizer]
    shards: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    copied_at: float = 0.0
    cost: float = 0.0
    copies_gradients: bool = False
    num_bytes: int = 0  # of the gradients
    copies: Copies = field(default_factory=Copies)
    ruined: list[torch.Tensor] | None = None
    size: tuple[int, int] = (0, 0)  # of as many gradients in a step, in bytes

    def parameters(self) -> list[torch.Tensor]:
        optimizer = self.reference()
        if optimizer is None:
            return []
        return [p for group in optimizer.param_groups for p in group["params"]]  # a generator is entered for each one

    def size_of(self, gradients: Sequence[torch.Tensor]) -> int:
        """The memory of a step's gradients, in bytes; counted again when there are more or fewer of them."""
        if self.size[0] != len(gradients):
            self.size = len(gradients), num_bytes(gradients)
        return self.size[1]

    def drop_updates(self) -> None:
        self.updates.clear()
        self.num_bytes = 0


@dataclass(frozen=True)
class BadUpdate:
    """The first update after which a shard of this rank is nan or inf.

    ``write`` is the call of the loop that did it, if it was not the optimizer. ``shards`` and ``states`` are those
    before it. ``is_same``: playing all updates leads to the shards of now.
    """

    optimizer: torch.optim.Optimizer
    update: Update
    shards: list[torch.Tensor]
    states: list[dict[str, Any]]
    is_same: bool
    write: Entry | None = None


class Updates:
    """Keeps the last updates of the optimizers that the loop holds, all of them together in the memory of one copy and
    its steps, and at the cost of copies (see `checkpoint`)."""

    def __init__(self) -> None:
        self._pasts: dict[int, _Past] = {}

    def begin(self, optimizer: torch.optim.Optimizer, step: int, entries: Iterable[Entry] = ()) -> None:
        """An optimizer is about to write its shards; ``entries`` are the calls of the step so far."""
        past, now = self._past_of(optimizer), time.perf_counter()
        if past.ruined is not None:
            return
        is_due = (now - past.copied_at) * SHARE >= past.cost
        if past.updates and not past.updates[-1].is_whole:
            past.copies_gradients = is_due = True
            past.drop_updates()
        parameters = past.parameters()
        gradients = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in parameters]
        size = past.size_of([gradient for gradient in gradients if gradient is not None])
        if past.updates and (is_due or not self._has_room(size)):
            if bad_tensor(map(_local, parameters)) is not None:
                past.ruined = [_copied(parameter) for parameter in parameters]
                past.updates.append(Update(step, [], [], [], _writes_among(entries, parameters)))
                return
            past.drop_updates()
        writes = _writes_among(entries, parameters) if past.updates else []  # those before a copy are part of it
        if not past.updates and not (is_due and self._has_room(size) and self._copy(past, optimizer, now)):
            return
        if past.copies_gradients:
            gradients = [gradient.clone() if gradient is not None else None for gradient in gradients]
        past.updates.append(Update(step, options_of(optimizer), gradients, _versions_of(gradients), writes))
        past.num_bytes += size

    def end(self, optimizer: torch.optim.Optimizer, entry: Entry) -> None:
        """The update is over."""
        past = self._pasts.get(id(optimizer))
        if past is not None and past.updates:
            past.updates[-1].entry = replace(entry, target=None)

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._pasts.clear()

    def first_bad(self, step: int = 0, entries: Sequence[Entry] = ()) -> BadUpdate | None:
        """The first bad update of this rank's shards; ``None`` if there is none, its gradients were bad already, or it
        was not kept.

        ``entries`` are the calls of the ``step`` that is running.
        """
        found = [bad for past in self._pasts.values() if (bad := _first_bad(past, step, entries)) is not None]
        return min(found, key=lambda bad: bad.update.step, default=None)

    def _past_of(self, optimizer: torch.optim.Optimizer) -> _Past:
        key, pasts = id(optimizer), self._pasts
        if key not in pasts:
            pasts[key] = _Past(weakref.ref(optimizer, lambda _: pasts.pop(key, None)))
        return pasts[key]

    def _has_room(self, size: int) -> bool:
        """True if so many bytes of gradients can be kept beside those of all optimizers."""
        return size + sum([past.num_bytes for past in self._pasts.values()]) <= DEFAULT_STEP_BYTES

    def _copy(self, past: _Past, optimizer: torch.optim.Optimizer, now: float) -> bool:
        """Copy shards and state; ``False`` if they are too large beside the copies of other optimizers."""
        parameters = past.parameters()
        states = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
        tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        others = sum(other.copies.num_bytes for other in self._pasts.values() if other is not past)
        if others + num_bytes(map(_local, [*parameters, *tensors])) > DEFAULT_STATE_BYTES:
            past.copies = Copies()
            return False
        past.copies.take([*map(_local, parameters), *map(_local, tensors)])
        copied = past.copies.contents()
        past.shards = [copied[id(tensor)] for tensor in past.copies.tensors[: len(parameters)]]
        past.states = [{name: copied.get(id(_local(v)), v) for name, v in state.items()} for state in states]
        past.copied_at = time.perf_counter()
        past.cost = past.copied_at - now
        return True


def _versions_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # the very tensor, not a view of it
    return part


def _copied(value: Any) -> Any:
    return local_part(value.detach()).clone() if isinstance(value, torch.Tensor) else value


def _writes_among(entries: Iterable[Entry], parameters: Sequence[torch.Tensor]) -> list[Entry]:
    """The calls that wrote into parameters, or into what shares memory with them."""
    written = [entry for entry in entries if getattr(entry, "is_write", True) and entry.writes_state]
    places = set(map(_place, parameters)) if written else set()
    return [e for e in written if any(_place(tensor) in places for tensor in iter_tensors((e.args, e.kwargs)))]


def _place(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def write_to(entry: Entry, parameters: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> Entry:
    """A write into parameters as one into the ``plain`` tensors that stand for them; raises `CannotGoBack`."""
    places = dict(zip(map(_place, parameters), zip(parameters, plain, strict=True), strict=True))
    versions = {id(tensor): version for tensor, version in entry.versions}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        known = places.get(_place(tensor))
        if known is None and versions.get(id(tensor)) == tensor._version:
            return local_part(tensor)
        if known is None or _local(tensor).shape != known[1].shape:
            raise CannotGoBack("a write into a parameter cannot be made again")
        return known[1]

    args, kwargs = map_tensors(entry.args, stand_in), map_tensors(entry.kwargs, stand_in)
    made = Entry(kinds.FUNCTION, entry.target, args, kwargs, entry.mode, name=entry.name, writes_state=True)
    made.code, made.instruction = entry.code, entry.instruction
    return made


class _Search:
    """Plays the updates of one optimizer on plain shards until one is bad, and the rest of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], past: _Past) -> None:
        self.found: tuple[Update, Entry | None] | None = None
        self.is_bad_gradient = False
        self.before: tuple[list[torch.Tensor], list[dict[str, Any]]] = ([], [])
        self.plain = [torch.nn.Parameter(shard.clone()) for shard in past.shards]
        self._optimizer = optimizer
        self._parameters = parameters

    def play(self, update: Update) -> None:
        """The writes of the loop, then the call of the optimizer, if it was made."""
        for write in update.writes:
            self._remember()
            made = write_to(write, self._parameters, self.plain)
            with torch.no_grad():
                made.target(*made.args, **made.kwargs)
            self._look(update, write)
        if not update.gradients:
            return
        self._remember()
        give(self.plain, update)
        if self.found is None:
            self.is_bad_gradient |= bad_tensor(p.grad for p in self.plain if p.grad is not None) is not None
        set_options(self._optimizer, update.options)
        step_without_hooks(self._optimizer)
        self._look(update, None)

    def _look(self, update: Update, write: Entry | None) -> None:
        if self.found is None and bad_tensor(self.plain) is not None:
            self.found = update, write

    def _remember(self) -> None:
        """Copy the shards and their state, unless the bad update is known."""
        if self.found is None:
            states = [dict(self._optimizer.state[parameter]) for parameter in self.plain]
            copies = [{name: _copied(value) for name, value in state.items()} for state in states]
            self.before = [p.detach().clone() for p in self.plain], copies


def _first_bad(past: _Past, step: int, entries: Sequence[Entry]) -> BadUpdate | None:
    optimizer, parameters = past.reference(), past.parameters()
    live = past.ruined or [_local(parameter) for parameter in parameters]
    if (
        optimizer is None
        or not past.updates
        or bad_tensor(live) is None
        or bad_tensor(past.shards) is not None
        or not all(update.is_whole for update in past.updates)
    ):
        return None
    search = _Search(optimizer, parameters, past)
    copies = [{name: _copied(value) for name, value in state.items()} for state in past.states]
    updates = list(past.updates)
    if past.ruined is None:
        updates.append(Update(step, [], [], [], _writes_among(entries, parameters)))
    with on_plain(optimizer, search.plain, copies), contextlib.suppress(CannotGoBack):
        for update in updates:
            search.play(update)
    if search.found is None or search.is_bad_gradient:
        return None
    update, write = search.found
    return BadUpdate(optimizer, update, *search.before, all(map(same_bits, live, search.plain)), write)


def give(parameters: Sequence[torch.Tensor], update: Update) -> None:
    """Give plain parameters the gradients of an update."""
    with torch._C.DisableTorchFunction():  # a program has the gradients as inputs
        for parameter, given in zip(parameters, update.gradients, strict=True):
            parameter.grad = given.clone() if given is not None else None


@contextlib.contextmanager
def on_plain(
    optimizer: torch.optim.Optimizer, plain: Sequence[torch.Tensor], states: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """An optimizer with plain parameters and states in the place of its own."""
    groups = [group["params"] for group in optimizer.param_groups]
    state, options = optimizer.state, options_of(optimizer)
    rest = iter(plain)
    optimizer.state = collections.defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            group["params"] = [next(rest) for _ in group["params"]]
        optimizer.state.update((parameter, dict(kept)) for parameter, kept in zip(plain, states, strict=True) if kept)
        yield
    finally:
        optimizer.state = state
        set_options(optimizer, options)
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
