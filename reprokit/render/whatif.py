"""The what-if table as text: pure functions of the plain data that a reduction keeps.

`rows` is for HTML, where a template chooses the marks; `markdown` is for an issue; `lines` for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.snapshot.redact import redact_text

SAME, OTHER, PASSES, CANNOT_RUN = "same", "other", "passes", "cannot_run"
WORDS = {SAME: "fails the same", OTHER: "fails otherwise", PASSES: "passes", CANNOT_RUN: "cannot run"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True, slots=True)
class Cell:
    """How a program ended in a variant: one of the four answers, what to add to it, and the time of a run."""

    answer: str
    detail: str
    time: str

    @property
    def text(self) -> str:
        """``cannot run: torch sees no GPU``."""
        words = WORDS.get(self.answer, self.answer)
        return f"{words}: {self.detail}" if self.detail else words


@dataclass(frozen=True, slots=True)
class Row:
    """A variant with a cell for every program, ``None`` where it was not asked of that program."""

    name: str
    cells: tuple[Cell | None, ...]


def programs(table: Mapping[str, Any]) -> list[str]:
    """The programs that were run: ``minimum``, ``context``, ``snapshot``."""
    return list(table.get("tables", {}))


def rows(table: Mapping[str, Any]) -> list[Row]:
    """The table by variant, in its order; details are redacted."""
    found: dict[str, dict[str, Cell]] = {}
    names: dict[str, str] = {}
    for program, items in table.get("tables", {}).items():
        for item in items:
            names[item["variant"]] = item["name"]
            cell = Cell(item["answer"], redact_text(item["detail"]), seconds_text(item["seconds"]))
            found.setdefault(item["variant"], {})[program] = cell
    return [
        Row(names[variant], tuple(cells.get(program) for program in programs(table)))
        for variant, cells in found.items()
    ]


def markdown(table: Mapping[str, Any]) -> str:
    """A Markdown table, empty without rows."""
    if not programs(table):
        return ""
    header = ["variant", *(word for program in programs(table) for word in (program, "time"))]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows(table):
        cells = [word for cell in row.cells for word in _words(cell)]
        lines.append(_line([row.name, *map(_escaped, cells)]))
    return "\n".join(lines)


def plain_rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows without any markup, for a terminal."""
    header = ["", *(word for program in programs(table) for word in (program, "time"))]
    body = [[row.name.replace("`", ""), *(word for cell in row.cells for word in _words(cell))] for row in rows(table)]
    return [header, *body]


def seconds_text(seconds: float | None) -> str:
    """A time with three digits: ``12.3 µs``; empty for none."""
    if seconds is None:
        return ""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def _words(cell: Cell | None) -> tuple[str, str]:
    return (cell.text, cell.time) if cell is not None else ("", "")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text that neither ends a cell nor becomes markup; code spans stay."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
