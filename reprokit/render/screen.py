"""What a terminal shows of a snapshot beside its facts: the lines around the origin and the calls that led to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprokit.program.ir import Program, Site
from reprokit.render.call_code import call_text, labels
from reprokit.render.ranges import range_text
from reprokit.render.survey import Survey, survey, written_by
from reprokit.render.way import ways

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot

LINES_AROUND = 3
CALLS_BEFORE = 4


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's source that the snapshot holds."""

    number: int
    code: str
    is_origin: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A call with the range of what it returned, or an operand of the origin with its range."""

    text: str
    range: str
    is_origin: bool = False


def source_lines(snapshot: Snapshot) -> list[Line]:
    """The origin's line among its neighbours, as far as calls of the same function tell them."""
    site = snapshot.failure.site
    if site is None:
        return []
    known = {**_noted(snapshot.program, site), **_called(snapshot.program, site), site.line: site.code}
    near = range(site.line - LINES_AROUND, site.line + LINES_AROUND + 1)
    return [Line(number, known[number], number == site.line) for number in near if known.get(number, "").strip()]


def steps(snapshot: Snapshot) -> list[Step]:
    """What the origin was given, the calls before it, and the origin itself, measured in one run of the program.

    Empty where there is no origin, or where the program cannot be run up to it here.
    """
    program, failure = snapshot.program, snapshot.failure
    if failure.call_index is None:
        return []
    found, names = survey(snapshot), labels(program)
    if found.optimizer:
        return [Step(stop.text, range_text(stop.range), stop.is_origin) for stop in ways(found, names)[0].stops]
    if not found.operands:
        return []
    shown = range(max(0, failure.call_index - CALLS_BEFORE), failure.call_index + 1)
    written = {index: written_by(program.calls[index], failure) for index in shown}
    inside = {value for values in written.values() for value in values}
    given = [Step(names[value], range_text(seen)) for value, seen in found.operands.items() if value not in inside]
    made = [_step(found, names, index, values) for index, values in written.items()]
    return [*given, *made, *_gradient(found, names)]


def _gradient(found: Survey, names: Mapping[int, str]) -> list[Step]:
    """What a backward failure made of the gradient."""
    value = found.failure.value
    if not found.failure.is_derivative or value is None or value not in found.gradients:
        return []
    return [Step(f"gradient of {names[value]}", range_text(found.gradients[value]), is_origin=True)]


def _step(found: Survey, names: Mapping[int, str], index: int, written: Sequence[int]) -> Step:
    ranges = "; ".join(range_text(found.written.get((index, value))) for value in written)
    return Step(call_text(found.program.calls[index], names), ranges, index == found.failure.call_index)


def _called(program: Program, site: Site) -> dict[int, str]:
    """Lines of the origin's function from which calls were made."""
    sites = (call.site for call in program.calls if call.site is not None)
    return {one.line: one.code for one in sites if (one.file, one.function) == (site.file, site.function)}


def _noted(program: Program, site: Site) -> dict[int, str]:
    """Lines of the classes whose source the snapshot holds."""
    return {
        note.line + offset: code
        for note in program.modules.values()
        if note.file == site.file
        for offset, code in enumerate(note.source.splitlines())
    }
