"""A diagnosis and a what-if table as Markdown lines and as data for an HTML page. Pure: nothing is run, everything is
redacted text.

What a fix did comes before how it is written, because a reader wants to know first whether it helped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.render import wording
from reprokit.render.templates import fence
from reprokit.render.wording import prose, renamed
from reprokit.rules.diagnosis import Diagnosis, TriedFix
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.snapshot.redact import redact_source, redact_text
from reprokit.whatif import MINIMUM, NOT_DONE

_SURE = {
    "certain": "the values at the origin leave no other reading",
    "likely": "likely",
    "possible": "possible",
}
_TRIED = {
    True: "A fix was tried on the captured step and helped",
    False: "A change was tried on the captured step and made it finite, but its loss is absurd, so it is no fix",
    None: "A change was tried on the captured step and ended the failure; there is no loss to check",
}
_MADE = {
    True: "fixed when tried",
    False: "made finite when tried, but not fixed",
    None: "the failure ended when tried, without a loss to check",
}


def markdown(shown: Mapping[str, Any]) -> str:
    """A diagnosis, from `page`, as Markdown without a heading."""
    lines = [f"**{wording.prose(shown['title'])}** ({shown['sure']}). {wording.prose(shown['mechanism'])}", ""]
    lines += [f"- {wording.prose(line)}" for line in shown["evidence"]]
    lines += [f"- Also: {wording.prose(line[:1].lower() + line[1:])}" for line in shown["also"]]
    lines += ["", f"What to do: {wording.prose(shown['advice'])}"]
    if shown["fix"] is not None:
        fix = shown["fix"]
        lines += ["", wording.prose("{intro}: {change}. Then: {outcome}.".format_map(fix))]
        if fix["code"]:
            lines += ["", f"{fence(fix['code'])}python", *fix["code"].splitlines(), fence(fix["code"])]
    lines += [f"- {wording.prose('{verdict}: {change} ({outcome}).'.format_map(fix))}" for fix in shown["tried"]]
    if shown["note"]:
        lines += ["", wording.prose(shown["note"])]
    if shown["links"]:
        lines += ["", f"See also {', '.join(shown['links'])}."]
    return "\n".join(lines)


def page(diagnosis: Diagnosis, *, is_exception: bool = False) -> dict[str, Any]:
    """The diagnosis as plain text, in which parts in backticks are code; only links to web addresses are kept.

    ``is_exception``: the step raised, so a fix is one after which the call returns.
    """
    return {
        "title": _safe(diagnosis.title),
        "sure": _SURE.get(diagnosis.confidence, diagnosis.confidence),
        "mechanism": _safe(diagnosis.mechanism),
        "evidence": [_safe(line) for line in diagnosis.evidence],
        "advice": _safe(diagnosis.advice),
        "links": [link for link in diagnosis.links if link.startswith("https://")],
        "also": [": ".join(map(_safe, (item.title, *item.evidence[:1]))) for item in diagnosis.also],
        "fix": _fix_data(diagnosis.fix, is_exception=is_exception) if diagnosis.fix is not None else None,
        "tried": [_fix_data(fix, is_exception=is_exception) for fix in diagnosis.tried],
        "note": _safe(diagnosis.note or ""),
    }


def one_line(diagnosis: Diagnosis) -> str:
    if not diagnosis.is_known:
        return "none of the known causes fits"
    words = f"{diagnosis.title} ({diagnosis.confidence})"
    if diagnosis.fix is not None:
        made = _MADE[diagnosis.fix.is_plausible]
        words += f"; {made}: {_change(diagnosis.fix, with_places=False)} -> {diagnosis.fix.outcome}"
    return _safe(words)


def _fix_data(fix: TriedFix, *, is_exception: bool) -> dict[str, Any]:
    returned = "A change was tried on the captured step, and the call returned"
    return {
        "intro": returned if is_exception and fix.helped else _TRIED[fix.is_plausible],
        "verdict": "Made the step finite, but not its loss usual" if fix.helped else "Did not help",
        "change": _change(fix),
        "outcome": _safe(fix.outcome),
        "code": redact_source(fix.code),
        "helped": fix.helped and fix.is_plausible is True,
    }


def _change(fix: TriedFix, *, with_places: bool = True) -> str:
    """The changes and their places, one part a change, each once."""
    parts = []
    for text, place in zip(fix.text, fix.where, strict=False):
        parts.append(f"{_safe(text)} ({wording.code_span(_safe(place))})" if place and with_places else _safe(text))
    return ", then ".join(dict.fromkeys(parts))


def _safe(text: str) -> str:
    return redact_text(" ".join(text.split()))


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


def table_markdown(table: WhatIfResult, program: str, inputs: Mapping[str, str] | None = None) -> str:
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


def _cell_text(text: str) -> str:
    """Markdown that does not end its cell; tables are split before inline code is read."""
    return re.sub(r"(?<!\\)\|", r"\\|", prose(text))


def _cell(item: Answered, inputs: Mapping[str, str] | None) -> Cell:
    detail = redact_text(renamed(item.detail, inputs or {}))
    if item.seconds is None:
        return Cell(item.answer, detail, "")
    size, unit = next(((size, unit) for size, unit in _UNITS if item.seconds >= size), _UNITS[-1])
    return Cell(item.answer, detail, f"{item.seconds / size:.3g} {unit}")
