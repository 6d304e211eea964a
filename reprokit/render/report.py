"""The report: one HTML file that shows a failure, its repro and what surrounded it, without network or other files.

The page shows ranges and positions of tensors, never their contents; what is long is cut where it shows. Everything
that came from the user's machine is redacted again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from reprokit.locate.ranges import range_text
from reprokit.locate.ways import MINUS, NAN, PLUS
from reprokit.program.step import Step
from reprokit.render import facts as rows
from reprokit.render import findings, wording
from reprokit.render.facts import Facts
from reprokit.render.issue import cut
from reprokit.render.module_ranges import frames
from reprokit.render.survey import ways
from reprokit.render.templates import render_template
from reprokit.series.story import QUANTITIES, LayerSeries, by_layer, by_optimizer, titled
from reprokit.shrink.reduction import WhatIfResult
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, number_words, verdict_words

_LOG_RATIO = 100.0  # from which on a scale is logarithmic
_HUGE = 1e300  # a larger number is drawn here, because its distance to other numbers may overflow
_WIDTH, _HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 348, 12, 128  # the drawing area inside the labels
_HEAT_LEVELS = 8  # classes `heat-1` to `heat-8` of the style sheet; `heat-0` is zero

Point = tuple[float, float | None]


class Scale(NamedTuple):
    """The two ends of an axis."""

    low: float
    high: float
    is_logarithmic: bool

    @classmethod
    def over(cls, numbers: Sequence[float]) -> Scale:
        """A scale for these, logarithmic where they are positive and span two decades."""
        low, high = min(numbers), max(numbers)
        return cls(low, high, low > 0 and high / low > _LOG_RATIO)

    def fraction(self, value: float) -> float:
        """0 at the low end, 1 at the high end, one half where they are equal."""
        ends = (self.low, self.high, value)
        low, high, here = map(math.log10, ends) if self.is_logarithmic else ends
        return (here - low) / (high - low) if high > low else 0.5


def plot(points: Sequence[Point], label: str, *, mark: float) -> Markup | None:
    """Numbers over steps as a line; ``mark`` is the step that failed.

    A step with a NaN or an infinity is a cross at the upper edge, one with ``None`` a gap. ``None`` when there are not
    two finite numbers.
    """
    finite = [(x, max(-_HUGE, min(y, _HUGE))) for x, y in points if y is not None and math.isfinite(y)]
    if len(finite) < 2:
        return None
    steps = [mark, *(x for x, y in points if y is not None)]
    across, up = Scale(min(steps), max(steps), False), Scale.over([y for _, y in finite])

    def x_of(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * across.fraction(step)

    def y_of(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * up.fraction(value)

    marks = [
        _text(_LEFT - 6, y_of(value) + 3.5, "end", number_words(value, 4)) for value in dict.fromkeys((up.low, up.high))
    ]
    marks += [
        _text(x_of(step), _HEIGHT - 6, "middle", f"{step:,.0f}") for step in dict.fromkeys((across.low, across.high))
    ]
    marks.append(f'<line class="failing" x1="{x_of(mark):.1f}" x2="{x_of(mark):.1f}" y1="4" y2="{_BOTTOM}"/>')
    line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in finite)
    marks.append(f'<polyline class="line" points="{line}"/>')
    marks += [_text(x_of(x), _TOP, "middle", "×", "cross") for x, y in points if y is not None and not math.isfinite(y)]
    return Markup(
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str, cls: str = "tick") -> str:
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


class HeatCell(NamedTuple):
    """A number of a layer in a step: its class in the style sheet, and its text."""

    cls: str
    hint: str


def heat_map(rows: Sequence[LayerSeries], steps: Sequence[int]) -> Iterator[tuple[str, list[HeatCell]]]:
    """The layers with a cell for every step: the darker the larger on a logarithmic scale, red if not finite."""
    finite = [abs(v) for row in rows for v in row.values if v and math.isfinite(v)]
    scale = Scale(min(finite), max(finite), is_logarithmic=True) if finite else None
    for row in rows:
        named = zip(steps, row.values, strict=True)
        yield row.module, [HeatCell(_heat_class(v, scale), "" if v is None else f"step {s}: {v:.4g}") for s, v in named]


def _heat_class(value: float | None, scale: Scale | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "heat-bad"
    if not value or scale is None:
        return "heat-0"
    return f"heat-{1 + min(int(scale.fraction(abs(value)) * _HEAT_LEVELS), _HEAT_LEVELS - 1)}"


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


def write_report(facts: Facts) -> str:
    """The report's HTML."""
    snapshot, reduction, script, found = facts.snapshot, facts.reduction, facts.script, facts.survey
    shown_frames, frames_left_out = frames(found)
    texts = {
        "output": facts.output,
        "log": facts.log,
        "collect_env": snapshot.environment.collect_env,
        "diff": snapshot.source.diff,
    }
    tables = reduction.whatif if reduction is not None else WhatIfResult()
    steps = sorted({row.step for row in snapshot.layers or ()})
    layers = []
    for quantity, name in QUANTITIES.items():
        series = by_layer(snapshot.layers or [], quantity, snapshot.end_of_story, MAX_LAYERS)
        if len(steps) > 1 and series:
            layers.append((f"{name[:1].upper()}{name[1:]}", list(heat_map(series, steps))))
    error = found.error
    inputs = wording.shown_names(reduction, script.names) if reduction is not None else {}
    content = {
        "title": facts.title,
        "headline": wording.headline(snapshot.failure),
        "story": sentences(facts),
        "facts": rows.of_failure(snapshot),
        "step": snapshot.step,
        "script": script,
        "rate": facts.rate,
        "trouble": redact_text(f"{type(error).__name__}: {error}".splitlines()[0]) if error is not None else "",
        "ways": ways(found, facts.names),
        "exception": snapshot.failure.exception[0] if snapshot.failure.exception is not None else "",
        "operands": sorted(facts.operands, key=lambda pair: not pair[1].is_bad)[:MAX_OPERANDS],
        "operands_left_out": max(0, len(facts.operands) - MAX_OPERANDS),
        "positions": found.positions,
        "way_classes": _CLASSES,
        "layers": layers,
        "layer_steps": steps,
        "timeline": list(_timeline(snapshot)),
        "frames": shown_frames,
        "frames_left_out": frames_left_out,
        "reduction": reduction if reduction is not None and not reduction.no_repro else None,
        "diagnosis": facts.diagnosis,
        "whatif_programs": findings.programs(tables),
        "whatif_rows": findings.rows(tables, script.names),
        "environment": [*rows.versions(snapshot.environment), *rows.settings(snapshot.environment)],
        "source": rows.source(snapshot),
        "texts": {name: cut(redact_text(text), MAX_TEXT) for name, text in texts.items()},
        "num_variables": len(snapshot.environment.variables),
        "range_text": range_text,
        "with_code": with_code,
        "num_elements": Step.of(reduction).num_elements if reduction is not None else 0,
        "verdicts": verdict_words(reduction.verdicts) if reduction is not None else "",
        "explained": wording.explained(reduction, inputs) if reduction is not None else [],
        "nearest": wording.nearest_words(reduction.nearest, inputs) if reduction and reduction.nearest else None,
    }
    return render_template(TEMPLATE, **content)


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are shown as code."""
    return Markup(re.sub(r"(`+)\s?(.+?)\s?\1", r"<code>\2</code>", str(escape(text))))


def _timeline(snapshot: Snapshot) -> Iterator[Chart]:
    for (key, what), (optimizer, numbers) in itertools.product(_SERIES, by_optimizer(snapshot.timeline).items()):
        name = titled(what, redact_text(optimizer))
        points = [(float(row.step), getattr(row, key)) for row in numbers]
        svg = plot(points, f"{name} per step, with the failing step marked", mark=float(snapshot.step))
        if svg is not None:
            last = next(value for _, value in reversed(points) if value is not None)
            yield Chart(name, svg, f"last {number_words(last, 4)}")


def sentences(facts: Facts) -> list[str]:
    """The paragraph, sentence by sentence, in Markdown."""
    snapshot, reduction, failure = facts.snapshot, facts.reduction, facts.snapshot.failure
    happened = f"It happened at {rows.when(snapshot)} of the training run, {rows.where(snapshot)}."
    noticed = f"It was noticed in {rows.noticed_in(snapshot)}." if rows.noticed_in(snapshot) else ""
    bad = f"{rows.how_much(failure)}." if rows.how_much(failure) else ""
    found = [
        rows.story(snapshot),
        happened,
        facts.expectation.observed,
        facts.given,
        bad,
        noticed,
        rows.doubt(snapshot),
    ]
    size = f"The captured step has {counted(snapshot.program.num_calls, 'torch call')}; it was not reduced."
    if reduction is not None and not reduction.no_repro:
        before, after = reduction.before, reduction.program.num_calls
        verb, elements = "is" if after == 1 else "are", counted(Step.of(reduction).num_elements, "element")
        size = (
            f"Of {counted(before.calls, 'torch call')} on {counted(before.elements, 'input element')}, "
            f"{counted(after, 'call')} on {elements} {verb} enough to show it."
        )
    return [*filter(None, found), size, facts.rate]
