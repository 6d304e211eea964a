"""A bad value that marks what is missing, such as a label: healthy steps have it too, and a call drops it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.locate.notes import Notes
from reprokit.locate.ways import ways_of
from reprokit.program.interpreter import run
from reprokit.program.ir import Program, Site
from reprokit.program.step import Step


def let_through(failure: Failure, failing: Step, healthy: Step) -> Failure | None:
    """``failure``, of an input that is bad, beside a healthy step: the first call on the way of the bad value that
    drops it there and not here. Without one the ``failure`` with its `Failure.marker`, if the input is bad there too.

    ``None`` if the healthy step tells nothing: its input is good, or it has taken other rows of the same data.
    """
    if locate(healthy.program, healthy.tensors) is not None:
        return None
    notes, then = Notes(failing.program), Notes(healthy.program)
    notes.run(failing.tensors)
    then.run(healthy.tensors)
    counterparts = {place: index for index, place in _places(healthy.program)}
    for index, place in _places(failing.program):
        other = counterparts.get(place)
        bad = [value for value, ways in notes.writes.get(index, {}).items() if failure.way in ways]
        if other is None or not bad or not _drops(then, other, failure.way):
            continue
        found = locate(failing.program, failing.tensors, through=bad[0])
        if found is not None and found.call_index == index:
            return found if _is_masking(healthy, other) else None
    given = (item.value for item in healthy.program.inputs if item.name == failure.input_name)
    is_marker = any(failure.way in ways_of(healthy.tensors[value]) for value in given)
    return replace(failure, marker=failure.input_name) if is_marker else None


def _places(program: Program) -> Iterator[tuple[int, tuple[str, Site | None, int]]]:
    """The calls by function, line, and how often these came before: two steps need not make all the same calls."""
    seen = Counter[tuple[str, Site | None]]()
    for index, call in enumerate(program.calls):
        yield index, (call.target, call.site, seen[call.target, call.site])
        seen[call.target, call.site] += 1


def _drops(notes: Notes, index: int, way: str) -> bool:
    reads, writes = (ways.get(index, {}).values() for ways in (notes.reads, notes.writes))
    return any(way in ways for ways in reads) and not any(way in ways for ways in writes)


def _is_masking(step: Step, index: int) -> bool:
    """True unless a call only takes rows of the data, as ``data[i : i + 32]`` does for every batch."""
    operands = run(step.program, step.tensors, keep=frozenset(step.program.calls[index].input_refs())).values.values()
    return any(tensor.dtype == torch.bool or tensor.requires_grad for tensor in operands)
