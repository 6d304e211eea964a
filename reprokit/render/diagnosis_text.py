"""A diagnosis as Markdown lines and as data for an HTML page. Pure: nothing is run, everything is redacted text.

What a fix did comes before how it is written, because a reader wants to know first whether it helped.
"""

from __future__ import annotations

from typing import Any

from reprokit.locate.diagnosis import Diagnosis, Fix
from reprokit.render import wording
from reprokit.render.templates import fence
from reprokit.snapshot.redact import redact_source, redact_text

_SURE = {
    "certain": "the values at the origin leave no other reading",
    "likely": "likely",
    "possible": "possible",
}
_TRIED = {
    True: "A fix was tried on the captured step and helped",
    False: "A change was tried on the captured step and made it finite, but its loss is absurd, so it is no fix",
    None: "A change was tried on the captured step and made it finite; there is no loss to check",
}
_MADE = {
    True: "fixed when tried",
    False: "made finite when tried, but not fixed",
    None: "made finite when tried, without a loss to check",
}


def markdown(diagnosis: Diagnosis) -> str:
    """The diagnosis as Markdown without a heading; empty when nothing is known."""
    if not diagnosis.is_known:
        return ""
    shown = page(diagnosis)
    lines = [f"**{wording.prose(shown['title'])}** ({shown['sure']}). {wording.prose(shown['mechanism'])}", ""]
    lines += [f"- {wording.prose(line)}" for line in shown["evidence"]]
    lines += [f"- Also: {wording.prose(line[:1].lower() + line[1:])}" for line in shown["also"]]
    lines += ["", f"What to do: {wording.prose(shown['advice'])}"]
    if shown["fix"] is not None:
        fix = shown["fix"]
        lines += ["", wording.prose("{intro}: {change}. Then: {outcome}.".format_map(fix))]
        if fix["code"]:
            lines += ["", f"{fence(fix['code'])}python", *fix["code"].splitlines(), fence(fix["code"])]
    lines += [f"- Did not help: {wording.prose('{change} ({outcome}).'.format_map(fix))}" for fix in shown["tried"]]
    if diagnosis.note is not None:
        lines += ["", wording.prose(shown["note"])]
    if diagnosis.links:
        lines += ["", f"See also {', '.join(diagnosis.links)}."]
    return "\n".join(lines)


def page(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain text, in which parts in backticks are code; only links to web addresses are kept."""
    return {
        "known": diagnosis.is_known,
        "title": _safe(diagnosis.title),
        "sure": _SURE.get(diagnosis.confidence, diagnosis.confidence),
        "mechanism": _safe(diagnosis.mechanism),
        "evidence": [_safe(line) for line in diagnosis.evidence],
        "advice": _safe(diagnosis.advice),
        "links": [link for link in diagnosis.links if link.startswith("https://")],
        "also": [": ".join(map(_safe, (item.title, *item.evidence[:1]))) for item in diagnosis.also],
        "fix": _fix_data(diagnosis.fix) if diagnosis.fix is not None else None,
        "tried": [_fix_data(fix) for fix in diagnosis.tried],
        "note": _safe(diagnosis.note or ""),
    }


def one_line(diagnosis: Diagnosis) -> str:
    """The diagnosis in a line for a terminal."""
    if not diagnosis.is_known:
        return "none of the known causes fits"
    words = f"{diagnosis.title} ({diagnosis.confidence})"
    if diagnosis.fix is not None:
        made = _MADE[diagnosis.fix.is_plausible]
        words += f"; {made}: {_change(diagnosis.fix, with_places=False)} -> {diagnosis.fix.outcome}"
    return _safe(words)


def _fix_data(fix: Fix) -> dict[str, Any]:
    return {
        "intro": _TRIED[fix.is_plausible],
        "change": _change(fix),
        "outcome": _safe(fix.outcome),
        "code": redact_source(fix.code),
        "helped": fix.helped and fix.is_plausible is True,
    }


def _change(fix: Fix, *, with_places: bool = True) -> str:
    """The changes and their places, one part a change, each once."""
    parts = []
    for text, place in zip(fix.text, fix.where, strict=False):
        parts.append(f"{_safe(text)} ({wording.code_span(_safe(place))})" if place and with_places else _safe(text))
    return ", then ".join(dict.fromkeys(parts))


def _safe(text: str) -> str:
    return redact_text(" ".join(text.split()))
