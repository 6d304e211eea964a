"""Copies of what a step changes, so that it can be run again from where it began.

Buffers that a forward mutates are copied when a step starts; parameters and optimizer state right before an update. A
copy is reused from step to step, so the memory is taken once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from reprokit.capture.structure import iter_tensors

DEFAULT_HISTORY_BYTES = 2 * 2**30


class Copies:
    """Tensors and their contents at one moment. Invariant: ``_tensors`` and ``_contents`` are parallel."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._contents: list[torch.Tensor] = []
        self._versions: list[int] = []

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Remember the contents of ``tensors``, using the memory of the last copy where it is of the same tensors."""
        if len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors)):
            self._overwrite(range(len(tensors)))
            return
        self._tensors = tensors
        self._contents = [_copy(tensor) for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]

    def fits(self, tensors: list[torch.Tensor], limit: int) -> bool:
        """Whether a copy of ``tensors`` takes at most ``limit`` bytes; as many as last time are taken to be the
        same."""
        return len(tensors) == len(self._tensors) or sum(t.numel() * t.element_size() for t in tensors) <= limit

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Remember more tensors."""
        known = set(map(id, self._tensors))
        for tensor in tensors:
            if id(tensor) not in known:
                self._tensors.append(tensor)
                self._contents.append(_copy(tensor))
                self._versions.append(tensor._version)

    def refresh(self) -> None:
        """Remember the contents of now for the same tensors; those that nothing wrote are left alone."""
        numbers = [n for n, (t, v) in enumerate(zip(self._tensors, self._versions, strict=True)) if t._version != v]
        if numbers:
            self._overwrite(numbers)
            for number in numbers:
                self._versions[number] = self._tensors[number]._version

    def changed(self) -> list[torch.Tensor]:
        """The tensors that were written since they were remembered."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]

    def put_back(self) -> Copies:
        """Write the remembered contents into the tensors; returns copies of what they held before."""
        current = Copies()
        current.take(list(self._tensors))
        with torch.no_grad():
            for tensor, content in zip(self._tensors, self._contents, strict=True):
                tensor.data.copy_(content)
        return current

    def clear(self) -> None:
        """Forget everything."""
        self._tensors, self._contents, self._versions = [], [], []

    def _overwrite(self, numbers: Sequence[int]) -> None:
        """Copy tensors into the memory of their old copies, in one call where torch can."""
        contents = [self._contents[number] for number in numbers]
        tensors = [self._tensors[number] for number in numbers]
        try:
            with torch.no_grad():
                torch._foreach_copy_(contents, tensors)
        except RuntimeError:  # a shape or layout has changed
            for number in numbers:
                self._contents[number] = _copy(self._tensors[number])


class UpdateCopies:
    """Parameters and state of an optimizer right before its step, if they fit into ``limit`` bytes."""

    def __init__(self, limit: int = DEFAULT_HISTORY_BYTES) -> None:
        self._limit = limit
        self._copies: dict[int, Copies] = {}
        self._absent: list[torch.Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._numbers: dict[int, dict[str, Any]] = {}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the state before a step of ``optimizer``."""
        tensors = list(state_tensors(optimizer))
        self._optimizer = None
        copies = self._copies.setdefault(id(optimizer), Copies())
        if not copies.fits(tensors, self._limit):
            self._copies.clear()
            return
        copies.take(tensors)
        self._absent = [p for p in parameters_of(optimizer) if p not in optimizer.state]
        self._numbers = {
            id(p): {key: value for key, value in state.items() if isinstance(value, (bool, int, float))}
            for p, state in optimizer.state.items()
            if isinstance(p, torch.Tensor)
        }
        self._optimizer = optimizer

    def put_back(self) -> bool:
        """Go back to before the last step; ``False`` when there is no copy of it."""
        optimizer = self._optimizer
        if optimizer is None:
            return False
        self._copies[id(optimizer)].put_back()
        for parameter in self._absent:
            optimizer.state.pop(parameter, None)
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                state.update(self._numbers.get(id(parameter), {}))
        return True


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every parameter of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters and every tensor of the optimizer's state."""
    yield from parameters_of(optimizer)
    for state in optimizer.state.values():
        yield from iter_tensors(state)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.clone() if plain.layout is not torch.strided else plain.clone(memory_format=torch.preserve_format)
