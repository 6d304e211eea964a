"""The inputs of two steps beside each other: which belong together, which differ, and by how much.

`input_partners` finds for each input of the second step that of the first; `input_differences` says what is not the
same, such as ``x (batch): 3 of 8 elements differ by up to 0.5``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from reprokit import native
from reprokit.compare.difference import MARGIN
from reprokit.compare.gap import Gap, gap_between
from reprokit.compare.imprints import digest_of
from reprokit.program.ir import Input
from reprokit.program.step import Step


class InputDifference(NamedTuple):
    """An input that is not the same in both steps."""

    name: str
    role: str
    words: str
    is_rounding: bool  # by no more than rounding in each step before


# What an input of one step is found by in the other: the item, its step, and its digest
_KEYS: Sequence[Callable[[Input, Step, int], Hashable]] = (
    lambda item, step, digest: (item.role, item.name, digest),
    lambda item, step, digest: (item.role, digest),
    lambda item, step, digest: (item.role, item.name, step.tensors[item.value].shape),
    lambda item, step, digest: (item.role, step.tensors[item.value].shape),
)


def input_partners(one: Step, other: Step) -> dict[int, int]:
    """Inputs of the first step by those of the second: by name and contents, or one of these, or in order."""
    found: dict[int, int] = {}
    digests, others = ({value: digest_of(t) for value, t in step.tensors.items()} for step in (one, other))
    for key in _KEYS:
        left: dict[Hashable, list[int]] = {}
        for item in one.program.inputs:
            if item.value not in found.values():
                left.setdefault(key(item, one, digests[item.value]), []).append(item.value)
        for item in other.program.inputs:
            if item.value not in found:
                partners = left.get(key(item, other, others[item.value]))
                if partners:
                    found[item.value] = partners.pop(0)
    # A function of the user's gets a parameter as a leaf: an input twice.
    twins = {digest: value for value, digest in digests.items()}
    return {value: twins[digest] for value, digest in others.items() if digest in twins} | found


def input_differences(
    one: Step, other: Step, partners: Mapping[int, int], num_steps: int
) -> Iterator[tuple[int, InputDifference]]:
    """The inputs that differ after ``num_steps`` steps, by value; by negative numbers those that one step alone has."""
    states = [item for item in other.program.inputs if item.role == "rng"][1:]  # draws before have made these
    for item in other.program.inputs:
        if item.value not in partners or item in states:
            continue
        gap = _gap(one.tensors[partners[item.value]], other.tensors[item.value])
        if gap is not None:
            words = "the state of the random generator differs" if item.role == "rng" else gap.words
            yield item.value, InputDifference(item.name, item.role, words, _is_rounding(item, gap, num_steps))
    # A constant may be an input in one program only, but not what an optimizer knows.
    for which, step, known in (("first", one, {*partners.values()}), ("second", other, {*partners})):
        for item in step.program.inputs:
            if item.value not in known and item.role == "state":
                yield -1 - item.value, InputDifference(item.name, item.role, f"only the {which} step has it", False)


def _gap(first: torch.Tensor, second: torch.Tensor) -> Gap | None:
    """The difference of two inputs, in the coarser format of both."""
    if first.dtype != second.dtype and native.is_floating_point(first) and native.is_floating_point(second):
        narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
        return gap_between(native.to(first, narrow), native.to(second, narrow))
    return gap_between(first, second)


def _is_rounding(item: Input, gap: Gap, num_steps: int) -> bool:
    """True if every step before has added no more than rounding."""
    eps = torch.finfo(getattr(torch, gap.dtype)).eps if gap.dtype else 0.0
    return item.role not in ("rng", "batch") and gap.relative <= MARGIN * eps * num_steps
