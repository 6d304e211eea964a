"""The report: one HTML file that shows a failure, its repro and what surrounded it, without network or other files.

The page shows ranges and positions of tensors, never their contents; what is long is cut where it shows. Everything
that came from the user's machine is redacted again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from reprokit.locate.ranges import range_text
from reprokit.locate.ways import MINUS, NAN, PLUS
from reprokit.render import diagnosis_text, facts, whatif_text, wording
from reprokit.render.bad_value_path import ways
from reprokit.render.call_code import labels
from reprokit.render.drawings import HeatCell, heat_map, plot
from reprokit.render.issue import cut, rate, shown_output, title_of
from reprokit.render.module_ranges import calls_in_frames, frames
from reprokit.render.script import Script
from reprokit.render.survey import survey
from reprokit.render.templates import render_template
from reprokit.render.verify import VerifyResult
from reprokit.series import by_optimizer, titled
from reprokit.shrink.reduction import Reduction, WhatIfResult
from reprokit.snapshot.format import Snapshot, count_elements
from reprokit.snapshot.redact import redact_text
from reprokit.story import QUANTITIES, by_layer
from reprokit.words import counted, number_words, verdict_words

TEMPLATE = "report.html.j2"
MAX_TEXT = 30_000
MAX_OPERANDS = 20
MAX_LAYERS = 24  # rows of a heat map that fit on a screen
_CLASSES = {NAN: "bad-nan", PLUS: "bad-plus", MINUS: "bad-minus"}  # of the style sheet
_SERIES = (("loss", "Loss"), ("grad_norm", "Gradient norm"), ("lr", "Learning rate"), ("scale", "Loss scale"))


class Chart(NamedTuple):
    """A plot with its heading and its last number."""

    title: str
    svg: Markup
    note: str


def write_report(
    snapshot: Snapshot,
    script: Script,
    verified: VerifyResult,
    *,
    reduction: Reduction | None = None,
    title: str | None = None,
) -> str:
    """The report's HTML; ``title`` is that of the issue where one was made."""
    failure, names = snapshot.failure, labels(snapshot.program)
    shown = calls_in_frames(snapshot.program, failure)
    bad = names.get(failure.value, "the tensor") if failure.value is not None else "the tensor"
    bad = f"gradient of {bad}" if failure.is_derivative else bad
    found = survey(snapshot, bad, shown if failure.call_index is not None else None)
    shown_frames, frames_left_out = frames(found)
    error = found.error
    operands = [(names.get(value, "x"), range_) for value, range_ in found.operands.items()]
    log = "\n".join(map(str, reduction.log)) if reduction is not None else ""
    texts = {
        "output": shown_output(verified),
        "log": wording.renamed(log, script.names),
        "collect_env": snapshot.environment.collect_env,
        "diff": snapshot.source.diff,
    }
    tables = reduction.whatif if reduction is not None else WhatIfResult()
    reason = reduction.diagnosis if reduction is not None else None
    layer_steps = sorted({row.step for row in snapshot.layers or ()})
    content = {
        "title": title if title is not None else title_of(snapshot, reduction),
        "headline": wording.headline(failure),
        "story": sentences(snapshot, reduction, verified),
        "facts": facts.of_failure(snapshot),
        "step": snapshot.step,
        "script": script,
        "rate": rate(verified),
        "trouble": redact_text(f"{type(error).__name__}: {error}".splitlines()[0]) if error is not None else "",
        "ways": ways(found, names),
        "exception": failure.exception[0] if failure.exception is not None else "",
        "operands": sorted(operands, key=lambda pair: not pair[1].is_bad)[:MAX_OPERANDS],
        "operands_left_out": max(0, len(operands) - MAX_OPERANDS),
        "positions": found.positions,
        "way_classes": _CLASSES,
        "layers": list(_layers(snapshot, layer_steps)),
        "layer_steps": layer_steps,
        "timeline": list(_timeline(snapshot)),
        "frames": shown_frames,
        "frames_left_out": frames_left_out,
        "reduction": reduction,
        "diagnosis": diagnosis_text.page(reason) if reason is not None else None,
        "whatif_programs": whatif_text.programs(tables),
        "whatif_rows": whatif_text.rows(tables, script.names),
        "environment": [*facts.versions(snapshot.environment), *facts.settings(snapshot.environment)],
        "source": facts.source(snapshot),
        "texts": {name: cut(redact_text(text), MAX_TEXT) for name, text in texts.items()},
        "num_variables": len(snapshot.environment.variables),
        "range_text": range_text,
        "with_code": with_code,
        **(_of_reduction(reduction, script) if reduction is not None else {}),
    }
    return render_template(TEMPLATE, **content)


def _of_reduction(reduction: Reduction, script: Script) -> dict[str, Any]:
    inputs = wording.shown_names(reduction, script.names)
    return {
        "num_calls": reduction.program.num_calls,
        "verdicts": verdict_words(reduction.verdicts),
        "num_elements": count_elements(reduction.program, reduction.tensors),
        "explained": wording.explained(reduction, inputs),
        "nearest": wording.nearest_words(reduction.nearest, inputs) if reduction.nearest else None,
    }


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are shown as code."""
    return Markup(re.sub(r"(`+)\s?(.+?)\s?\1", r"<code>\2</code>", str(escape(text))))


def _timeline(snapshot: Snapshot) -> Iterator[Chart]:
    for (key, what), (optimizer, rows) in itertools.product(_SERIES, by_optimizer(snapshot.timeline).items()):
        name = titled(what, redact_text(optimizer))
        points = [(float(row.step), getattr(row, key)) for row in rows]
        svg = plot(points, f"{name} per step, with the failing step marked", mark=float(snapshot.step))
        if svg is not None:
            last = next(value for _, value in reversed(points) if value is not None)
            yield Chart(name, svg, f"last {number_words(last, 4)}")


def _layers(snapshot: Snapshot, steps: Sequence[int]) -> Iterator[tuple[str, list[tuple[str, list[HeatCell]]]]]:
    for quantity, name in QUANTITIES.items():
        series = by_layer(snapshot.layers or [], quantity, snapshot.end_of_story, MAX_LAYERS)
        if len(steps) > 1 and series:
            yield f"{name[:1].upper()}{name[1:]}", list(heat_map(series, steps))


def sentences(snapshot: Snapshot, reduction: Reduction | None, verified: VerifyResult) -> list[str]:
    """The paragraph, sentence by sentence, in Markdown."""
    return [*_failure(snapshot), *_size(snapshot, reduction), rate(verified)]


def _failure(snapshot: Snapshot) -> Iterator[str]:
    failure = snapshot.failure
    if facts.story(snapshot):
        yield facts.story(snapshot)
    said = wording.observed(failure)
    yield f"It happened at {facts.when(snapshot)} of the training run, {facts.where(snapshot)}. {said}"
    if facts.how_much(failure):
        yield f"{facts.how_much(failure)}."
    if facts.noticed_in(snapshot):
        yield f"It was noticed in {facts.noticed_in(snapshot)}."
    if facts.doubt(snapshot):
        yield facts.doubt(snapshot)


def _size(snapshot: Snapshot, reduction: Reduction | None) -> Iterator[str]:
    if reduction is None or reduction.no_repro:
        yield f"The captured step has {counted(snapshot.program.num_calls, 'torch call')}; it was not reduced."
        return
    before, after = reduction.before, reduction.program.num_calls
    elements = count_elements(reduction.program, reduction.tensors)
    verb = "is" if after == 1 else "are"
    yield (
        f"Of {counted(before.calls, 'torch call')} on {counted(before.elements, 'input element')}, "
        f"{counted(after, 'call')} on {counted(elements, 'element')} {verb} enough to show it."
    )
    said = wording.message(reduction.failure)
    if said and said != wording.message(snapshot.failure):
        yield f"With these the message is: {said}."
