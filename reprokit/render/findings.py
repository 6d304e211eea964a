"""A diagnosis and a what-if table as Markdown lines and as data for an HTML page. Pure: nothing is run, everything is
redacted text.

What a fix did comes before how it is written, because a reader wants to know first whether it helped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.render.templates import fence, render_template, tidied
from reprokit.render.wording import code_span, prose, renamed
from reprokit.rules.diagnosis import Diagnosis, TriedFix
from reprokit.series.cause import SMALLER_RATES, TENTH, Cause
from reprokit.series.decide import is_of_course, is_second
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.snapshot.redact import redact_source, redact_text
from reprokit.whatif import MINIMUM, NOT_DONE

_TRIED = {
    True: "A fix was tried on the captured step and helped",
    False: "A change was tried on the captured step and made it finite, but its loss is absurd, so it is no fix",
    None: "A change was tried on the captured step and ended the failure; there is no loss to check",
}
_LOWER = r"Lower the learning rate, (?:warm it up, )?(?:or )?(\w)"
_HIDES = "A change of the captured step alone makes it finite too, but hides the cause"
_MADE = {
    True: "fixed when tried",
    False: "made finite when tried, but not fixed",
    None: "the failure ended when tried, without a loss to check",
}


def markdown(shown: Mapping[str, Any]) -> str:
    """A diagnosis, from `page`, as Markdown without a heading."""
    return tidied(render_template("issue/_diagnosis.md.j2", found=shown, fence=fence)).rstrip()


def page(diagnosis: Diagnosis, cause: Cause | None = None, *, is_exception: bool = False) -> dict[str, Any]:
    """The diagnosis as plain text, in which parts in backticks are code; only links to web addresses are kept.

    ``is_exception``: the step raised, so a fix is one after which the call returns. Where ``cause`` lies before the
    step, a fix of the call hides it.
    """
    fix, options = diagnosis.fix, {"is_exception": is_exception, "is_second": is_second(cause, diagnosis)}
    return {
        "title": _safe(diagnosis.title),
        "sure": diagnosis.confidence,
        "mechanism": _safe(diagnosis.mechanism),
        "evidence": [_safe(line) for line in diagnosis.evidence],
        "advice": _safe(_advice(diagnosis, cause)),
        "links": [link for link in diagnosis.links if link.startswith("https://")],
        "also": [": ".join(map(_safe, (item.title, *item.evidence[:1]))) for item in diagnosis.also],
        "fix": _fix_data(fix, **options) if fix is not None else None,
        "tried": [_fix_data(item, **options) for item in diagnosis.tried],
        "note": _safe(diagnosis.note or ""),
    }


def _advice(diagnosis: Diagnosis, cause: Cause | None) -> str:
    """The advice of a rule, without a lower learning rate where the steps have failed with that too."""
    advice = diagnosis.advice
    rates = [one.removes for one in cause.interventions if one.change in SMALLER_RATES] if cause is not None else []
    if rates and not any(rates):
        words = re.sub(_LOWER, lambda found: found[1].upper(), advice)
        advice = f"{TENTH.capitalize()} did not help. {words}" if words != advice else advice
    if is_second(cause, diagnosis):
        return "Begin with the cause." if is_of_course(diagnosis) else f"Begin with the cause. {advice}"
    return advice


def one_line(diagnosis: Diagnosis, cause: Cause | None = None) -> str:
    """The rule and its fix; ``cause`` as for `page`."""
    if not diagnosis.is_known:
        return "none of the known causes fits"
    words = f"{diagnosis.title} ({diagnosis.confidence})"
    if diagnosis.fix is not None:
        made = _MADE[diagnosis.fix.is_plausible]
        if is_second(cause, diagnosis) and diagnosis.fix.is_plausible is not False:
            made = "finite too, but the cause is hidden"
        words += f"; {made}: {_change(diagnosis.fix, with_places=False)} -> {diagnosis.fix.outcome}"
    return _safe(words)


def _fix_data(fix: TriedFix, *, is_exception: bool, is_second: bool) -> dict[str, Any]:
    is_offered = fix.is_plausible is not False and not is_second
    intro = "A change was tried on the captured step, and the call returned"
    if not (is_exception and fix.helped):
        intro = _HIDES if is_second and fix.is_plausible is not False else _TRIED[fix.is_plausible]
    return {
        "intro": intro,
        "verdict": "Made the step finite, but not its loss usual" if fix.helped else "Did not help",
        "change": _change(fix),
        "outcome": _safe(fix.outcome),
        "code": redact_source(fix.code) if is_offered else "",
        "is_offered": is_offered,
        "helped": fix.helped and fix.is_plausible is True and is_offered,
    }


def _change(fix: TriedFix, *, with_places: bool = True) -> str:
    """The changes and their places, one part a change, each once."""
    parts = []
    for text, place in zip(fix.text, fix.where, strict=False):
        parts.append(f"{_safe(text)} ({code_span(_safe(place))})" if place and with_places else _safe(text))
    return ", then ".join(dict.fromkeys(parts))


def _safe(text: str) -> str:
    return redact_text(" ".join(text.split()))


WORDS = {"same": "fails the same", "other": "fails otherwise", "passes": "passes", "cannot_run": "cannot run"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of a program in a variant: one of the four answers, its words, and the time of a run."""

    answer: str
    text: str
    time: str

    @classmethod
    def of(cls, item: Answered, inputs: Mapping[str, str] | None) -> Cell:
        """``cannot run: torch sees no GPU``, redacted; ``inputs`` has the names of the program's inputs."""
        words, detail = WORDS.get(item.answer, item.answer), redact_text(renamed(item.detail, inputs or {}))
        text = f"{words}: {detail}" if detail else words
        if item.seconds is None:
            return cls(item.answer, text, "")
        size, unit = next(((size, unit) for size, unit in _UNITS if item.seconds >= size), _UNITS[-1])
        return cls(item.answer, text, f"{item.seconds / size:.3g} {unit}")


def rows(table: WhatIfResult, inputs: Mapping[str, str] | None = None) -> list[tuple[str, list[Cell | None]]]:
    """For every variant a cell for each of the programs, ``None`` where it was not asked of that program.

    ``inputs`` are the names of those of the minimum.
    """
    tables = table.tables or {}
    found: dict[str, tuple[str, list[Cell | None]]] = {}
    for place, (program, items) in enumerate(tables.items()):
        for item in items:
            cells = found.setdefault(item.variant, (item.name, [None] * len(tables)))[1]
            cells[place] = Cell.of(item, inputs if program == MINIMUM else None)
    return list(found.values())


def table_markdown(table: WhatIfResult, program: str, inputs: Mapping[str, str] | None = None) -> str:
    """A Markdown table about one program, a line for every way in which it ended; empty without any."""
    variants: dict[str, list[str]] = {}
    for item in (table.tables or {}).get(program, ()):
        if not item.detail.startswith(NOT_DONE):
            variants.setdefault(Cell.of(item, inputs).text, []).append(item.name)
    if not variants:
        return ""

    def cell(text: str) -> str:
        """Markdown that does not end its cell; tables are split before inline code is read."""
        return re.sub(r"(?<!\\)\|", r"\\|", prose(text))

    body = [f"| {cell('; '.join(names))} | {cell(text)} |" for text, names in variants.items()]
    return "\n".join(("| how it is run | result |", "| --- | --- |", *body))


def plain_rows(table: WhatIfResult) -> list[list[str]]:
    """Header and rows without any markup, for a terminal."""
    header = ["", *(word for program in table.tables or () for word in (program, "time"))]
    body = []
    for name, cells in rows(table):
        shown = [(cell.text, cell.time) if cell is not None else ("", "") for cell in cells]
        body.append([name.replace("`", ""), *(word for cell in shown for word in cell)])
    return [header, *body]
