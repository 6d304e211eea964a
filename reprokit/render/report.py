"""The report: one HTML file that shows a failure, its repro and what surrounded it, without network or other files.

The page shows ranges and positions of tensors, never their contents; what is long is cut where it shows. Everything
that came from the user's machine is redacted again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from markupsafe import Markup, escape

from reprokit.locate.ranges import range_text
from reprokit.locate.ways import MINUS, NAN, PLUS
from reprokit.program.step import Step
from reprokit.render import facts as rows
from reprokit.render import findings, wording
from reprokit.render.charts import Chart, chart, heat_map
from reprokit.render.facts import Facts
from reprokit.render.issue import cut
from reprokit.render.kinds import words_of
from reprokit.render.module_ranges import frames
from reprokit.render.survey import ways
from reprokit.render.templates import render_template
from reprokit.series.story import QUANTITIES, by_layer, by_optimizer, titled
from reprokit.shrink.reduction import WhatIfResult
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, verdict_words

TEMPLATE = "report.html.j2"
MAX_TEXT = 30_000
MAX_OPERANDS = 20
MAX_LAYERS = 24  # rows of a heat map that fit on a screen
_CLASSES = {NAN: "bad-nan", PLUS: "bad-plus", MINUS: "bad-minus"}  # of the style sheet
_SERIES = (("loss", "Loss"), ("grad_norm", "Gradient norm"), ("lr", "Learning rate"), ("scale", "Loss scale"))


def write_report(facts: Facts) -> str:
    """The report's HTML."""
    snapshot, reduction, found = facts.snapshot, facts.reduction, facts.survey
    tables = reduction.whatif if reduction is not None else WhatIfResult()
    steps = sorted({row.step for row in snapshot.layers or ()})
    layers = []
    for quantity, name in QUANTITIES.items():
        series = by_layer(snapshot.layers or [], quantity, snapshot.end_of_story, MAX_LAYERS)
        if len(steps) > 1 and series:
            layers.append((f"{name[:1].upper()}{name[1:]}", list(heat_map(series, steps))))
    error = found.error
    content = {
        "facts": facts,
        "rows": rows,
        "wording": wording,
        "headline": words_of(snapshot.failure).headline,
        "story": sentences(facts),
        "trouble": redact_text(f"{type(error).__name__}: {error}".splitlines()[0]) if error is not None else "",
        "ways": ways(found, facts.names),
        "operands": sorted(facts.operands, key=lambda pair: not pair[1].is_bad),
        "most_operands": MAX_OPERANDS,
        "way_classes": _CLASSES,
        "layers": layers,
        "layer_steps": steps,
        "timeline": list(_timeline(snapshot)),
        "frames": frames(found),
        "whatif_programs": list(tables.tables or {}),
        "whatif_rows": findings.rows(tables, facts.script.names),
        "shown": lambda text: cut(redact_text(text), MAX_TEXT),
        "range_text": range_text,
        "with_code": with_code,
        "num_elements": Step.of(reduction).num_elements if reduction is not None else 0,
        "verdict_words": verdict_words,
    }
    return render_template(TEMPLATE, **content)


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are shown as code."""
    return Markup(re.sub(r"(`+)\s?(.+?)\s?\1", r"<code>\2</code>", str(escape(text))))


def _timeline(snapshot: Snapshot) -> Iterator[Chart]:
    for (key, what), (optimizer, numbers) in itertools.product(_SERIES, by_optimizer(snapshot.timeline).items()):
        points = [(float(row.step), getattr(row, key)) for row in numbers]
        found = chart(titled(what, redact_text(optimizer)), points, float(snapshot.step))
        if found is not None:
            yield found


def sentences(facts: Facts) -> list[str]:
    """The paragraph, sentence by sentence, in Markdown."""
    snapshot, reduction = facts.snapshot, facts.reduction
    happened = f"It happened at {rows.when(snapshot)} of the training run, {rows.where(snapshot)}."
    noticed = f"It was noticed in {rows.noticed_in(snapshot)}." if rows.noticed_in(snapshot) else ""
    bad = f"{rows.how_much(snapshot)}." if rows.how_much(snapshot) else ""
    found = [rows.led_to(snapshot), rows.story(snapshot), happened, facts.expectation.observed]
    found += [facts.given, bad, noticed, rows.doubt(snapshot)]
    size = f"The captured step has {counted(snapshot.program.num_calls, 'torch call')}; it was not reduced."
    if reduction is not None and not reduction.no_repro:
        before, after = reduction.before, reduction.program.num_calls
        verb, elements = "is" if after == 1 else "are", counted(Step.of(reduction).num_elements, "element")
        size = (
            f"Of {counted(before.calls, 'torch call')} on {counted(before.elements, 'input element')}, "
            f"{counted(after, 'call')} on {elements} {verb} enough to show it."
        )
    return [*filter(None, found), size, facts.rate]
