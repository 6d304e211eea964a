"""The what-if table as text: pure functions of what a reduction keeps.

`rows` is for HTML, where a template chooses the marks; `plain_rows` for a terminal; `markdown` for an issue, whose text
must not differ from one run to the next: it has no times, and leaves out what there was no time for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reprokit.render.wording import prose, renamed
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.snapshot.redact import redact_text
from reprokit.whatif.table import MINIMUM, NOT_DONE

WORDS = {"same": "fails the same", "other": "fails otherwise", "passes": "passes", "cannot_run": "cannot run"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of a program in a variant: one of the four answers, what to add to it, and the time of a run."""

    answer: str
    detail: str
    time: str

    @property
    def text(self) -> str:
        """``cannot run: torch sees no GPU``."""
        words = WORDS.get(self.answer, self.answer)
        return f"{words}: {self.detail}" if self.detail else words


@dataclass(frozen=True, slots=True)
class VariantRow:
    """A variant with a cell for every program, ``None`` where it was not asked of that program."""

    name: str
    cells: tuple[Cell | None, ...]


def programs(table: WhatIfResult) -> list[str]:
    """The programs that were run: ``minimum``, ``context``, ``snapshot``."""
    return list(table.tables or {})


def rows(table: WhatIfResult, inputs: Mapping[str, str] | None = None) -> list[VariantRow]:
    """The table by variant, in its order; details are redacted. ``inputs`` are the names of those of the minimum."""
    found: dict[str, dict[str, Cell]] = {}
    names: dict[str, str] = {}
    for program, items in (table.tables or {}).items():
        for item in items:
            names[item.variant] = item.name
            found.setdefault(item.variant, {})[program] = _cell(item, inputs if program == MINIMUM else None)
    return [
        VariantRow(names[variant], tuple(cells.get(program) for program in programs(table)))
        for variant, cells in found.items()
    ]


def markdown(table: WhatIfResult, program: str, inputs: Mapping[str, str] | None = None) -> str:
    """A Markdown table about one program, a line for every way in which it ended; empty without any.

    ``inputs`` says what the inputs of the program are called where the table is read.
    """
    variants: dict[str, list[str]] = {}
    for item in (table.tables or {}).get(program, ()):
        if not item.detail.startswith(NOT_DONE):
            variants.setdefault(_cell(item, inputs).text, []).append(item.name)
    if not variants:
        return ""
    body = ((_cell_text("; ".join(names)), _cell_text(text)) for text, names in variants.items())
    return "\n".join(f"| {run} | {result} |" for run, result in (("how it is run", "result"), ("---", "---"), *body))


def plain_rows(table: WhatIfResult) -> list[list[str]]:
    """Header and rows without any markup, for a terminal."""
    header = ["", *(word for program in programs(table) for word in (program, "time"))]
    body = []
    for row in rows(table):
        cells = [(cell.text, cell.time) if cell is not None else ("", "") for cell in row.cells]
        body.append([row.name.replace("`", ""), *(word for cell in cells for word in cell)])
    return [header, *body]


def seconds_text(seconds: float | None) -> str:
    """A time with three digits: ``12.3 µs``; empty for none."""
    if seconds is None:
        return ""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def _cell_text(text: str) -> str:
    """Markdown that does not end its cell; tables are split before inline code is read."""
    return re.sub(r"(?<!\\)\|", r"\\|", prose(text))


def _cell(item: Answered, inputs: Mapping[str, str] | None) -> Cell:
    detail = redact_text(renamed(item.detail, inputs or {}))
    return Cell(item.answer, detail, seconds_text(item.seconds))
