"""The text of an issue: what a maintainer wants on the first screen, everything else folded away.

Nothing is ever submitted by the tool: the text has a slot for the reporter's own words and says that the reduction was
mechanical. What came from the user's machine is redacted again here, and a text that would be too long is cut visibly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.locate.diagnosis import from_plain
from reprokit.render import diagnosis, wording
from reprokit.render.expectation import OWN, Expectation, code_of, expect
from reprokit.render.issue_templates import Template, find_template
from reprokit.render.script import Script
from reprokit.render.whatif import markdown
from reprokit.snapshot.redact import redact_source, redact_text, shorten_paths

if TYPE_CHECKING:
    from reprokit.program.ir import Site
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

MAX_CHARACTERS = 65_536
MAX_SCRIPT_LINES = 40
MAX_OUTPUT_CHARACTERS = 2_000
_CUT_ORDER = ("log", "versions", "traceback", "output", "variants", "script")
_SHORT_WITHOUT = ("log", "traceback", "diagnosis")


@dataclass(frozen=True, slots=True)
class Issue:
    """An issue ready to be finished by a person.

    ``short`` says the same without what is folded away. ``repository`` is where it belongs, ``None`` when unknown.
    """

    title: str
    text: str
    short: str
    template: str
    repository: str | None


def write_issue(
    snapshot: Snapshot,
    script: Script,
    verified: VerifyResult,
    *,
    reduction: Reduction | None = None,
    template: str | None = None,
) -> str:
    """The text of `make_issue`."""
    return make_issue(snapshot, script, verified, reduction=reduction, template=template).text


def make_issue(
    snapshot: Snapshot,
    script: Script,
    verified: VerifyResult,
    *,
    reduction: Reduction | None = None,
    template: str | None = None,
) -> Issue:
    """The issue in a template: a name, the path of a Jinja file or folder, or the one of whose code it is about."""
    expectation = expect(snapshot, reduction)
    chosen = find_template(template or expectation.template)
    long_texts = _long_texts(snapshot, script, verified, reduction)
    context = {
        "title": title(snapshot, reduction, expectation),
        "observed": shorten_paths(redact_source(expectation.observed)),
        "expected": shorten_paths(redact_source(expectation.expected)),
        "remark": shorten_paths(redact_source(expectation.remark)),
        "owner": expectation.owner,
        "is_upstream": expectation.owner != OWN,
        "files": script.files,
        "is_withheld": script.is_withheld,
        "is_long": script.num_shown_lines > MAX_SCRIPT_LINES,
        "verified": verified,
        "rate": rate(verified),
        "origin": shorten_paths(_origin(snapshot)),
        "size": _size(snapshot, reduction),
        "reduced": reduction is not None,
        "matters": redact_source(wording.what_matters(reduction, script.names)) if reduction is not None else "",
        "environment": _short_versions(snapshot.environment),
    }
    text = _fitted(chosen, context, long_texts)
    short_texts = {**long_texts, **dict.fromkeys(_SHORT_WITHOUT, ""), "versions": context["environment"]}
    short = chosen.render({**context, **short_texts})
    return Issue(str(context["title"]), text, short, chosen.name, chosen.repository or _own_repository(snapshot))


def title(snapshot: Snapshot, reduction: Reduction | None = None, expectation: Expectation | None = None) -> str:
    """``softmax returns nan for a fully masked row in Attention (float32, CPU, 2.13.0)``.

    The module or the line is named where the failure is a matter of the model's code.
    """
    source = reduction if reduction is not None else snapshot
    found = expectation if expectation is not None else expect(snapshot, reduction)
    words = [wording.headline(source.failure), found.words]
    module = (snapshot.failure.module or "").strip("<>")
    if found.owner == OWN and found.words:
        words.append(f"in {module}" if module else _at(snapshot.failure.site))
    version = str(snapshot.environment.get("torch", "")).partition("+")[0]
    device = next((item for item in snapshot.environment.get("devices", ()) if item), "CPU")
    details = ", ".join(part for part in (_dtype(source), device, version) if part)
    return f"{' '.join(word for word in words if word)} ({redact_text(details)})"


def rate(verified: VerifyResult) -> str:
    """How often it fails, in words that claim no more than was seen."""
    if not verified.fails:
        return f"It did not fail when it was run {verified.times} times, each in a process of its own."
    return f"It failed {verified.agreed} of {verified.times} runs in the same way, each in a process of its own."


def cut(text: str, limit: int) -> str:
    """The beginning of a text that is too long, with a line that says so."""
    if len(text) <= limit:
        return text
    kept = text[: max(0, limit - 60)]
    return f"{kept}\n... cut here, {len(text) - len(kept)} characters left out\n"[:limit]


def _long_texts(
    snapshot: Snapshot, script: Script, verified: VerifyResult, reduction: Reduction | None
) -> dict[str, str]:
    output = verified.output.rstrip() or verified.signature
    if script.is_withheld:
        output = verified.signature
    return {
        "script": script.text.rstrip(),
        "output": cut(shorten_paths(redact_text(output)), MAX_OUTPUT_CHARACTERS),
        "traceback": shorten_paths(redact_text(verified.error_output.rstrip())),
        "versions": redact_text(_versions(snapshot.environment)),
        "log": redact_source("\n".join(reduction.log)) if reduction is not None else "",
        "variants": markdown(reduction.whatif) if reduction is not None else "",
        "diagnosis": _diagnosis(reduction),
    }


def _diagnosis(reduction: Reduction | None) -> str:
    if reduction is None or not reduction.diagnosis:
        return ""
    return shorten_paths(diagnosis.markdown(from_plain(reduction.diagnosis)))


def _dtype(source: Reduction | Snapshot) -> str:
    """The dtype of the first floating-point input."""
    tensors = (source.tensors[item.value] for item in source.program.inputs if item.role != "rng")
    floats = (tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    return next((str(tensor.dtype).removeprefix("torch.") for tensor in floats), "")


def _versions(environment: Mapping[str, Any]) -> str:
    """What ``collect_env`` said, and the libraries that the program had imported."""
    collected = str(environment.get("collect_env") or "").strip()
    return f"{collected}\n\n{_libraries(environment)}".strip() if collected else _short_versions(environment)


def _short_versions(environment: Mapping[str, Any]) -> str:
    shown = {name: environment.get(name) for name in ("torch", "python", "platform", "cuda", "cudnn")}
    shown["devices"] = ", ".join(map(str, environment.get("devices", ())))
    lines = [f"{name}: {value}" for name, value in shown.items() if value]
    return redact_text("\n".join((*lines, _libraries(environment))).strip())


def _libraries(environment: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {version}" for name, version in sorted(environment.get("libraries", {}).items()))


def _origin(snapshot: Snapshot) -> str:
    failure = snapshot.failure
    where = f"step {snapshot.step} of a training run, {wording.phase_words(failure)}"
    if failure.module:
        where += f", module {wording.code_span(failure.module)}"
    if failure.site is not None:
        where += f", at {wording.code_span(f'{Path(failure.site.file).name}:{failure.site.line}')}"
    return where + code_of(failure.site)


def _at(site: Site | None) -> str:
    return f"at {Path(site.file).name}:{site.line}" if site is not None else ""


def _size(snapshot: Snapshot, reduction: Reduction | None) -> str:
    if reduction is None:
        return f"{snapshot.program.num_calls} torch calls"
    return f"{reduction.before['calls']} torch calls to {reduction.program.num_calls}, in {reduction.checks} checks"


def _own_repository(snapshot: Snapshot) -> str | None:
    """The user's own repository on GitHub, as ``owner/name``."""
    _, found, path = str(snapshot.source.get("remote") or "").replace(":", "/").partition("github.com/")
    parts = path.removesuffix("/").removesuffix(".git").split("/")
    return "/".join(parts) if found and len(parts) == 2 and all(parts) else None


def _fitted(template: Template, context: Mapping[str, Any], long_texts: Mapping[str, str]) -> str:
    """The rendered text, its longest parts cut until it fits."""
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
