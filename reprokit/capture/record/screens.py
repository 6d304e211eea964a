"""Is this step bad? Cheap screens over a loss, gradients and parameters, confirmed element by element on a hit.

Every step: the loss where a backward call starts, one small gradient of an early layer (backward passes through
everything before it), and a clipped norm that the loop computed anyway. Flags on an accelerator are not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.state import parameters_of
from reprokit.capture.record.structure import iter_tensors
from reprokit.locate.ways import NAN, local_part, ways_of

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
