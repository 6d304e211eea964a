"""The text of an issue: what a maintainer wants on the first screen, everything else folded away.

Nothing is ever submitted by the tool: the text has a slot for the reporter's own words and says that the reduction was
mechanical. What came from the user's machine is redacted again here, and a text that would be too long is cut visibly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.program.step import Step
from reprokit.render import facts, findings, wording
from reprokit.render.expectation import OWN, Expectation, expect
from reprokit.render.names import in_users_words
from reprokit.render.script import Script
from reprokit.render.templates import Template, find_template
from reprokit.render.verify import VerifyResult
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_source, redact_text, shorten_paths
from reprokit.whatif import MINIMUM, home_of
from reprokit.words import counted

MAX_CHARACTERS = 65_536
MAX_SCRIPT_LINES = 40
MAX_OUTPUT_CHARACTERS = 2_000
_CUT_ORDER = ("log", "versions", "traceback", "module", "output", "variants", "script")
_PROSE = ("observed", "expected", "remark", "rate", "origin", "story", "size", "matters")


@dataclass(frozen=True, slots=True)
class Issue:
    """An issue ready to be finished by a person.

    ``repository`` is where it belongs, ``None`` when unknown.
    """

    title: str
    text: str
    template: str
    repository: str | None


def make_issue(
    snapshot: Snapshot,
    script: Script,
    verified: VerifyResult,
    *,
    reduction: Reduction | None = None,
    template: str | None = None,
    context: str = "",
) -> Issue:
    """The issue in a template: a name, the path of a Jinja file or folder, or the one of whose code it is about.

    ``context`` is the text of the script beside the repro, the piece of the model that the failure comes from.
    """
    snapshot = in_users_words(snapshot)
    expectation = expect(snapshot, reduction)
    chosen = find_template(template or expectation.template)
    long_texts = {**_long_texts(snapshot, script, verified, reduction), "module": context.rstrip()}
    matters = wording.what_matters(reduction, wording.shown_names(reduction, script.names)) if reduction else ""
    parts = {
        "title": title_of(snapshot, reduction, expectation),
        "observed": shorten_paths(wording.renamed(expectation.observed, _names_of_data(script, reduction))),
        "expected": shorten_paths(expectation.expected),
        "remark": shorten_paths(wording.renamed(expectation.remark, _names_of_data(script, reduction))),
        "owner": expectation.owner,
        "is_upstream": expectation.owner != OWN,
        "files": script.files,
        "is_long": script.num_shown_lines > MAX_SCRIPT_LINES,
        "verified": verified,
        "rate": " ".join(filter(None, (rate(verified), shorten_paths(facts.doubt(snapshot))))),
        "origin": shorten_paths(_origin(snapshot)),
        "story": shorten_paths(facts.story(snapshot)),
        "size": _size(snapshot, reduction),
        "reduced": reduction is not None,
        "matters": redact_source(matters),
        "environment": _lines(facts.versions(snapshot.environment)),
        "libraries": {name: wording.prose(text) for name, text in facts.libraries(snapshot.environment)},
    }
    parts |= {name: wording.prose(str(parts[name])) for name in _PROSE}
    text = _fitted(chosen, parts, long_texts)
    return Issue(str(parts["title"]), text, chosen.name, chosen.repository or _own_repository(snapshot))


def title_of(snapshot: Snapshot, reduction: Reduction | None = None, expectation: Expectation | None = None) -> str:
    """``softmax returns nan in Attention: a softmax over a fully masked row (float32, CPU, torch 2.13.0)``.

    The module or the line is named where the failure is a matter of the model's code.
    """
    source = reduction if reduction is not None else snapshot
    found = expectation if expectation is not None else expect(snapshot, reduction)
    failure = source.failure if source.failure.event is None else snapshot.failure  # a smaller program has another loss
    module = (facts.module(snapshot) or "").strip("<>")
    site = snapshot.failure.site
    line = shorten_paths(redact_text(f"in {site.place}")) if site is not None else ""
    place = f"in {module}" if module else line
    is_own = found.owner == OWN and failure.kind in ("nan", "inf")
    headline = " ".join(filter(None, (wording.headline(failure), place if is_own else "")))
    number = snapshot.environment.torch.partition("+")[0]
    version = f"torch {number}" if number else ""
    dtype = _autocast(snapshot)  # training ran under it, and the repro may need none
    lost = f"{dtype} autocast in training" if dtype and not _autocast(source) else ""
    devices = snapshot.environment.devices
    home = home_of(Step.of(source))
    device = devices[0] if home == "cuda" and devices else home.upper()
    parts = (_dtype(source), lost, device, version)
    details = ", ".join(part for part in parts if part)
    return f"{': '.join(filter(None, (headline, found.words)))} ({redact_text(details)})"


def rate(verified: VerifyResult) -> str:
    """A sentence with the number of runs that fail; without a repro with the reason."""
    if not verified.times:
        return f"There is no repro: {verified.signature}."
    runs, apart = f"{verified.times} runs", "each in a process of its own"
    if verified.num_failed:
        is_one_way = verified.fails and verified.agreed == verified.num_failed
        return f"It failed {verified.num_failed} of {runs}{' in the same way' if is_one_way else ''}, {apart}."
    if verified.exit_code == 0:
        return f"It did not fail in {runs}, {apart}."
    return f"It neither failed nor passed in {runs}, {apart}; {verified.agreed} ended with {verified.signature}."


def shown_output(verified: VerifyResult) -> str:
    """The output of a repro, or its end if it printed nothing; empty without a repro."""
    if not verified.times:
        return ""
    return verified.output.strip() or verified.signature


def cut(text: str, limit: int) -> str:
    """The beginning of a text that is too long, and a line with the number of characters left out."""
    if len(text) <= limit:
        return text
    kept = text[: max(0, limit - 60)]
    return f"{kept}\n... cut here, {len(text) - len(kept)} characters left out\n"[:limit]


def _long_texts(
    snapshot: Snapshot, script: Script, verified: VerifyResult, reduction: Reduction | None
) -> dict[str, str]:
    log = "\n".join(map(str, reduction.log)) if reduction is not None else ""
    found = reduction.diagnosis if reduction is not None else None
    diagnosis = shorten_paths(findings.markdown(found)) if found is not None else ""
    collected, environment = redact_text(snapshot.environment.collect_env.strip()), snapshot.environment
    libraries = f"{collected}\n\n{_lines(facts.libraries(environment))}"
    versions = libraries if collected else _lines(facts.versions(environment))
    return {
        "script": script.text.rstrip(),
        "output": cut(shorten_paths(redact_text(shown_output(verified))), MAX_OUTPUT_CHARACTERS),
        "traceback": shorten_paths(redact_text(verified.error_output.rstrip())),
        "versions": versions.strip(),
        "log": redact_source(wording.renamed(log, script.names)),
        "variants": findings.table_markdown(reduction.whatif, MINIMUM, script.names) if reduction is not None else "",
        "diagnosis": wording.renamed(diagnosis, _names_of_data(script, reduction)),
    }


def _names_of_data(script: Script, reduction: Reduction | None) -> dict[str, str]:
    """The names of inputs of the step in the repro; parameters and buffers keep their full names."""
    items = reduction.program.inputs if reduction is not None else ()
    data = [item.name for item in items if item.role not in ("parameter", "buffer")]
    return {name: script.names[name] for name in data if name in script.names}


def _dtype(source: Reduction | Snapshot) -> str:
    """The dtype that the origin computes in: that of autocast around it, else of the first floating-point input."""
    autocast = _autocast(source)
    if autocast:
        return f"autocast to {autocast}"
    tensors = (source.tensors[item.value] for item in source.program.inputs if item.role != "rng")
    floats = (tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    return next((str(tensor.dtype).removeprefix("torch.") for tensor in floats), "")


def _autocast(source: Reduction | Snapshot) -> str:
    index = source.failure.call_index
    autocast = source.program.calls[index].mode.autocast if index is not None else ()
    return autocast[0][1].removeprefix("torch.") if autocast else ""


def _lines(rows: Iterable[facts.Fact]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in rows)


def _origin(snapshot: Snapshot) -> str:
    place = f", at {facts.line(snapshot.failure)}" if snapshot.failure.site is not None else ""
    around = dict(facts.surroundings(snapshot))
    process = f" on {around['process']} processes" if "process" in around else ""
    compiled = f" (compiled: {around['compiled']})" if "compiled" in around else ""
    return f"{facts.when(snapshot)} of a training run{process}{compiled}, {facts.where(snapshot)}{place}"


def _size(snapshot: Snapshot, reduction: Reduction | None) -> str:
    if reduction is None or reduction.no_repro:
        return counted(snapshot.program.num_calls, "torch call")
    before, checks = counted(reduction.before.calls, "torch call"), counted(reduction.checks, "check")
    return f"{before} to {reduction.program.num_calls:,}, in {checks}"


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
