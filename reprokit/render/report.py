"""The report: one HTML file that shows a failure, its repro and what surrounded it, without network or other files.

The page shows ranges and positions of tensors, never their contents; what is long is cut where it shows. Everything
that came from the user's machine is redacted again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from reprokit.locate.failure import Failure
from reprokit.locate.ranges import Range, range_text
from reprokit.render import diagnosis_text, drawings, facts, whatif_text, wording
from reprokit.render.bad_value_path import calls_on_ways, ways
from reprokit.render.call_code import labels
from reprokit.render.drawings import heat_map, plot
from reprokit.render.issue import cut, rate, shown_output, title_of
from reprokit.render.module_ranges import calls_in_frames, frames
from reprokit.render.script import Script
from reprokit.render.survey import Survey, survey
from reprokit.render.templates import render_template
from reprokit.render.verify import VerifyResult
from reprokit.series import by_optimizer, titled
from reprokit.shrink.reduction import Reduction, WhatIfResult
from reprokit.snapshot.format import Snapshot, count_elements
from reprokit.snapshot.redact import REDACTED, redact_text
from reprokit.story import QUANTITIES, by_layer
from reprokit.words import counted, number_words, verdict_words

TEMPLATE = "report.html.j2"
MAX_TEXT = 30_000
MAX_OPERANDS = 20
MAX_LAYERS = 24  # rows of a heat map that fit on a screen
_SERIES = (("loss", "Loss"), ("grad_norm", "Gradient norm"), ("lr", "Learning rate"), ("scale", "Loss scale"))


class Chart(NamedTuple):
    """A drawing with its heading and what it ends at."""

    title: str
    svg: Markup
    note: str


class Remaining(NamedTuple):
    """The size of the program after a number of checks."""

    checks: float
    calls: float
    elements: float


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
    shown = calls_in_frames(snapshot.program, failure).union(calls_on_ways(snapshot.program, failure))
    found = survey(snapshot, _bad_name(failure, names), shown if failure.call_index is not None else None)
    shown_frames, frames_left_out = frames(found)
    texts = _long_texts(snapshot, script, verified, reduction)
    tables = reduction.whatif if reduction is not None else WhatIfResult()
    reason = reduction.diagnosis if reduction is not None else None
    content = {
        "title": title if title is not None else title_of(snapshot, reduction),
        "headline": wording.headline(failure),
        "story": sentences(snapshot, reduction, verified),
        "facts": facts.of_failure(snapshot),
        "step": snapshot.step,
        "script": script,
        "rate": rate(verified),
        "trouble": _trouble(found),
        "ways": ways(found, names),
        "drawings": drawings,
        "exception": failure.exception[0] if failure.exception is not None else "",
        "operands": _operands(found.operands, names),
        "operands_left_out": max(0, len(found.operands) - MAX_OPERANDS),
        "positions": found.positions,
        "layers": list(_layers(snapshot)),
        "timeline": list(_timeline(snapshot)),
        "frames": shown_frames,
        "frames_left_out": frames_left_out,
        "reduction": reduction,
        "diagnosis": diagnosis_text.page(reason) if reason is not None else None,
        "whatif_programs": whatif_text.programs(tables),
        "whatif_rows": whatif_text.rows(tables, script.names),
        "environment": [*facts.versions(snapshot.environment), *facts.settings(snapshot.environment)],
        "source": facts.source(snapshot),
        "texts": texts,
        "num_variables": len(snapshot.environment.variables),
        "range_text": range_text,
        "with_code": with_code,
        **(_of_reduction(reduction, script) if reduction is not None else {}),
    }
    page = render_template(TEMPLATE, **content, redacted=[])
    hidden = _redacted(texts, page)
    return render_template(TEMPLATE, **content, redacted=hidden) if hidden else page


def _of_reduction(reduction: Reduction, script: Script) -> dict[str, Any]:
    inputs = wording.shown_names(reduction, script.names)
    return {
        "num_calls": reduction.program.num_calls,
        "verdicts": verdict_words(reduction.verdicts),
        "num_elements": count_elements(reduction.program, reduction.tensors),
        "progress": list(_progress(reduction)),
        "explained": wording.explained(reduction, inputs),
        "nearest": wording.nearest_words(reduction.nearest, inputs) if reduction.nearest else None,
    }


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are shown as code."""
    return Markup(re.sub(r"(`+)\s?(.+?)\s?\1", r"<code>\2</code>", str(escape(text))))


def _bad_name(failure: Failure, names: Mapping[int, str]) -> str:
    """The name of the bad tensor."""
    name = names.get(failure.value, "the tensor") if failure.value is not None else "the tensor"
    return f"gradient of {name}" if failure.is_derivative else name


def _operands(operands: Mapping[int, Range], names: Mapping[int, str]) -> list[tuple[str, Range]]:
    """The first operands, those that are not finite before the others."""
    named = [(names.get(value, "x"), found) for value, found in operands.items()]
    return sorted(named, key=lambda pair: not pair[1].is_bad)[:MAX_OPERANDS]


def _timeline(snapshot: Snapshot) -> Iterator[Chart]:
    """One chart for every number that an optimizer had in at least two steps."""
    for (key, what), (optimizer, rows) in itertools.product(_SERIES, by_optimizer(snapshot.timeline).items()):
        name = titled(what, redact_text(optimizer))
        points = [(float(row.step), getattr(row, key)) for row in rows]
        svg = plot(points, f"{name} per step, with the failing step marked", mark=float(snapshot.step))
        if svg is not None:
            last = next(value for _, value in reversed(points) if value is not None)
            yield Chart(name, svg, f"last {number_words(last, 4)}")


def _layers(snapshot: Snapshot) -> Iterator[Chart]:
    """A heat map of layers over steps for every quantity that was measured."""
    rows = snapshot.layers or []
    steps = sorted({row.step for row in rows})
    for quantity, name in QUANTITIES.items():
        series = by_layer(rows, quantity, snapshot.end_of_story, MAX_LAYERS)
        if len(steps) > 1 and series:
            title = f"{name[:1].upper()}{name[1:]}"
            yield Chart(title, heat_map(series, steps, title), f"steps {steps[0]:,} to {steps[-1]:,}")


def _progress(reduction: Reduction) -> Iterator[Chart]:
    """The number of calls and of elements left after so many checks."""
    steps = progress(reduction)
    for name, place in (("Calls left", 1), ("Elements left", 2)):
        svg = plot([(step.checks, step[place]) for step in steps], f"{name} against checks", is_stepped=True)
        if svg is not None:
            yield Chart(name, svg, f"{steps[0][place]:,.0f} to {steps[-1][place]:,.0f}")


def _trouble(found: Survey) -> str:
    """Why the step could not be measured to its end, redacted; nothing where it could."""
    error = found.error
    return redact_text(f"{type(error).__name__}: {error}".splitlines()[0]) if error is not None else ""


def _long_texts(
    snapshot: Snapshot, script: Script, verified: VerifyResult, reduction: Reduction | None
) -> dict[str, str]:
    """Texts that may be long, redacted and cut where it shows."""
    texts = {
        "output": shown_output(script, verified),
        "log": wording.renamed("\n".join(reduction.log), script.names) if reduction is not None else "",
        "collect_env": snapshot.environment.collect_env,
        "diff": snapshot.source.diff,
    }
    return {name: cut(redact_text(text), MAX_TEXT) for name, text in texts.items()}


def _redacted(texts: Mapping[str, str], page: str) -> list[tuple[str, int]]:
    """The texts with redacted parts, and the number of these."""
    words = {"output": "output of the repro", "log": "log", "collect_env": "collect_env", "diff": "uncommitted changes"}
    counts = {words[name]: _num_hidden(text) for name, text in texts.items()}
    counts["rest of the page"] = _num_hidden(page) - sum(counts.values())
    return [(name, count) for name, count in counts.items() if count > 0]


def _num_hidden(text: str) -> int:
    return len(re.findall(rf"(?<!\*){re.escape(REDACTED)}(?!\*)", text))


_LINE = re.compile(r"(\d+): .*: ([\d,]+) calls?, ([\d,]+) elements?$", re.DOTALL)


def progress(reduction: Reduction) -> list[Remaining]:
    """From the whole step to the minimum, one for every change of size; empty when nothing was kept."""
    lines = [match for line in reduction.log if (match := _LINE.match(line))]
    if not lines:
        return []
    before = reduction.before
    steps = [Remaining(0, before.calls, before.elements)]
    for line in lines:
        calls, elements = (int(number.replace(",", "")) for number in line.groups()[1:])
        if (calls, elements) != (steps[-1].calls, steps[-1].elements):
            steps.append(Remaining(int(line[1]), calls, elements))
    return [*steps, Remaining(max(reduction.checks, int(lines[-1][1])), steps[-1].calls, steps[-1].elements)]


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
    if reduction is None:
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
