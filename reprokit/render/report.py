"""The report: one HTML file that shows a failure, its repro and what surrounded it, without network or other files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from reprokit.render import charts, whatif, wording
from reprokit.render.environment import render_template
from reprokit.render.issue import rate, title
from reprokit.render.outline import Range, outline
from reprokit.render.script import Script
from reprokit.snapshot.redact import redact_text

if TYPE_CHECKING:
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot


def write_report(
    snapshot: Snapshot, script: Script, verified: VerifyResult, *, reduction: Reduction | None = None
) -> str:
    """The report's HTML."""
    failure = snapshot.failure
    return render_template(
        "report.html.j2",
        title=title(snapshot, reduction),
        headline=wording.headline(failure),
        sentence=with_code(redact_text(wording.observed(failure))),
        failure=failure,
        snapshot=snapshot,
        where=wording.phase_words(failure),
        script=script,
        rate=rate(verified),
        output=redact_text(verified.output or verified.signature).strip(),
        outline=outline(snapshot.program, snapshot.tensors, failure, snapshot.settings),
        chart=charts.loss_chart(snapshot.timeline, snapshot.step),
        reduction=reduction,
        explained=wording.explained(reduction, script.names) if reduction is not None else [],
        nearest=wording.nearest_words(reduction.nearest, script.names) if reduction and reduction.nearest else None,
        whatif_programs=whatif.programs(reduction.whatif) if reduction is not None else [],
        whatif_rows=whatif.rows(reduction.whatif) if reduction is not None else [],
        environment=_environment_rows(snapshot.environment),
        collect_env=redact_text(str(snapshot.environment.get("collect_env", ""))),
        source=_source_rows(snapshot),
        diff=redact_text(str(snapshot.source.get("diff") or "")),
        range_text=range_text,
        with_code=with_code,
    )


def with_code(text: str) -> Markup:
    """Text whose parts in backticks are shown as code."""
    return Markup(re.sub(r"(`+)\s?(.+?)\s?\1", r"<code>\2</code>", str(escape(text))))


def range_text(found: Range | None) -> str:
    """A range in a few words: ``float16 4x8, |x| 0.1 to 6.5e+04, 3 nan``."""
    if found is None:
        return "not reached"
    words = [f"{found.dtype} {'x'.join(map(str, found.shape)) or 'scalar'}"]
    if found.low is not None and found.high is not None:
        same = found.low == found.high
        words.append(f"|x| = {found.high:.4g}" if same else f"|x| {found.low:.4g} to {found.high:.4g}")
    words += [f"{count} {name}" for count, name in ((found.num_nan, "nan"), (found.num_inf, "inf")) if count]
    return ", ".join(words)


def _environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, environment.get(name)) for name in ("torch", "python", "platform", "cuda", "cudnn", "devices")]
    rows += sorted(environment.get("libraries", {}).items())
    rows += sorted(environment.get("variables", {}).items())
    rows += [(name.replace("_", " "), value) for name, value in environment.get("switches", {}).items()]
    return [(name, redact_text(_plain(value))) for name, value in rows if value not in (None, [], "")]


def _source_rows(snapshot: Snapshot) -> list[tuple[str, str]]:
    source = snapshot.source
    command = source.get("command") or snapshot.command
    rows: list[tuple[str, Any]] = [("command", " ".join(command) or None)]
    rows += [(name, source.get(name)) for name in ("file", "commit", "branch", "remote", "dirty")]
    return [(name, redact_text(_plain(value))) for name, value in rows if value is not None]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
