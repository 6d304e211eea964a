"""The texts of a failure in Markdown: a summary of a dozen lines for a colleague, an issue for a maintainer.

An issue has on its first screen what a maintainer wants, everything else is folded away. Nothing is ever submitted by
the tool: the text has a slot for the reporter's own words and says that the reduction was mechanical. What came from
the user's machine is redacted again here, and a text that would be too long is cut visibly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.render import facts as rows
from reprokit.render import findings, wording
from reprokit.render.expectation import OWN
from reprokit.render.facts import Facts
from reprokit.render.templates import Template, fence, find_template, render_template, tidied
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_source, redact_text, shorten_paths
from reprokit.whatif import MINIMUM
from reprokit.words import counted

MAX_CHARACTERS = 65_536
MAX_SCRIPT_LINES = 40
MAX_OUTPUT_CHARACTERS = 2_000
MAX_SUMMARY_CODE = 4  # lines of a fix, so that a summary has at most 15
_CUT_ORDER = ("log", "versions", "traceback", "module", "output", "variants", "script")


@dataclass(frozen=True, slots=True)
class Issue:
    """An issue ready to be finished by a person; ``repository`` is where it belongs, ``None`` when unknown."""

    title: str
    text: str
    template: str
    repository: str | None


def make_issue(facts: Facts, *, template: str | None = None, context: str = "", no_module: str = "") -> Issue:
    """The issue in a template: a name, the path of a Jinja file or folder, or the one of whose code it is about.

    ``context`` is the text of the script beside the repro, the piece of the model that the failure comes from;
    ``no_module`` says why there is none.
    """
    snapshot, expectation, script, reduction = facts.snapshot, facts.expectation, facts.script, facts.reduction
    chosen = find_template(template or expectation.template)
    parts = {
        "title": facts.title,
        "observed": _sentences(wording.renamed(expectation.observed, facts.names_of_data), facts.given),
        "expected": expectation.expected,
        "remark": _sentences(wording.renamed(expectation.remark, facts.names_of_data), facts.retry),
        "rate": _sentences(facts.rate, rows.doubt(snapshot)),
        "origin": _origin(snapshot),
        "story": _sentences(rows.led_to(snapshot), rows.story(snapshot), _samples(facts)),
        "size": facts.size,
        "matters": "",
        "no_module": no_module,
    }
    if reduction is not None:
        inputs = wording.shown_names(reduction, script.names)
        parts["matters"] = redact_source(wording.what_matters(reduction, inputs))
    shown: dict[str, Any] = {name: wording.prose(shorten_paths(str(text))) for name, text in parts.items()}
    shown |= {
        "title": facts.title,
        "owner": expectation.owner,
        "is_upstream": expectation.owner != OWN,
        "files": script.files,
        "is_long": script.text.rstrip().count("\n") >= MAX_SCRIPT_LINES,
        "verified": facts.verified,
        "reduced": reduction is not None,
        "environment": _lines(rows.versions(snapshot.environment)),
        "libraries": {name: wording.prose(text) for name, text in rows.libraries(snapshot.environment)},
    }
    text = _fitted(chosen, shown, _long_texts(facts, context))
    return Issue(facts.title, text, chosen.name, chosen.repository or _own_repository(snapshot))


def write_summary(facts: Facts, no_module: str = "") -> str:
    """What failed, where, in which rows, since when, why and the fix, in at most 15 lines."""
    snapshot, found, script = facts.snapshot, facts.diagnosis, facts.script
    since = [rows.when(snapshot), rows.story(snapshot), rows.learning_rate(snapshot), rows.doubt(snapshot)]
    fix, code = (found["advice"], "") if found is not None else ("", "")
    if found is not None and found["fix"] is not None:
        fix, code = "{intro}: {change}. Then: {outcome}.".format_map(found["fix"]), found["fix"]["code"]
    beside = f" (with `{'`, `'.join(script.files[1:])}` beside it)" if len(script.files) > 1 else ""
    how = f"`python repro.py`{beside}, {counted(script.num_lines, 'line')}." if not script.reason else ""
    parts = {
        "cause": rows.led_to(snapshot),
        "where": f"{rows.where(snapshot)}{f', at {line}' if (line := wording.line(snapshot.failure)) else ''}",
        "which": wording.renamed(_sentences(facts.which, facts.given), facts.names_of_data),
        "since": ". ".join(part.removesuffix(".") for part in since if part),
        "why": f"{found['mechanism'].removesuffix('.')} ({found['sure']})." if found is not None else "",
        "fix": fix,
        "fix_word": "Fix" if found is None or found["fix"] is None or found["fix"]["is_offered"] else "Also tried",
        "repro": _sentences(
            how, facts.rate, f"There is no `repro_module.py`: {no_module}." if no_module else "", facts.retry
        ),
        "title": facts.title,
    }
    shown = {name: wording.prose(shorten_paths(redact_text(text))) for name, text in parts.items()}
    code = redact_source(code) if len(code.splitlines()) <= MAX_SUMMARY_CODE else ""
    return tidied(render_template("summary.md.j2", code=code, fence=fence(code), **shown))


def _sentences(*found: str) -> str:
    return " ".join(filter(None, found))


def cut(text: str, limit: int) -> str:
    """The beginning of a text that is too long, and a line with the number of characters left out."""
    if len(text) <= limit:
        return text
    kept = text[: max(0, limit - 60)]
    return f"{kept}\n... cut here, {len(text) - len(kept)} characters left out\n"[:limit]


def _long_texts(facts: Facts, context: str) -> dict[str, str]:
    environment, reduction = facts.snapshot.environment, facts.reduction
    found, verified = facts.diagnosis, facts.verified
    collected = redact_text(environment.collect_env.strip())
    libraries = f"{collected}\n\n{_lines(rows.libraries(environment))}"
    names, errors = facts.script.names, verified.error_output.rstrip() if verified.output.strip() else ""
    return {
        "script": facts.script.text.rstrip(),
        "output": cut(shorten_paths(redact_text(facts.output)), MAX_OUTPUT_CHARACTERS),
        "traceback": shorten_paths(redact_text(errors)),
        "versions": (libraries if collected else _lines(rows.versions(environment))).strip(),
        "log": facts.log,
        "variants": findings.table_markdown(reduction.whatif, MINIMUM, names) if reduction is not None else "",
        "diagnosis": wording.renamed(shorten_paths(findings.markdown(found)), facts.names_of_data) if found else "",
        "module": context.rstrip(),
    }


def _lines(found: Iterable[rows.Fact]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in found)


def _origin(snapshot: Snapshot) -> str:
    place = f", at {wording.line(snapshot.failure)}" if snapshot.failure.site is not None else ""
    around = dict(rows.surroundings(snapshot))
    process = f" on {around['process']} processes" if "process" in around else ""
    compiled = f" (compiled: {around['compiled']})" if "compiled" in around else ""
    return f"{rows.when(snapshot)} of a training run{process}{compiled}, {rows.where(snapshot)}{place}"


def _samples(facts: Facts) -> str:
    """The samples of the batch, for a reader who has the data set."""
    words = rows.sample_words(facts.snapshot) if facts.expectation.owner == OWN else ""
    return f"{words[:1].upper()}{words[1:]} of the data set." if words else ""


def _own_repository(snapshot: Snapshot) -> str | None:
    """The user's own repository on GitHub, as ``owner/name``."""
    _, found, path = (snapshot.source.remote or "").replace(":", "/").partition("github.com/")
    parts = path.removesuffix("/").removesuffix(".git").split("/")
    return "/".join(parts) if found and len(parts) == 2 and all(parts) else None


def _fitted(template: Template, context: Mapping[str, Any], long_texts: Mapping[str, str]) -> str:
    texts = dict(long_texts)
    rendered = template.render({**context, **texts})
    for name in _CUT_ORDER:
        excess = len(rendered) - MAX_CHARACTERS
        if excess <= 0:
            break
        if texts[name]:
            texts[name] = cut(texts[name], max(200, len(texts[name]) - excess - 80))
            rendered = template.render({**context, **texts})
    return cut(rendered, MAX_CHARACTERS)
