"""The parts of a result that could be otherwise: an input or a number in the arguments, with other contents for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from reprokit.grammar import Count, Name, left_out
from reprokit.program.ir import Call, Input
from reprokit.shrink.arguments import Path, with_leaf
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.constants import is_number
from reprokit.shrink.naming import parameters_of
from reprokit.shrink.plainness import constant_of, contents
from reprokit.shrink.safety import trusts_arguments

_MAX_ELEMENTS = 16
Number = float | bool
_PLAIN = (0.0, 1.0, -1.0, 0.5)


@dataclass(frozen=True, slots=True)
class Place:
    """An input, one of its elements, or an argument of a call."""

    input: Name | None = left_out()
    element: tuple[Count, ...] | None = left_out()
    call: Name | None = left_out()
    argument: Name | None = left_out()
    value: Number | None = left_out()


@dataclass(frozen=True, slots=True)
class Varied(Place):
    """A part of the result that is ``free`` if every other content fails too. ``tried`` is false if none could run."""

    free: bool = False
    tried: bool | None = left_out()


@dataclass(frozen=True, slots=True)
class Nearest(Place):
    """The smallest change of one number that passes."""

    from_: Number = 0.0
    to: Number = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """One number of the result exchanged: what it is, and what makes a candidate of a new number."""

    name: str
    place: Place
    old: float | int | bool
    dtype: torch.dtype
    apply: Callable[[float | int | bool], Candidate]


class Part(Protocol):
    """Something that survived: an input or a constant."""

    @property
    def name(self) -> str:
        """What it is called."""

    def variants(self) -> Iterator[Candidate]:
        """The candidate with other contents in this place."""

    def changes(self) -> Iterator[Change]:
        """The single numbers it is made of."""


class InputPart:
    """An input, all of whose elements may be exchanged."""

    def __init__(self, best: Candidate, item: Input) -> None:
        self.name = item.name
        self._best, self._item = best, item
        self._tensor = best.tensors[item.value]
        self._may_index = not trusts_arguments(best.program)

    def variants(self) -> Iterator[Candidate]:
        """Plain contents, then random ones."""
        for other in self._contents():
            if not torch.equal(contents(other), contents(self._tensor)):
                yield self._best.with_tensors({self._item.value: other})

    def changes(self) -> Iterator[Change]:
        """The first elements; numbers that choose something only if choosing wrongly is safe."""
        tensor = self._tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
            return
        if tensor.is_floating_point() or tensor.dtype is torch.bool or self._may_index:
            for index in range(min(tensor.numel(), _MAX_ELEMENTS)):
                place = [int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape)] if tensor.dim() else []
                found = Place(self._item.name, tuple(place))
                yield Change(
                    self.name, found, tensor[tuple(place)].item(), tensor.dtype, self._with_element(tuple(place))
                )

    def _with_element(self, place: tuple[int, ...]) -> Callable[[float | int | bool], Candidate]:
        def apply(number: float | int | bool) -> Candidate:
            changed = self._tensor.detach().clone(memory_format=torch.preserve_format)
            changed[place] = number
            return self._best.with_tensors({self._item.value: changed})

        return apply

    def _contents(self) -> Iterator[torch.Tensor]:
        tensor = self._tensor
        random = torch.Generator().manual_seed(0)
        if is_number(tensor):
            for number in _PLAIN:
                if constant_of(tensor) != number:
                    yield torch.full_like(tensor, number)
            for scale in (1.0, 10.0):
                real = tensor.real.dtype if tensor.is_complex() else tensor.dtype
                yield (torch.randn(tensor.shape, generator=random) * scale).to(tensor.device, real).to(tensor.dtype)
        elif tensor.layout is torch.strided and tensor.dtype is torch.bool:
            yield ~tensor
            yield torch.zeros_like(tensor)
            yield torch.ones_like(tensor)
        elif tensor.layout is torch.strided and tensor.numel() and not tensor.is_quantized and self._may_index:
            largest = int(tensor.max())
            if largest == 0:
                yield torch.ones_like(tensor)
            elif largest > 0:
                yield torch.zeros_like(tensor)
                yield torch.full_like(tensor, largest)
                yield torch.randint(0, largest + 1, tensor.shape, generator=random).to(tensor.device, tensor.dtype)


class ConstantPart:
    """A number among the arguments of a call."""

    def __init__(self, best: Candidate, index: int, path: Path, number: float | int) -> None:
        self._best, self._index, self._path, self.number = best, index, path, number
        call = best.program.calls[index]
        self.name = _argument_name(call, path)
        self.call = call.target

    def variants(self) -> Iterator[Candidate]:
        """A few other numbers."""
        number = self.number
        for other in dict.fromkeys((0.0, 1.0, -number, number * 2, number / 2)):
            if other != number:
                yield self.apply(other)

    def changes(self) -> Iterator[Change]:
        """The number itself."""
        yield Change(self.name, Place(call=self.call, argument=self.name), self.number, torch.float64, self.apply)

    def apply(self, number: float | int | bool) -> Candidate:
        """The candidate with another number here."""
        calls = list(self._best.program.calls)
        calls[self._index] = with_leaf(calls[self._index], self._path, number)
        return replace(self._best, program=replace(self._best.program, calls=tuple(calls)))


def _argument_name(call: Call, path: Path) -> str:
    words = [word for word in path[1:] if isinstance(word, str)]
    if words:
        return words[-1]
    names = parameters_of(call.target)
    place = path[1]
    return names[place] if place < len(names) else f"argument {place + 1}"
