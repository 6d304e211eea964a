"""What a terminal shows of a snapshot beside its summary: the lines around the origin and the calls that led to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprokit.program.ir import Program, Site

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
    """The calls before the origin and the origin itself, measured in one run of the program.

    Empty where there is no origin, or where the program cannot be run here.
    """
    from reprokit.render.outline import outline
    from reprokit.render.report import range_text

    origin = snapshot.failure.call_index
    if origin is None:
        return []
    try:
        found = outline(snapshot.program, snapshot.tensors, snapshot.failure, snapshot.settings)
    except Exception:  # the summary is worth showing whatever a run of the program does on this machine
        return []
    before = [row for row in found.rows if row.index <= origin][-CALLS_BEFORE - 1 :]
    shown = {name for row in before for name, _ in row.results}
    given = [Step(name, range_text(value)) for name, value in found.operands if name not in shown]
    calls = [Step(row.text, "; ".join(range_text(value) for _, value in row.results), row.is_origin) for row in before]
    return [*given, *calls]


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
