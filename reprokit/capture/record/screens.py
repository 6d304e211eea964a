"""Is this step bad? Cheap screens over a loss, gradients and parameters, confirmed element by element on a hit.

Every step: the loss where a backward call starts, one small gradient of an early layer (backward passes through
everything before it), and a clipped norm that the loop computed anyway. Flags on an accelerator are not waited for.

How a loop deals with a bad value itself: it tests for it, drops or corrects gradients, and skips the update.

All of it is read from noted entries; `hooks/suspects.py` decides from it whether a step failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry, gradients_read
from reprokit.capture.record.state import parameters_of
from reprokit.capture.record.structure import iter_tensors
from reprokit.locate.ways import NAN, local_part, ways_of
from reprokit.program.functions import GRAD_WRITES
from reprokit.program.ir import AUTOGRAD_GRAD

_HALVES = (torch.float16, torch.bfloat16)
_CANDIDATES = 8  # parameters with a gradient, from the model's beginning, among which the sentinel is chosen
_SMALL = 65_536  # elements that take a few microseconds to sum
_BATCH = 16  # flags on an accelerator that are sent to the host together


def is_bad(tensor: torch.Tensor) -> bool:
    """True if a tensor holds a NaN or an infinity."""
    if tensor.numel() == 1 and not tensor.is_complex() and tensor.layout is torch.strided:
        return not math.isfinite(tensor.item())
    return bool(ways_of(tensor))


def is_bad_start(entry: Entry, tensors: Iterable[torch.Tensor]) -> bool:
    """True if the tensor that a backward pass starts from is nan or inf.

    With gradients given it is not a loss: an infinity in it may be wanted, as in masks, and only a NaN tells.
    """
    if entry.gives_gradients:
        return any(NAN in ways_of(tensor) for tensor in tensors)
    return any(is_bad(tensor) for tensor in tensors)


def bad_tensor(tensors: Iterable[torch.Tensor]) -> int | None:
    """The position of the first tensor that holds a NaN or an infinity, or ``None``.

    One fused norm over all of them screens; a finite tensor whose norm overflows is a false hit and is cleared.
    """
    candidates = [local_part(tensor) for tensor in tensors]
    if not candidates or _is_finite_together(candidates):
        return None
    return next((number for number, tensor in enumerate(candidates) if ways_of(tensor)), None)


def unscaled_start(entries: list[Entry], start: torch.Tensor) -> torch.Tensor:
    """The tensor to check: what the grad scaler was given, if ``start`` is its product."""
    for entry in reversed(entries):
        if entry.kind is kinds.SCALE and any(tensor is start for tensor in iter_tensors(entry.output)):
            olds, news = iter_tensors(entry.args[1]), iter_tensors(entry.output)
            return next(old for old, new in zip(olds, news, strict=True) if new is start)
    return start


def is_handed_to_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """True if a grad scaler leaves the look at the gradients to the optimizer's fused kernel."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None


class Sentinel:
    """Looks at one small gradient of an early layer of an optimizer; nearly every bad backward pass reaches it.

    ``is_last``: of the last layer instead, which a backward pass reaches first.
    """

    def __init__(self, *, is_last: bool = False) -> None:
        self._is_last = is_last
        self._chosen: dict[int, torch.Tensor] = {}

    def gradient(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The gradient to look at, ``None`` when there is no dense one."""
        chosen = self._chosen.get(id(optimizer))
        gradient = chosen.grad if chosen is not None else None
        if gradient is None:
            chosen = self._choose(optimizer)
            if chosen is None:
                return None
            self._chosen[id(optimizer)] = chosen
            gradient = chosen.grad
        return local_part(gradient) if gradient is not None and type(gradient) is not torch.Tensor else gradient

    def forget(self) -> None:
        """Let go of the parameters."""
        self._chosen.clear()

    def _choose(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        parameters = list(parameters_of(optimizer))[:: -1 if self._is_last else 1]
        with_grad = (p for p in parameters if p.grad is not None and p.grad.layout is torch.strided)
        early = [parameter for parameter, _ in zip(with_grad, range(_CANDIDATES), strict=False)]
        small = (parameter for parameter in early if parameter.numel() <= _SMALL)
        return next(small, min(early, key=torch.Tensor.numel, default=None))


class LaterFlags:
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
        self._waiting += [tensor.detach() for tensor in tensors]
        if len(self._waiting) >= _BATCH:
            for device in {tensor.device for tensor in self._waiting if tensor.is_cuda}:
                self._send([tensor for tensor in self._waiting if tensor.device == device])
            self._waiting = [tensor for tensor in self._waiting if not tensor.is_cuda]
            self._num_own = min(self._num_own, len(self._waiting))

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Check the tensors of a device there, and read the result when it has arrived."""
        with torch.cuda.device(tensors[0].device):
            flag = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(flag, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent.append((host, event))

    def poll(self) -> bool:
        """True if a flag that has arrived by itself is bad."""
        while self._sent and self._sent[0][1].query():  # type: ignore[no-untyped-call]
            if not self._sent.pop(0)[0].item():
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
        return any(not host.item() for host, _ in self._sent) or any(map(is_bad, earlier))

    def read(self) -> bool:
        """True if anything was bad; waits for the device."""
        waiting, sent = self._waiting, self._sent
        self.forget()
        for _, event in sent:
            event.synchronize()
        return any(not host.item() for host, _ in sent) or any(is_bad(tensor) for tensor in waiting)


def _is_finite_together(tensors: list[torch.Tensor]) -> bool:
    """True if one norm over all tensors is finite; ``False`` also when torch cannot compute it (mixed kinds)."""
    dtype = torch.float32 if tensors[0].dtype in _HALVES else None
    has_grad = torch.is_grad_enabled()
    try:  # an exception that arrives inside `torch.no_grad` itself would leave gradients off
        torch_private.set_grad_enabled(False)
        norms = torch._foreach_norm(tensors, 2, dtype=dtype)
        return math.isfinite(torch.stack(list(norms)).sum().item())
    except (RuntimeError, NotImplementedError):
        return False
    finally:
        torch_private.set_grad_enabled(has_grad)


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
