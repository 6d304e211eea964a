"""Steps of loops that write nothing: they make new parameters of the old ones and of what a transform differentiated.

A new parameter is a tensor without a graph that calls have made both of a tensor that was differentiated by and of the
derivative, and that has the shape of the first. The step is over when a transform of the loop is given one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.structure import iter_tensors

_MOST = 4  # derivatives of a step; there is one for each set of parameters


class Derivative(NamedTuple):
    """A call of a transform that differentiates, and the tensors that it differentiates by."""

    entry: Entry
    by: tuple[torch.Tensor, ...]


class NewParameter(NamedTuple):
    """A tensor that may take the place of a parameter; ``is_last`` if no other one was made of it."""

    tensor: torch.Tensor
    derivative: Derivative
    is_last: bool


class Derivatives:
    """The last derivatives of the running step."""

    def __init__(self) -> None:
        self._known: deque[Derivative] = deque(maxlen=_MOST)

    def restart(self) -> None:
        """A new step begins."""
        self._known.clear()

    def add(self, entry: Entry, by: Iterable[torch.Tensor]) -> Derivative:
        """Note a derivative, the last one of the entries."""
        self._known.append(Derivative(entry, tuple(by)))
        return self._known[-1]

    def new_parameters(self, entries: Sequence[Entry]) -> list[NewParameter]:
        """The new parameters among the results of the running step's calls."""
        return [new for known in self._known for new in _made_of(known, entries)]

    def bad_at_end(self, entries: Sequence[Entry]) -> Derivative | None:
        """The derivative that is bad and has led to bad parameters, of which no others were made."""
        for new in self.new_parameters(entries):
            outputs = iter_tensors(new.derivative.entry.output)
            if new.is_last and bad_tensor([new.tensor]) is not None and bad_tensor(outputs) is not None:
                return new.derivative
        return None


class _Lineage:
    """Sets of tensors that a loop differentiates by, each made of the one before; ``num_steps`` counts the updates."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._last: list[weakref.ref[torch.Tensor]] = []

    def go_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are the last ones now."""
        self._last = [weakref.ref(tensor) for tensor in tensors]

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if some of the tensors are among the last ones."""
        last = [old() for old in self._last]
        return any(tensor is old for tensor in tensors for old in last)

    @property
    def is_alive(self) -> bool:
        """True if the loop still has one of the last tensors."""
        return any(old() is not None for old in self._last)


class Rounds:
    """Counts the steps of a loop as a person would: those of the parameters that have been there for the longest time.

    Inputs that are changed by their gradients, such as adversarial examples, are gone after their iteration.
    """

    def __init__(self) -> None:
        self._lineages: list[_Lineage] = []

    @property
    def completed(self) -> int:
        """The steps so far."""
        return next((lineage.num_steps for lineage in self._lineages if lineage.is_alive), 0)

    def begin(self, derivative: Derivative) -> None:
        """A derivative was computed."""
        self._lineages = [lineage for lineage in self._lineages if lineage.is_alive]
        self._lineage_of(derivative).go_on(derivative.by)

    def end(self, derivative: Derivative, new: Iterable[torch.Tensor]) -> None:
        """New tensors, made of a derivative, are used."""
        lineage = self._lineage_of(derivative)
        lineage.num_steps += 1
        lineage.go_on(new)

    def _lineage_of(self, derivative: Derivative) -> _Lineage:
        for lineage in self._lineages:
            if lineage.holds(derivative.by):
                return lineage
        self._lineages.append(_Lineage())
        return self._lineages[-1]


def _made_of(derivative: Derivative, entries: Sequence[Entry]) -> list[NewParameter]:
    after = next((n + 1 for n, entry in enumerate(entries) if entry is derivative.entry), len(entries))
    of_parameters = {id(tensor) for tensor in derivative.by}
    of_slopes = {id(tensor) for tensor in iter_tensors(derivative.entry.output)}
    shapes = {tensor.shape for tensor in derivative.by}
    made: dict[int, torch.Tensor] = {}
    used: set[int] = set()
    for entry in entries[after:]:
        given = {id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs))}
        outputs = list(iter_tensors(entry.output))
        keys = {id(tensor) for tensor in outputs}
        is_of_parameters, is_of_slopes = bool(given & of_parameters), bool(given & of_slopes)
        if is_of_parameters:
            of_parameters |= keys
        if is_of_slopes:
            of_slopes |= keys
        if is_of_parameters and is_of_slopes:
            found = {id(t): t for t in outputs if t.shape in shapes and not t.requires_grad}
            used |= given if found else set()
            made.update(found)
    return [NewParameter(tensor, derivative, key not in used) for key, tensor in made.items()]
