"""The past of a training run: a copy of its state every so many steps, and what the loop did since the last one.

How often a copy is taken follows from what it costs: copying and checking together take a fixed small share of the
training time. Memory is bounded; when the steps since the last copy hold too much, the next copy comes early. Where
events are looked for, the copy before the last one is kept too, so that there are steps before any alarm.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import State, num_bytes, parameters_of, state_tensors
from reprokit.locate.ways import NAN, ways_of

DEFAULT_STATE_BYTES = 2 * 2**30
DEFAULT_STEP_BYTES = 256 * 2**20
MOST_STEPS = 1000
LEAST_STEPS = 32  # since a copy that is kept when the next one is taken: 20, and those that an alarm takes to come
_BEGINNING = 2  # steps: a graph that a step may not use again is used again in the next one
_FEW_STEPS = 8  # until the next copy, while nothing is known of what one costs
_STATISTICS = ("running_mean", "running_var")
_SHORT = 0.005  # seconds: in a step that short every microsecond counts
SHARE = 0.003  # of the training time, for copying and checking together
_FREE_SHARE = 0.1  # of a device's free memory, for the batches of the steps before the last copy


@dataclass(slots=True)
class Earlier:
    """The copy before the last one: the ``state``, the ``steps`` up to the last copy, and what had ``makers`` then."""

    state: State
    steps: list[PastStep]
    makers: list[PastStep]


class History:
    """Holds the last copy of the state and the steps since.

    ``every`` is the number of steps between copies, ``None`` to choose it by cost, 0 for no copies. ``is_complete``
    says whether the steps since the copy are all here, so that one can go back. ``makers`` are steps before the copy
    that made what is alive with its graph, for later steps to go on with. Modules and optimizers that the script has
    let go of are forgotten with the next copy.
    With ``keeps_earlier`` there are copies of two moments, at least `LEAST_STEPS` apart, if both fit into the limit.
    """

    def __init__(self, every: int | None = None, state_bytes: int = DEFAULT_STATE_BYTES) -> None:
        self.steps: list[PastStep] = []
        self.makers: list[PastStep] = []
        self.state = State()
        self.is_complete = False
        self.num_copies = 0
        self.keeps_earlier = False
        self.earlier: Earlier | None = None
        self._makers_then: list[PastStep] = []
        self._every = every
        self._limit = state_bytes
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._parts: set[int] | None = None
        self._parameters: list[torch.Tensor] | None = None
        self._held: list[object] = []
        self._trained: set[int] = set()  # ids of plain tensors in the copy that `torch.func` differentiates by
        self._ways_met: dict[int, frozenset[str]] = {}  # of buffers at first, if no copies are taken
        self._has_grown = False
        self._num_frozen = 0
        self._step_bytes = 0
        self._cost = 0.0
        self.is_short = False
        self._taken_at = time.perf_counter()

    # -- what belongs to the state -------------------------------------------------------------------------------

    def meet_module(self, module: torch.nn.Module) -> bool:
        """A root is about to run; whether it is a new one. A new one is added to the last copy as it is now."""
        known = self._modules.get(id(module))
        if (known is not None and known() is module) or is_unmade(module):
            return False
        self._modules[id(module)] = weakref.ref(module)
        self._parts = self._parameters = None
        self._hold(module)
        if self._every == 0:
            self._ways_met.update((id(buffer), ways_of(buffer)) for buffer in module.buffers())
        self._add([tensor for tensor in _tensors_of(module) if _is_changing(tensor)], ())
        for state in self._states:
            state.bind(module)
        return True

    def is_part(self, module: torch.nn.Module) -> bool:
        """True if a module is a root, or part of one since the last copy."""
        if self._parts is None:
            self._parts = {id(part) for root in self.modules for part in root.modules()}
        return id(module) in self._parts

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step; whether it is a new one."""
        known = self._optimizers.get(id(optimizer))
        if known is not None and known() is optimizer:
            return False
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._parameters = None
        self._hold(optimizer)
        self._add(list(state_tensors(optimizer)), (optimizer,))
        return True

    def _hold(self, owner: object) -> None:
        """Keep an owner of state alive until the next copy, so that the check at the end of a script still finds it."""
        self._held.append(owner)
        self._has_grown = self.num_copies > 0

    def add_written(self, tensor: torch.Tensor, is_trained: bool = False) -> None:
        """The loop writes into a part of the state for the first time, for example into a target network.

        One that ``is_trained`` is like a parameter, even if autograd does not follow it.
        """
        if is_trained:
            self._trained.add(id(tensor))
        self._add([tensor], ())

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad or id(tensor) in self._trained

    def _add(self, tensors: list[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        if self._every == 0:
            return
        if not self.num_copies:
            self.num_copies = 1
            self.is_complete = True
        if not self.is_complete:
            return
        if num_bytes(tensors) + self.state.copies.num_bytes > self._limit:
            self.give_up()
            return
        for state in self._states:
            state.add(tensors, optimizers)

    @property
    def _states(self) -> list[State]:
        return [self.state, *([self.earlier.state] if self.earlier is not None else [])]

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
        """Those of all roots and optimizers, each once; looked up again for a new one of these and after a copy."""
        if self._parameters is None:
            known: dict[int, torch.Tensor] = {id(p): p for module in self.modules for p in module.parameters()}
            known.update((id(p), p) for optimizer in self.optimizers for p in parameters_of(optimizer))
            self._parameters = list(known.values())
        return self._parameters

    @property
    def is_off(self) -> bool:
        """True if no copies are taken."""
        return self._every == 0

    @property
    def num_optimizers(self) -> int:
        """How many optimizers were met, alive or not."""
        return len(self._optimizers)

    def changing(self) -> list[torch.Tensor]:
        """The tensors that steps change, each once."""
        unique: dict[int, torch.Tensor] = {}
        for module in self.modules:
            unique.update({id(tensor): tensor for tensor in _tensors_of(module) if _is_changing(tensor)})
        for optimizer in self.optimizers:
            unique.update((id(tensor), tensor) for tensor in state_tensors(optimizer))
        for tensor in self.state.copies.tensors:
            if id(tensor) not in unique and (self._is_trained(tensor) or isinstance(tensor, torch.nn.Parameter)):
                unique[id(tensor)] = tensor  # written by the loop: frozen, or of no module and no optimizer
        return list(unique.values())

    def newly_bad(self) -> torch.Tensor | None:
        """A parameter that is bad now and was not in the last copy."""
        parameters: dict[int, torch.Tensor] = {
            id(p): p for module in self.modules for p in module.parameters() if p.requires_grad
        }
        parameters.update((id(p), p) for optimizer in self.optimizers for p in parameters_of(optimizer))
        parameters.update((id(t), t) for t in self.state.copies.tensors if self._is_trained(t))
        if bad_tensor(parameters.values()) is None:
            return None
        before = self.state.copies.contents()
        for tensor in parameters.values():
            ways = ways_of(tensor)
            if ways and (id(tensor) not in before or not ways <= ways_of(before[id(tensor)])):
                return tensor
        return None

    def has_worsened(self, tensor: torch.Tensor) -> bool:
        """True if a part of the state is bad in a way in which its copy is not."""
        before = self.state.copies.contents().get(id(tensor))
        return before is not None and not ways_of(tensor) <= ways_of(before)

    def newly_bad_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers and the frozen parameters that have gone bad since the last copy, with their names.

        Infinities are meant so, as in masks, but in the statistics of a normalisation; so are buffers that are new.
        """
        before = self.state.copies.contents()
        known = before.keys() | self._ways_met.keys()
        named = [
            (name, tensor)
            for module in self.modules
            for name, tensor in (*module.named_buffers(), *module.named_parameters())
            if id(tensor) in known and tensor.is_floating_point() and not tensor.requires_grad
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

    def untouched(self) -> Iterator[torch.Tensor]:
        """Frozen parameters: copied only once something writes them."""
        copied = set(map(id, self.state.copies.tensors))
        for module in self.modules:
            for tensor in _tensors_of(module):
                if not _is_changing(tensor) and id(tensor) not in copied:
                    yield tensor

    # -- steps ---------------------------------------------------------------------------------------------------

    def waiting(self) -> list[PastStep]:
        """The steps that still hold everything they made."""
        return self.steps[self._num_frozen :]

    def frozen(self, step: PastStep) -> None:
        """A step, the next of those waiting, holds only what came from outside now."""
        self._num_frozen += 1
        self._step_bytes += step.num_bytes

    @property
    def room(self) -> int:
        """Bytes that steps may still hold before the next copy comes early."""
        return max(self._most_bytes - self._step_bytes, 0)

    @property
    def _most_bytes(self) -> int:
        """Bytes that the steps since a copy may hold: with two copies, half of what the state leaves of its limit."""
        if not self.keeps_earlier:
            return DEFAULT_STEP_BYTES
        return max(DEFAULT_STEP_BYTES, self._limit // 2 - self.state.copies.num_bytes)

    def is_due(self, now: float) -> bool:
        """True if it is time to check everything and to take the next copy."""
        is_first = self.num_copies == 1 and self.is_complete and self._every != 0  # played from the start of training
        if is_first and len(self.steps) < _BEGINNING and self._step_bytes <= DEFAULT_STEP_BYTES:
            return False
        if self._has_grown or self.is_full or len(self.steps) >= MOST_STEPS:
            return True
        if self.keeps_earlier and self.is_complete and len(self.steps) < LEAST_STEPS:
            return False
        if self._every:
            return len(self.steps) >= self._every - 1 or not self.is_complete
        return (now - self._taken_at) * SHARE >= self._cost

    @property
    def is_full(self) -> bool:
        """True if the steps since the copy hold more than they may."""
        return self._step_bytes > self._most_bytes

    def wanted_steps(self, now: float, num_since: int) -> tuple[int, int]:
        """The steps until the next copy: as many as the cost of the last one asks for, ``num_since`` steps ago, and
        the most that memory allows."""
        if self._every:
            return self._every, self._every
        by_cost = math.ceil(self._cost / SHARE * num_since / max(now - self._taken_at, 1e-6)) or _FEW_STEPS
        by_memory = self._most_bytes * max(len(self.steps), 1) // max(self._step_bytes, 1)
        return min(by_cost, MOST_STEPS), min(by_memory, MOST_STEPS)

    @property
    def takes_copies(self) -> bool:
        """True if copies of the state are taken: they fit into the limit."""
        return self._every != 0 and num_bytes(self.changing()) <= self._limit

    def take(self, started: float, unfinished: Iterable[torch.optim.Optimizer] = (), *, may_keep: bool = False) -> None:
        """Copy the state of now and forget the steps; ``started`` is when the checks before it began.

        The optimizers that are ``unfinished`` have gradients of which they are still to make a step. With ``may_keep``
        the last copy and the steps since are put aside, where that is wanted.
        """
        if may_keep and self.keeps_earlier and self.is_complete and self._has_room_for_two():
            state = self.earlier.state if self.earlier is not None else State()
            self.earlier = Earlier(self.state, self.steps, self._makers_then)
            self.state = state
        else:
            self.earlier = None
        if self.steps and self.num_copies > 1:  # the first steps are longer than those that follow
            step_seconds = (started - self._taken_at) / (len(self.steps) + 1)
            is_on_gpu = any(tensor.is_cuda for tensor in self.state.copies.tensors)
            self.is_short = step_seconds < _SHORT and not is_on_gpu
        self.forget_steps()
        self._parts = self._parameters = None
        self._held, self._has_grown = [], False  # those that only the history holds are gone now
        self._held = [*self.modules, *self.optimizers]
        if self._every != 0:
            tensors = self.changing()
            if num_bytes(tensors) > self._limit:
                self.give_up()
            else:
                self.state.take(tensors, self.optimizers, self.modules)
                self.state.take_gradients(p for optimizer in unfinished for p in parameters_of(optimizer))
                self.is_complete = True
                self.num_copies += 1
        self._makers_then = list(self.makers)

    @property
    def num_kept(self) -> int:
        """The steps that can be played."""
        earlier = len(self.earlier.steps) if self.earlier is not None else 0
        return len(self.steps) + earlier if self.is_complete else 0

    def _has_room_for_two(self) -> bool:
        """True if two copies of the state fit into the limit, and the steps do not take much of a device's memory."""
        if 2 * self.state.copies.num_bytes > self._limit:
            return False
        device = next((tensor.device for tensor in self.state.copies.tensors if tensor.is_cuda), None)
        return device is None or self._step_bytes < _FREE_SHARE * torch.cuda.mem_get_info(device)[0]

    @contextmanager
    def with_earlier(self) -> Iterator[None]:
        """In this context the last copy is the one before it, if that was kept, and the steps are those since. In
        another one inside it nothing changes."""
        earlier, kept = self.earlier, (self.state, self.steps, self.makers)
        self.earlier = None
        if earlier is not None:
            self.state, self.makers = earlier.state, earlier.makers
            self.steps = [*earlier.steps, *self.steps]
        try:
            yield
        finally:
            self.state, self.steps, self.makers = kept
            self.earlier = earlier

    def rest(self, started: float) -> None:
        """All that belongs to a copy, begun at ``started``, is done: its time decides when the next one is due."""
        self._taken_at = time.perf_counter()
        self._cost = self._taken_at - started

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched."""
        self._taken_at += seconds

    def interrupt(self) -> None:
        """Something happened that is not in the steps: there is no going back behind this moment."""
        self.forget_steps()
        self.earlier = None
        self.is_complete = False

    def give_up(self) -> None:
        """Take no copies any more: they would not fit into the memory limit, or be of no use."""
        self._every = 0
        self.interrupt()
        self.state.clear()

    def forget(self) -> None:
        """The capture is over: let go of everything that belongs to the user."""
        self.steps, self.makers, self._held, self._makers_then = [], [], [], []
        self._modules.clear()
        self._optimizers.clear()
        self._trained.clear()
        self.give_up()

    def forget_steps(self) -> None:
        """Let go of the steps."""
        self.steps = []
        self._num_frozen = 0
        self._step_bytes = 0


def is_unmade(module: torch.nn.Module) -> bool:
    """True if parts of a module get their shapes from the first batch; such a one is met when it has them."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and not tensor.is_inference() and tensor.grad_fn is None:
            yield tensor


def _is_changing(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
