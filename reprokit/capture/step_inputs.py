"""The inputs of a step that are no state, and which input of a script's own step stands for which of the captured one.

An input is known again by the line or the model that reads it, since a capture and an edited script share most of
these; only where an edited line reads it, by its name, its shape or its order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from reprokit import native
from reprokit.program.functions import is_factory
from reprokit.program.interpreter import Tensors, run
from reprokit.program.ir import Call, Program

# Calls of the loop that hand data on: their results are inputs, such as the minibatch `x[32:48]` of all samples.
_HANDING_ON = frozenset(
    ["__getitem__", "__setitem__", "cat", "chunk", "clone", "concat", "contiguous", "copy_", "detach", "expand",
     "flatten", "gather", "index_select", "movedim", "narrow", "permute", "repeat", "reshape", "select", "split",
     "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view"]
)  # fmt: skip


class OtherStep(Exception):
    """A step of the script's own is not like the captured one; the message says why."""


def hands_on(target: str) -> bool:
    """True for a call that makes inputs of inputs."""
    return target.rpartition(".")[2] in _HANDING_ON or is_factory(target)


class Given(NamedTuple):
    """An input of a step, or what the loop has taken out of inputs, with the first call that computes of it."""

    value: int
    name: str  # empty where the user has none for it
    tensor: torch.Tensor
    call: Call

    @property
    def kind(self) -> tuple[torch.dtype, int]:
        """Sizes may change from step to step, these do not."""
        return self.tensor.dtype, native.dim(self.tensor)

    @property
    def words(self) -> str:
        """``float32 (8, 4) in `linear`, train.py:12: loss = ...``"""
        site = self.call.site
        place = f", {site.place}: {site.code.strip()}" if site is not None else ""
        kind = f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"
        return f"{kind} in `{self.call.name}`{place}"


def reader_of(call: Call) -> str | None:
    """The line of the loop that makes a call, which edits may move, or the model that the loop has called."""
    if call.scope:
        return call.scope[0].root or call.scope[0].cls
    return call.site.code.strip() if call.site is not None else None


def num_before_backward(program: Program) -> int:
    """The number of calls before the last backward call."""
    backward = (index for index, call in enumerate(program.calls) if call.is_differentiation)
    return max(backward, default=len(program.calls))


def given_to(program: Program, tensors: Tensors, prepared: Collection[str | None]) -> list[Given]:
    """The inputs of a step that are no state, in the order in which its calls up to the last backward call read them.

    What the loop only hands on, or computes in lines that are ``prepared``, is followed to the first other call.
    """
    names = _names_of_data(program)
    given = set(names)
    readers: dict[int, Call] = {}
    handing = []
    for index, call in enumerate(program.calls[: num_before_backward(program) + 1]):
        read = call.input_refs()
        is_preparing = hands_on(call.target) or reader_of(call) in prepared
        if not call.scope and is_preparing and given.issuperset(read):
            made = " ".join(names[value] for value in read)
            for value in call.output_refs():
                given.add(value)
                names.setdefault(value, made)
            handing.append(index)
            continue
        if call.name == "copy_":  # a value that is overwritten is no input any more
            given.discard(read[0])
        for value in read:
            if value in given:
                readers.setdefault(value, call)
    values = run(program, tensors, keep=frozenset(readers), only=handing).values
    return [Given(value, names[value], values[value], call) for value, call in readers.items()]


def _names_of_data(program: Program) -> dict[int, str]:
    """The inputs that are no state, with the names that the user has for them."""
    names = {}
    for item in program.inputs:
        if item.role in ("batch", "random"):
            is_numbered = item.name.startswith("input")
            names[item.value] = "" if is_numbered else item.name
    return names


# -- which stands for which ------------------------------------------------------------------------------------------

Rule = Callable[[Given, Given], bool]


def has_same_kind(one: Given, other: Given) -> bool:
    """True if two inputs may stand for each other."""
    return one.kind == other.kind


def has_same_reader(one: Given, other: Given) -> bool:
    """True if the same line or model reads two inputs that may stand for each other."""
    return has_same_kind(one, other) and reader_of(one.call) == reader_of(other.call)


def has_same_name(one: Given, other: Given) -> bool:
    """True if two inputs that may stand for each other have one name."""
    return has_same_kind(one, other) and one.name == other.name != ""


def _has_same_shape(one: Given, other: Given) -> bool:
    return has_same_kind(one, other) and one.tensor.shape == other.tensor.shape


def paired(wanted: list[Given], own: list[Given]) -> list[tuple[Given, Given]]:
    """The inputs of the captured step with the script's own. Raises `OtherStep`."""
    if not wanted:
        raise OtherStep("the captured step reads nothing")
    found = _Pairing(wanted, own).found
    for place, one in enumerate(wanted):
        if place not in found:
            there = f", where the script reads {own[place].words}" if place < len(own) else "; the script does not"
            raise OtherStep(f"the captured step reads {one.words}{there}")
    return [(one, found[place]) for place, one in enumerate(wanted)]


class _Pairing:
    """Pairs by one rule after the other; a rule applies to the inputs that those before have left.

    The n-th input of a kind that a reader has is the n-th of that reader in the script. A name or a shape decides if
    only one input has it. The order decides if as many inputs of the kind are left on both sides. Shape and order say
    too little about inputs of readers that were not edited.
    """

    def __init__(self, wanted: list[Given], own: list[Given]) -> None:
        self.found: dict[int, Given] = {}  # by the place among the wanted ones
        self._wanted, self._left = wanted, list(own)
        self._known = {reader_of(one.call) for one in wanted}
        for place in self._open():
            self._take(place, self._like(place, has_same_reader))
        for place in self._open():
            self._take_only(place, self._like(place, has_same_name))
        for place in self._open():
            self._take_only(place, self._like_edited(place, _has_same_shape))
        for place in self._open():
            alike = self._like_edited(place, has_same_kind)
            num_open = sum(has_same_kind(self._wanted[place], self._wanted[other]) for other in self._open())
            if len(alike) <= num_open:
                self._take(place, alike)

    def _open(self) -> list[int]:
        return [place for place in range(len(self._wanted)) if place not in self.found]

    def _like(self, place: int, rule: Rule) -> list[Given]:
        return [other for other in self._left if rule(self._wanted[place], other)]

    def _like_edited(self, place: int, rule: Rule) -> list[Given]:
        return [other for other in self._like(place, rule) if reader_of(other.call) not in self._known]

    def _take_only(self, place: int, alike: list[Given]) -> None:
        if len(alike) == 1:
            self._take(place, alike)

    def _take(self, place: int, alike: list[Given]) -> None:
        if alike:
            self.found[place] = alike[0]
            self._left.remove(alike[0])
