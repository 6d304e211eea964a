"""Everything that training changes: parameters, buffers, optimizer state, generators; copied so that steps can be
played again from an earlier one.

How often a copy is taken follows from what it costs: copying and checking together take a fixed small share of the
training time. Memory is bounded. Restoring writes into the user's own tensors, without touching their version counters,
and gives back what they held. Where events are looked for, the copy before the last one is kept too.
"""

from __future__ import annotations

import contextlib
import math
import operator
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from reprokit import members, native, torch_private
from reprokit.capture.attributes import Containers, attributes_kept, is_of_torch, tensors_held
from reprokit.capture.structure import ATOMS, iter_tensors
from reprokit.capture.tape import address_of, version_of
from reprokit.locate.ways import NAN, bad_tensor, ways_of
from reprokit.native import clock
from reprokit.program.dataflow import node_of
from reprokit.series.timeline import parameters_of
from reprokit.snapshot.rng import generators_restored
from reprokit.torch_private import shard_of, shards_of

DEFAULT_STATE_BYTES = 2 * 2**30
MOST_STEPS = 1000
LEAST_STEPS = 32  # since a copy that is kept when the next one is taken: 20, and those that an alarm takes to come
_BEGINNING = 2  # steps: a graph that a step may not use again is used again in the next one
_YOUNG = 10  # steps of a new model that can be played from its start: what diverges from there shows in the first few
_FEW_STEPS = 8  # until the next copy, while nothing is known of what one costs
_STATISTICS = ("running_mean", "running_var")
_SHORT = 0.005  # seconds: in a step that short every microsecond counts
SHARE = 0.003  # of the training time, for copying and checking together
_FREE_SHARE = 0.1  # of a device's free memory, for a copy, and for the batches of the steps before the last one


class CannotGoBack(Exception):
    """Tensors are no longer what they were when they were copied."""


class Contents:
    """Tensors and what they held at one moment. Invariant: ``tensors`` and ``contents`` are parallel."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self.contents = [_copy(tensor) for tensor in self.tensors]

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Remember what ``tensors`` hold, in the memory of the last copy where it is of the same tensors."""
        if len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors)):
            for number, (content, tensor) in enumerate(zip(self.contents, self.tensors, strict=True)):
                if content.shape == shard_of(tensor).shape and content.dtype == tensor.dtype:
                    native.copy_(content, native.detach(shard_of(tensor)))
                else:
                    self.contents[number] = _copy(tensor)
        else:
            self.tensors, self.contents = tensors, [_copy(tensor) for tensor in tensors]

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember more tensors."""
        known = set(map(id, self.tensors))
        for tensor in tensors:
            if id(tensor) not in known:
                known.add(id(tensor))
                self.tensors.append(tensor)
                self.contents.append(_copy(tensor))

    def check(self) -> None:
        """Raises `CannotGoBack` if a tensor has another shape or dtype by now."""
        for tensor, content in zip(self.tensors, self.contents, strict=True):
            if shard_of(tensor).shape != content.shape or tensor.dtype != content.dtype:
                raise CannotGoBack("the model was changed since the last copy of its state")

    def write(self) -> None:
        """Write the contents into the tensors; needs no memory."""
        with native.no_grad():
            for tensor, content in zip(self.tensors, self.contents, strict=True):
                native.copy_(shard_of(tensor).data, content)

    @property
    def num_bytes(self) -> int:
        """The memory that the contents take."""
        return num_bytes(self.contents)


class _Buffer:
    """The place of a buffer, the tensor there and what it held."""

    def __init__(self, space: dict[str, Any], name: str) -> None:
        self.space, self.name = space, name
        has_counter = "num_batches_tracked" in space and isinstance(space["num_batches_tracked"], torch.Tensor)
        self.witness = "num_batches_tracked" if has_counter else name
        self.take()

    def take(self) -> None:
        """Remember what is there now."""
        self.tensor, self.seen = self.space[self.name], self.space[self.witness]
        self.version, self.seen_version = version_of(self.tensor), version_of(self.seen)
        self.content = _copy(self.tensor)


class Buffers:
    """The buffers of modules as the running step began with them, for a replay from the state of now.

    Batch normalisation writes its running statistics without telling their version counters; the counter of the batches
    it has seen tells for them. A forward may put another tensor in the place of a buffer.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], _Buffer] = {}
        self.are_replaced = False  # a forward has put another tensor in the place of a buffer

    def add_module(self, module: torch.nn.Module) -> None:
        """Remember the buffers of a module."""
        for part in members.modules(module):
            space: Any = members.buffer_table(part)
            for name, buffer in space.items():
                if buffer is not None and not native.is_inference(buffer) and (id(part), name) not in self.rows:
                    self.rows[id(part), name] = _Buffer(space, name)

    def refresh(self) -> None:
        """Remember the contents of now; buffers that nothing wrote are left alone."""
        for row in self.rows.values():
            buffer, seen = row.space[row.name], row.space[row.witness]
            if buffer is None or native.is_inference(buffer):
                continue
            is_same = buffer is row.tensor and torch_private.version(buffer) == row.version
            if not is_same or seen is not row.seen or torch_private.version(seen) != row.seen_version:
                self.are_replaced = self.are_replaced or buffer is not row.tensor
                row.take()

    def at(self, address: int | None) -> torch.Tensor | None:
        """The buffer of now with this memory."""
        tensors = (row.space[row.name] for row in self.rows.values())
        return next((tensor for tensor in tensors if tensor is not None and address_of(tensor) == address), None)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """In this context the buffers are what they were."""
        now = [(row, row.space[row.name]) for row in self.rows.values()]
        held = Contents(
            [*(row.tensor for row, _ in now), *(t for row, t in now if t is not None and t is not row.tensor)]
        )
        try:
            with native.no_grad():
                for row, _ in now:
                    if row.tensor.shape != row.content.shape:
                        raise CannotGoBack("a buffer has another shape by now")
                    row.space[row.name] = row.tensor
                    native.copy_(row.tensor.data, row.content)
            yield
        finally:
            held.write()
            for row, tensor in now:
                row.space[row.name] = tensor

    @property
    def ids(self) -> set[int]:
        return {id(row.tensor) for row in self.rows.values()}

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]


Structure = tuple[weakref.ref[torch.optim.Optimizer], Callable[[], None]]  # and what gives it its structure of then


def _noted(optimizer: torch.optim.Optimizer) -> Structure:
    """Its options, and the names of the state of each parameter; the attributes of one of the user's own."""
    options, attributes = options_of(optimizer), None if is_of_torch(optimizer) else Containers([optimizer])
    states = [(key, state, dict(state)) for key, state in optimizer.state.items() if isinstance(state, dict)]
    reference = weakref.ref(optimizer)  # a training that is over may let go of it

    def give_back() -> None:
        optimizer = reference()
        if optimizer is None:
            return
        if attributes is not None:
            attributes.give_back()
        set_options(optimizer, options)
        optimizer.state.clear()
        for key, state, content in states:
            state.clear()
            state.update(content)
            optimizer.state[key] = state

    return reference, give_back


def _parameters_of(part: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The module's own parameters; none of a scripted one, which makes them anew."""
    is_scripted = isinstance(part, torch.jit.ScriptModule)
    return {} if is_scripted else dict(members.named_parameters(part, recurse=False, remove_duplicate=False))


class _Bindings:
    """Which tensors the parameters and buffers of modules are; a forward may replace buffers. Modules may go."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._parts = [
            (weakref.ref(part), dict(members.buffer_table(part)), _parameters_of(part))
            for part in members.parts(modules)
        ]

    def now(self) -> _Bindings:
        """Which tensors they are by now."""
        return _Bindings(part for reference, *_ in self._parts if (part := reference()) is not None)

    def buffers(self) -> Iterator[torch.Tensor]:
        """The tensors that buffers are."""
        yield from (
            buffer
            for _, buffers, _ in self._parts
            for buffer in buffers.values()
            if buffer is not None and not native.is_inference(buffer)
        )

    def check(self) -> None:
        """Raises `CannotGoBack` if a parameter is another one by now."""
        for reference, _, parameters in self._parts:
            part = reference()
            now = _parameters_of(part) if part is not None else parameters
            if now.keys() != parameters.keys() or any(now[name] is not known for name, known in parameters.items()):
                raise CannotGoBack("a parameter was replaced since the last copy of the state")

    def give_back(self) -> None:
        """Go back to it."""
        for reference, buffers, _ in self._parts:
            part = reference()
            space = members.buffer_table(part) if part is not None else {}
            for name, buffer in buffers.items():  # those of a scripted module are no dict
                space[name] = buffer


class Copy:
    """Everything that steps change, at one moment: tensors' contents and optimizers' notes."""

    def __init__(self) -> None:
        self.contents = Contents()
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # that were still to be used
        self.with_gradient: list[torch.Tensor] = []  # all parameters that had one
        self.num_marks = 0  # the steps on the tape before it
        self._notes: list[Structure] = []
        self._bindings: list[_Bindings] = []

    def take(
        self,
        tensors: list[torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        modules: Iterable[torch.nn.Module],
    ) -> None:
        """Remember all of it, reusing memory."""
        self.contents.take(tensors)
        parameters = (t for t in tensors if t.requires_grad or isinstance(t, torch.nn.Parameter))  # also frozen by now
        # Torch warns of `.grad` elsewhere, as of the state that an optimizer has cloned of a parameter with its graph.
        holders = (t for t in parameters if t.is_leaf or t.retains_grad)
        self.with_gradient = [tensor for tensor in holders if tensor.grad is not None]
        self._notes = list(map(_noted, optimizers))
        self._bindings = [_Bindings(modules)]

    def add(self, tensors: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Remember more."""
        self.contents.add(tensors)
        self._notes += map(_noted, optimizers)

    def bind(self, module: torch.nn.Module) -> None:
        """Remember what the buffers of one more module are."""
        self._bindings.append(_Bindings([module]))

    @property
    def num_bytes(self) -> int:
        return self.contents.num_bytes + num_bytes([gradient for _, gradient in self.gradients])

    def put_back(self) -> Copy:
        """Go back to it; returns the state of before. Raises `CannotGoBack` with nothing changed."""
        self.contents.check()
        for binding in self._bindings:
            binding.check()
        current = Copy()
        current.contents = Contents(self.contents.tensors)
        current._notes = [_noted(optimizer) for reference, _ in self._notes if (optimizer := reference()) is not None]
        current._bindings = [binding.now() for binding in self._bindings]
        for binding in current._bindings:  # a call that is played may write into a buffer of now
            current.contents.add(binding.buffers())
        try:
            self.give_back()
        except BaseException:
            current.give_back()
            raise
        return current

    def give_back(self) -> None:
        """Go back to it, knowing that nothing has another shape by now."""
        self.contents.write()
        for _, give_back in self._notes:
            give_back()
        for binding in self._bindings:
            binding.give_back()


class World:
    """Knows the modules and optimizers of a training that are alive, the last copies of their state, and when the next
    one is due.

    ``every`` is the number of steps between copies, ``None`` to choose it by cost, 0 for no copies. ``is_complete``
    says whether the steps since the copy are all on the tape, so that one can go back. With ``keeps_earlier`` there are
    copies of two moments, at least `LEAST_STEPS` apart, if both fit into the limit; in the first `_YOUNG` steps of a
    model there are in any case, the first of them from before its first step. ``addresses`` is the memory of the
    state, ``untouched`` that of frozen parameters which nothing has written so far. ``is_short``: steps are so short
    that every microsecond counts.
    """

    def __init__(self, every: int | None = None, state_bytes: int = DEFAULT_STATE_BYTES) -> None:
        self.copies: list[Copy] = []
        self.buffers = Buffers()
        self.is_complete = self.is_short = False
        self.num_copies = self.num_optimizers = 0  # of optimizers all that were met, alive or not
        self.keeps_earlier = False
        self.addresses: dict[int, weakref.ref[torch.Tensor]] = {}
        self.untouched: dict[int, torch.Tensor] = {}
        self._every = every
        self._limit = state_bytes
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._parameters: list[torch.Tensor] | None = None
        self._held: dict[int, object] = {}
        self._trained: set[int] = set()  # ids of plain tensors that the loop trains
        self._ways_met: dict[int, frozenset[str]] = {}  # of buffers at first, if no copies are taken
        self._has_grown = False
        self._num_young = 0  # steps since the first copy that was taken after a model was new
        self._cost = 0.0
        self._taken_at = clock.perf_counter()

    def meet_module(self, module: torch.nn.Module) -> bool:
        """A root is about to run; whether it is a new one. A new one is added to the last copy as it is now."""
        known = self._modules.get(id(module))
        if known is not None and known() is module:
            self._held[id(module)] = module
            return False
        if is_unmade(module):
            return False
        self._modules[id(module)] = weakref.ref(module)
        self._parameters = None
        self._hold(module)
        if self._every == 0:
            self._ways_met.update((id(buffer), ways_of(buffer)) for buffer in members.buffers(module))
        self._add([t for t in _tensors_of(module) if t.requires_grad or not isinstance(t, torch.nn.Parameter)], ())
        for copy in self.copies:
            copy.bind(module)
        self.buffers.add_module(module)
        self.know_addresses()
        return True

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step; whether it is a new one."""
        known = self._optimizers.get(id(optimizer))
        if known is not None and known() is optimizer:
            self._held[id(optimizer)] = optimizer
            return False
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self.num_optimizers = len(self._optimizers)
        self._parameters = None
        self._hold(optimizer)
        self._add(list(state_tensors(optimizer)), (optimizer,))
        self.know_addresses()
        return True

    def _hold(self, owner: object) -> None:
        """Keep an owner of state that is used alive until the next copy, for the check at the end of a script."""
        self._held[id(owner)] = owner
        self._has_grown = self.num_copies > 0

    def _add(self, tensors: list[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        if self._every == 0:
            return
        if not self.num_copies:
            self.num_copies, self.copies, self.is_complete = 1, [Copy()], True
        if not self.is_complete:
            return
        if num_bytes(tensors) + self.copies[-1].num_bytes > self._limit:
            self.give_up()
            return
        for copy in self.copies:
            copy.add(tensors, optimizers)

    def know_addresses(self) -> None:
        """Find out which memory is that of the state; frozen parameters are copied only once something writes them."""
        copied = set(map(id, self.copies[-1].contents.tensors)) if self.copies else set()
        given = [t for module in self.modules for t in _tensors_of(module) if isinstance(t, torch.nn.Parameter)]
        frozen = [t for t in given if not (t.requires_grad or id(t) in copied)]
        self.untouched = {p: tensor for tensor in frozen if (p := address_of(tensor)) is not None}
        state = [*self.untouched.values(), *self.changing()]
        self.addresses = {p: weakref.ref(tensor) for tensor in state if (p := address_of(tensor)) is not None}

    def owner_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The part of the state whose memory a tensor shares."""
        address = address_of(tensor)
        reference = self.addresses.get(address or 0)
        owner = reference() if reference is not None else None
        return owner if owner is not None or not self.buffers.are_replaced else self.buffers.at(address)

    def before_write(self, target: torch.Tensor) -> None:
        """State is about to be written; a frozen parameter that nothing had written so far is copied now."""
        tensor = self.untouched.pop(address_of(target) or 0, None)
        if tensor is not None:
            self._add([tensor], ())

    def train(self, tensor: torch.Tensor) -> None:
        """The loop trains a tensor that no module and no optimizer has: it is about to be written."""
        self._trained.add(id(tensor))
        self._add([tensor], ())
        self.moved(tensor)

    def moved(self, tensor: torch.Tensor) -> None:
        """State may have got other memory."""
        address = address_of(tensor)
        if address is not None:
            self.addresses[address] = weakref.ref(tensor)

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """True for a parameter, or a plain tensor that the loop trains."""
        return tensor.requires_grad or id(tensor) in self._trained

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The roots that are alive."""
        return [module for reference in self._modules.values() if (module := reference()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are alive."""
        return [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of all roots and optimizers, each once; looked up again for a new one of these and after a copy.

        Between forward and backward pass modules of `fully_shard` have the whole ones in the place of the spread ones.
        """
        if self._parameters is None:
            spread = {id(whole): p for unit in units_of(self.modules) for p, whole in torch_private.gathered(unit)}
            found = [spread.get(id(p), p) for module in self.modules for p in members.parameters(module)]
            known: dict[int, torch.Tensor] = {id(p): p for p in found}
            known.update((id(p), p) for optimizer in self.optimizers for p in parameters_of(optimizer))
            self._parameters = list(known.values())
        return self._parameters

    def changing(self) -> list[torch.Tensor]:
        """The tensors that steps change, each once."""
        unique: dict[int, torch.Tensor] = {}
        for module in self.modules:
            for tensor in _tensors_of(module):
                if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                    unique[id(tensor)] = tensor
        for optimizer in self.optimizers:
            for tensor in state_tensors(optimizer):
                unique[id(tensor)] = tensor
        for tensor in self.copies[-1].contents.tensors if self.copies else ():
            is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
            if id(tensor) not in unique and (id(tensor) in self._trained or is_frozen):
                unique[id(tensor)] = tensor  # written by the loop: frozen, or of no module and no optimizer
        return list(unique.values())

    def state_ids(self) -> set[int]:
        """The ids of what a copy puts back."""
        return {id(tensor) for tensor in self.changing()}

    def newly_bad(self) -> torch.Tensor | None:
        """A parameter that is bad now and was not in the last copy."""
        trained = [tensor for tensor in self.changing() if self.is_trained(tensor)]
        if bad_tensor(trained) is None:
            return None
        before = self._before()
        for tensor in trained:
            ways = ways_of(tensor)
            if ways and (id(tensor) not in before or not ways <= ways_of(before[id(tensor)])):
                return tensor
        return None

    def _before(self) -> dict[int, torch.Tensor]:
        contents = self.copies[-1].contents if self.copies else Contents()
        return dict(zip(map(id, contents.tensors), contents.contents, strict=True))

    def has_worsened(self, tensor: torch.Tensor) -> bool:
        """True if a part of the state is bad in a way in which its copy is not."""
        before = self._before().get(id(tensor))
        return before is not None and not ways_of(tensor) <= ways_of(before)

    def newly_bad_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers and the frozen parameters that have gone bad since the last copy, with their names.

        Infinities are meant so, as in masks, but in the statistics of a normalisation; so are buffers that are new.
        """
        before = self._before()
        known = before.keys() | self._ways_met.keys()
        named = [
            (name, tensor)
            for module in self.modules
            for name, tensor in (*members.named_buffers(module), *members.named_parameters(module))
            if id(tensor) in known and native.is_floating_point(tensor) and not tensor.requires_grad
        ]
        if bad_tensor(tensor for _, tensor in named) is None:
            return []
        found = []
        for name, tensor in named:
            content = before.get(id(tensor))
            new_ways = ways_of(tensor) - (self._ways_met[id(tensor)] if content is None else ways_of(content))
            counts = name.endswith(_STATISTICS) or isinstance(tensor, torch.nn.Parameter)
            if new_ways if counts else NAN in new_ways:
                found.append((name, tensor))
        return found

    @property
    def is_off(self) -> bool:
        """True if no copies are taken."""
        return self._every == 0

    @property
    def takes_copies(self) -> bool:
        """True if copies of the state are taken: they fit into the limit."""
        return self._every != 0 and num_bytes(self.changing()) <= self._limit

    def is_due(self, now: float, num_steps: int, held_bytes: int, default_bytes: int) -> bool:
        """True if it is time to check everything and to take the next copy, so many steps after the last one, which
        hold so many bytes."""
        is_first = self.num_copies == 1 and self.is_complete and self._every != 0  # played from the start of training
        is_full = held_bytes > default_bytes and held_bytes > self.most_bytes(default_bytes)
        if is_first and num_steps < _BEGINNING and not is_full:
            return False
        if self._has_grown or is_full or num_steps >= MOST_STEPS:
            return True
        if self.keeps_earlier and self.is_complete and num_steps < LEAST_STEPS:
            return False
        if self._every:
            return num_steps >= self._every - 1 or not self.is_complete
        return (now - self._taken_at) * SHARE >= self._cost

    def wanted_steps(self, now: float, num_since: int, num_steps: int, held_bytes: int, most: int) -> tuple[int, int]:
        """The steps until the next copy: as many as the cost of the last one asks for, ``num_since`` steps ago, and
        the most that memory allows."""
        if self._every:
            return self._every, self._every
        by_cost = math.ceil(self._cost / SHARE * num_since / max(now - self._taken_at, 1e-6)) or _FEW_STEPS
        by_memory = most * max(num_steps, 1) // max(held_bytes, 1)
        return min(by_cost, MOST_STEPS), min(by_memory, MOST_STEPS)

    def most_bytes(self, default: int) -> int:
        """Bytes that the steps since a copy may hold: with two copies, half of what the state leaves of its limit."""
        if not self.keeps_earlier or not self.copies:
            return default
        return max(default, self._limit // 2 - self.copies[-1].num_bytes)

    def take(
        self, started: float, num_steps: int, unfinished: Iterable[torch.optim.Optimizer] = (), *, may_keep: bool
    ) -> bool:
        """Copy the state of now, so many steps after the last copy; ``started`` is when the checks before it began.

        The optimizers that are ``unfinished`` have gradients of which they are still to make a step. True if an earlier
        copy is kept as well, which it is if it ``may_keep`` and that is wanted; then ``num_marks`` are to be set.
        """
        if num_steps and self.num_copies > 1:  # the first steps are longer than those that follow
            step_seconds = (started - self._taken_at) / (num_steps + 1)
            is_on_gpu = bool(self.copies) and "cuda" in {t.device.type for t in self.copies[-1].contents.tensors}
            self.is_short = step_seconds < _SHORT and not is_on_gpu
        self._parameters = None
        kept = self._kept(num_steps) if may_keep and self.is_complete and self._has_room_for_two() else []
        new = next((copy for copy in self.copies if copy not in kept), Copy())
        self._held, self._has_grown = {}, False  # those that only this holds are gone now
        if self._every == 0:
            return False
        tensors = self.changing()
        if num_bytes(tensors) > self._limit:
            self.give_up()
            return False
        new.take(tensors, self.optimizers, self.modules)
        unused = [p for optimizer in unfinished for p in parameters_of(optimizer)]
        new.gradients = [(p, native.clone(native.detach(p.grad))) for p in unused if p.grad is not None]
        self.copies = [*kept, new]
        self.is_complete = True
        self.num_copies += 1
        return bool(kept)

    def _kept(self, num_steps: int) -> list[Copy]:
        """The copy to keep beside the next one, so many steps after the last one."""
        if self._has_grown:
            self._num_young = 0
            return self.copies[-1:]
        self._num_young += num_steps
        if self._num_young < _YOUNG:
            return self.copies[:1]
        return self.copies[-1:] if self.keeps_earlier else []

    def _has_room_for_two(self) -> bool:
        """True if two copies of the state fit into the limit, and beside what a device has free."""
        if 2 * self.copies[-1].num_bytes > self._limit:
            return False
        device = next((tensor.device for tensor in self.copies[-1].contents.tensors if tensor.is_cuda), None)
        return device is None or self.copies[-1].num_bytes < _FREE_SHARE * native.cuda_mem_get_info(device)[0]

    def rest(self, started: float) -> None:
        """All that belongs to a copy, begun at ``started``, is done: its time decides when the next one is due."""
        self._taken_at = clock.perf_counter()
        self._cost = self._taken_at - started

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._taken_at += seconds

    def interrupt(self) -> None:
        """Something happened that is not on the tape: there is no going back behind this moment."""
        del self.copies[:-1]
        for copy in self.copies:
            copy.num_marks = 0  # the tape forgets the steps before it
        self.is_complete = False

    def give_up(self) -> None:
        """Take no copies any more: they would not fit into the memory limit, or be of no use."""
        self._every = 0
        self.interrupt()
        self.copies.clear()

    def forget(self) -> None:
        """The capture is over: let go of everything that belongs to the user."""
        self._held, self.untouched, self.addresses = {}, {}, {}
        self._modules.clear()
        self._optimizers.clear()
        self._trained.clear()
        self._parameters = None
        self.buffers.clear()
        self.give_up()

    @contextlib.contextmanager
    def at(self, copy: Copy, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """In this context the state is that of a copy, and ``leaves`` have the gradients of then; afterwards
        everything is as it was, version counters included. Raises `CannotGoBack` with nothing changed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(generators_restored())
            stack.enter_context(attributes_kept(self.modules, self.optimizers))
            changing = self.changing()
            stack.enter_context(torch_private.preserve_versions([*changing, *map(shard_of, changing)]))
            stack.callback(copy.put_back().give_back)
            gradients = [(leaf, leaf.grad) for leaf in leaves]
            stack.callback(give_gradients, gradients)
            give_gradients([(leaf, None) for leaf in leaves])
            give_gradients([(leaf, native.zeros_like(leaf)) for leaf in copy.with_gradient])
            give_gradients([(leaf, native.clone(grad)) for leaf, grad in copy.gradients])
            yield


def units_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The parts of modules that were given to `fully_shard`."""
    return [part for part in members.parts(modules) if torch_private.is_sharded(type(part))]


def gathered(modules: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The whole parameters that units of `fully_shard` have, by the ``id`` of the spread ones."""
    return {id(spread): whole for unit in units_of(modules) for spread, whole in torch_private.gathered(unit)}


def is_unmade(module: torch.nn.Module) -> bool:
    """True if parts of a module get their shapes from the first batch; such a one is met when it has them."""
    return any(is_lazy(tensor) for tensor in members.tensors(module))


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    given = members.tensors(module)
    return [t for t in given if not is_lazy(t) and not native.is_inference(t) and node_of(t) is None]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of every parameter group, such as the learning rate of now."""
    found = []
    for group in optimizer.param_groups:
        options = {**group}
        del options["params"]
        found.append(options)
    return found


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """The inverse of `options_of`."""
    for group, values in zip(optimizer.param_groups, options, strict=False):
        group.update(values)


def owned_by(owner: torch.nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of a module or an optimizer."""
    return list(parameters_of(owner) if isinstance(owner, torch.optim.Optimizer) else members.parameters(owner))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and every tensor of the optimizer's state; those in attributes of one of the user's own."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not is_of_torch(optimizer):
        found += tensors_held(optimizer)
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif value.__class__ not in ATOMS:
                found += iter_tensors(value)
    return found


def give_gradients(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Set the gradients of leaves."""
    for leaf, grad in grads:
        leaf.grad = grad


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The memory that tensors take, in bytes."""
    return sum([native.numel(tensor) * native.element_size(tensor) for tensor in shards_of(tensors)])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = native.detach(shard_of(tensor))
    if plain.is_cuda and num_bytes([plain]) > _FREE_SHARE * native.cuda_mem_get_info(plain.device)[0]:
        return native.cpu(plain)
    return (
        native.clone(plain)
        if plain.layout is not torch.strided
        else native.clone(plain, memory_format=torch.preserve_format)
    )


class GeneratorWatch:
    """Notes the states of Python's and NumPy's generators before forwards, while there is reason to.

    Reading them takes longer than all else in a short step, so they are read in the first steps and once after every
    copy of the state; if a forward changes them then, they are read always. ``states`` are those before the first
    forward of the step, ``looks_left`` is the number of steps that are still looked at.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] | None = None
        self.looks_left: float = 3
        self._before: dict[str, Any] | None = None

    def before_module(self) -> dict[str, Any] | None:
        """A root module is about to run: the states of now if it is not the first one of its step."""
        self._before = states = python_generators()
        if self.states is None:
            self.states = states
            return None
        return states

    def after_module(self) -> None:
        """It has run."""
        before, self._before = self._before, None
        if (
            before is not None
            and self.looks_left < math.inf
            and pickle.dumps(before) != pickle.dumps(python_generators())
        ):
            self.looks_left = math.inf

    def restart(self) -> None:
        """The step is over."""
        self.looks_left -= 1  # infinity stays
        self.states = None


def python_generators() -> dict[str, Any]:
    """The states of Python's and, where the program uses it, NumPy's generator."""
    states: dict[str, Any] = {"python": native.get_python_state()}
    if native.get_numpy_state is not None:
        states["numpy"] = native.get_numpy_state()
    return states


def set_python_generators(states: dict[str, Any]) -> None:
    """Put Python's and NumPy's generators into ``states``."""
    native.set_python_state(states["python"])
    if "numpy" in states and native.set_numpy_state is not None:
        native.set_numpy_state(states["numpy"])
