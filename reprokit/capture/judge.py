"""Is this step bad? Looked at where a backward pass starts, decided at the update.

Every step: the loss where a backward call starts, one small gradient of an early layer (backward passes through
everything before it), and a clipped norm that the loop computed anyway. When a copy is due: everything. Flags on an
accelerator are not waited for.

A backward call from a bad start is pending until an optimizer is about to use its gradients, which is a failure, or
until the loop has dropped them: then it has skipped its step. The same `Judge` decides live and while steps are played.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from reprokit import native
from reprokit.locate.ways import NAN, bad_tensor, is_bad, is_finite_sum, local_part, ways_of
from reprokit.program.dataflow import edge_of, is_accumulation, reachable
from reprokit.series.timeline import parameters_of

Outcome = Literal["failed", "skipped"]
_CANDIDATES = 8  # parameters with a gradient, from the model's beginning, among which the sentinel is chosen
_SMALL = 65_536  # elements that take a few microseconds to sum
_NOTHING_CHOSEN: Any = (lambda: None, lambda: None)
_BATCH = 16  # flags on an accelerator that are sent to the host together


def is_bad_start(starts: Iterable[torch.Tensor], *, gives_gradients: bool) -> bool:
    """True if what a backward pass starts from is nan or inf.

    With gradients given it is not a loss: an infinity in it may be wanted, as in masks, and only a NaN tells.
    """
    if gives_gradients:
        return any(NAN in ways_of(tensor) for tensor in starts)
    return any(map(is_bad, starts))


@dataclass(slots=True, eq=False)
class Pending:
    """A backward call from a bad start; ``note`` is that of its call on the tape, ``where`` its place in the code.

    ``is_asked``: it is `torch.autograd.grad`, which leaves no gradients. ``behind`` are the ids of the leaves that it
    reaches, ``cleared`` of those whose gradients the loop has dropped since. ``has_bad_gradients``: it has made some.
    """

    note: Any
    where: tuple[Any, int]
    is_asked: bool
    behind: set[int]
    step: int
    loss: Any
    micro_step: int
    has_bad_gradients: bool = False
    is_set: bool = False  # the loop has set gradients by hand since
    cleared: set[int] = field(default_factory=set)


class Judge:
    """Follows the backward calls of a step from a bad start. ``leaves`` are all that gradients may be left in.

    Where a bad start reaches some of the ``parameters`` of modules and optimizers, only these count: nobody updates an
    input that a gradient penalty differentiates by, and no loop clears its gradient.
    """

    def __init__(
        self, leaves: Callable[[], Sequence[torch.Tensor]], parameters: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self.pending: Pending | None = None
        self._leaves, self._parameters = leaves, parameters

    def behind(self, starts: Iterable[torch.Tensor]) -> set[int]:
        """The ids of the leaves that a backward pass reaches and that count."""
        edges = [edge_of(start) for start in starts]
        nodes = reachable(edge[0] for edge in edges if edge is not None)
        reached = {id(node.variable) for node in nodes if is_accumulation(node)}
        return reached.intersection(map(id, self._parameters())) or reached

    def begin(self, call: Pending, is_bad: bool, *, is_first: bool = False) -> Outcome | None:
        """A backward call is about to run; what has become of the pending one, which is not pending then any more.

        ``is_first``: no update was ever made, so that a loop that comes round from bad to bad never makes one.
        """
        pending = self.pending
        outcome: Outcome | None = None
        if pending is not None and self.is_dropped(pending):
            outcome = "skipped"
        elif pending is not None and pending.is_asked and not call.is_asked:
            self.pending = None  # the loss is what was computed of it
        elif pending is not None and pending.where == call.where:
            if pending.is_asked and not (is_bad or pending.is_set):
                outcome = "skipped"
            elif is_bad and is_first:
                outcome = "failed"
        if outcome == "skipped":
            self.pending = None
        if is_bad and self.pending is None:
            self.pending = call
        return outcome

    def end(self, note: Any, results: Iterable[torch.Tensor]) -> None:
        """A backward call is over; it may have returned gradients."""
        pending = self.pending
        if pending is not None and pending.note is note:
            found = results if pending.is_asked else (p.grad for p in self._leaves() if p.grad is not None)
            pending.has_bad_gradients = bad_tensor(found) is not None

    def clear(self, parameters: Iterable[torch.Tensor]) -> None:
        """The loop drops the gradients of these."""
        if self.pending is not None:
            self.pending.cleared.update(map(id, parameters))

    def correct(self) -> None:
        """The loop sets or writes a gradient by hand."""
        if self.pending is not None:
            self.pending.is_set = True
            if not self.pending.is_asked:
                self.pending.cleared |= self.pending.behind

    def is_dropped(self, pending: Pending) -> bool:
        """True if the loop has dropped all gradients of a backward call, and none that it knows is bad any more."""
        if pending.is_asked or not pending.cleared or not pending.behind <= pending.cleared:
            return False
        return not self.has_bad_gradient()

    def has_bad_gradient(self) -> bool:
        """True if any gradient is bad that counts."""
        counting, pending = self._parameters(), self.pending
        if pending is None or pending.behind.isdisjoint(map(id, counting)):
            counting = self._leaves()
        return bad_tensor(leaf.grad for leaf in counting if leaf.grad is not None) is not None

    def update(self, parameters: Sequence[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> Outcome | None:
        """Parameters are about to be updated, perhaps by hand from tensors that are ``given``."""
        pending = self.pending
        if pending is None:
            return None
        if self.is_dropped(pending):
            self.pending = None
            return "skipped"
        grads = (p.grad for p in parameters if p.grad is not None)
        if bad_tensor(grads) is not None or bad_tensor(t for t in given if native.is_floating_point(t)) is not None:
            return "failed"
        if pending.is_asked:
            return None
        if pending.has_bad_gradients:
            if self.has_bad_gradient():
                return None
            self.pending = None  # the loop has made good ones of them
            return "skipped"
        is_used = any(id(p) in pending.behind and id(p) not in pending.cleared for p in parameters)
        return "failed" if is_used else None

    def end_step(self) -> None:
        """The update was made; what `torch.autograd.grad` gave is used up."""
        if self.pending is not None and self.pending.is_asked:
            self.pending = None


class Sentinel:
    """Looks at one small gradient of an early layer of an optimizer; nearly every bad backward pass reaches it.

    ``is_last``: of the last layer instead, which a backward pass reaches first.
    """

    def __init__(self, *, is_last: bool = False) -> None:
        self._is_last = is_last
        # By the `id` of the optimizer, which is another one's once it is gone; weak, or each of the thousand models of
        # a test suite would leave a parameter with its gradient behind.
        self._chosen: dict[int, tuple[weakref.ref[torch.optim.Optimizer], weakref.ref[torch.Tensor]]] = {}

    def gradient(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The gradient to look at, ``None`` when there is no dense one."""
        owner, parameter = self._chosen.get(id(optimizer), _NOTHING_CHOSEN)
        chosen = parameter() if owner() is optimizer else None
        if chosen is None or chosen.grad is None:
            chosen = self._choose(optimizer)
            if chosen is None:
                return None
            self._chosen[id(optimizer)] = weakref.ref(optimizer), weakref.ref(chosen)
        gradient = chosen.grad
        return gradient if gradient is None or gradient.__class__ is torch.Tensor else local_part(gradient)

    def forget(self) -> None:
        """Let go of the parameters."""
        self._chosen.clear()

    def _choose(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        parameters = list(parameters_of(optimizer))[:: -1 if self._is_last else 1]
        with_grad = (p for p in parameters if p.grad is not None and p.grad.layout is torch.strided)
        early = [parameter for parameter, _ in zip(with_grad, range(_CANDIDATES), strict=False)]
        small = (parameter for parameter in early if native.numel(parameter) <= _SMALL)
        return next(small, min(early, key=native.numel, default=None))

    def is_suspicious(self, optimizer: torch.optim.Optimizer, clipped: torch.Tensor | None) -> bool | None:
        """True if that gradient, or the norm that the loop clipped by, is bad; ``None`` if a device would have to be
        waited for."""
        gradient = self.gradient(optimizer)
        if gradient is None or gradient.is_cuda:
            return None
        return not is_finite_sum(gradient) or (clipped is not None and not math.isfinite(native.item(clipped)))


class Flags:
    """Losses that are checked later, without making the host wait for an accelerator."""

    def __init__(self) -> None:
        self._waiting: list[torch.Tensor] = []
        self._step, self._num_own = -1, 0  # the step of the last tensors, and how many of those that wait are its own
        self._sent: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def add(self, tensors: Sequence[torch.Tensor], step: int) -> None:
        """Remember tensors of a step to check."""
        if step != self._step:
            self._step, self._num_own = step, 0
        self._num_own += len(tensors)
        self._waiting += [native.detach(tensor) for tensor in tensors]
        if len(self._waiting) >= _BATCH:
            for device in {tensor.device for tensor in self._waiting if tensor.is_cuda}:
                self._send([tensor for tensor in self._waiting if tensor.device == device])
            self._waiting = [tensor for tensor in self._waiting if not tensor.is_cuda]
            self._num_own = min(self._num_own, len(self._waiting))

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Check the tensors of a device there, and read the result when it has arrived."""
        with torch.cuda.device(tensors[0].device):
            flag = native.all(native.stack([native.all(native.isfinite(tensor)) for tensor in tensors]))
            host = native.empty((), dtype=torch.bool, pin_memory=True)
            native.copy_(host, flag, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent.append((host, event))

    def poll(self) -> bool:
        """True if a flag that has arrived by itself is bad."""
        while self._sent and self._sent[0][1].query():  # type: ignore[no-untyped-call]
            if not native.item(self._sent.pop(0)[0]):
                return True
        return False

    def forget(self) -> None:
        """Nothing waits any more."""
        self._waiting, self._sent, self._num_own = [], [], 0

    def is_bad_before(self, step: int) -> bool:
        """True if anything was bad that was added before this step; it goes on waiting. Waits for the device."""
        num_own = self._num_own if step == self._step else 0
        for _, event in self._sent:
            event.synchronize()
        earlier = self._waiting[: len(self._waiting) - num_own]
        return any(not native.item(host) for host, _ in self._sent) or any(map(is_bad, earlier))

    def read(self) -> bool:
        """True if anything was bad; waits for the device."""
        waiting, sent = self._waiting, self._sent
        self.forget()
        for _, event in sent:
            event.synchronize()
        return any(not native.item(host) for host, _ in sent) or any(is_bad(tensor) for tensor in waiting)
