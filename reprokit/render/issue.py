"""The text of an issue: what a maintainer wants on the first screen, everything else folded away.

Nothing is ever submitted by the tool: the text has a slot for the reporter's own words and says that the reduction was
mechanical. What came from the user's machine is redacted again here, and a text that would be too long is cut visibly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.errors import UsageError
from reprokit.render import wording
from reprokit.render.environment import render_template, template_folder
from reprokit.render.script import Script
from reprokit.render.whatif import markdown
from reprokit.snapshot.redact import redact_text

if TYPE_CHECKING:
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

MAX_CHARACTERS = 65_536
_CUT_ORDER = ("log", "versions", "traceback", "output", "script")


def write_issue(
    snapshot: Snapshot,
    script: Script,
    verified: VerifyResult,
    *,
    reduction: Reduction | None = None,
    template: str = "pytorch",
) -> str:
    """The issue text. ``template`` is a name (`template_names`) or the path of a Jinja file."""
    failure = reduction.failure if reduction is not None else snapshot.failure
    long_texts = {
        "script": script.text.rstrip(),
        "output": redact_text(verified.output.rstrip() or verified.signature),
        "traceback": redact_text(verified.error_output.rstrip()),
        "versions": redact_text(_versions(snapshot.environment)),
        "log": redact_text("\n".join(reduction.log)) if reduction is not None else "",
    }
    context = {
        "title": title(snapshot, reduction),
        "observed": redact_text(wording.observed(failure)),
        "expected": wording.expected(failure),
        "files": script.files,
        "verified": verified,
        "rate": rate(verified),
        "origin": redact_text(_origin(snapshot)),
        "size": _size(snapshot, reduction),
        "reduced": reduction is not None,
        "matters": redact_text(wording.what_matters(reduction, script.names)) if reduction is not None else "",
        "whatif": markdown(reduction.whatif) if reduction is not None else "",
        "fence": fence,
    }
    return _fitted(template, context, long_texts)


def title(snapshot: Snapshot, reduction: Reduction | None = None) -> str:
    """``softmax returns nan (float32, cpu, 2.13.0)``."""
    source = reduction if reduction is not None else snapshot
    tensors = [source.tensors[item.value] for item in source.program.inputs if item.role != "rng"]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in floats[:1])
    device = next((item for item in snapshot.environment.get("devices", ()) if item), "CPU")
    version = str(snapshot.environment.get("torch", "")).partition("+")[0]
    details = ", ".join(part for part in (*dtypes, device, version) if part)
    return f"{wording.headline(source.failure)} ({redact_text(details)})"


def rate(verified: VerifyResult) -> str:
    """How often it fails, in words that claim no more than was seen."""
    if not verified.fails:
        return f"It did not fail when it was run {verified.times} times, each in a process of its own."
    return f"It failed {verified.agreed} of {verified.times} runs in the same way, each in a process of its own."


def template_names() -> list[str]:
    """The issue templates that come with the tool."""
    return sorted(path.name.removesuffix(".md.j2") for path in (template_folder() / "issue").glob("[!_]*.md.j2"))


def fence(text: str) -> str:
    """A fence one backtick longer than any inside."""
    return "`" * max(3, wording.longest_run(text, "`") + 1)


def _versions(environment: Mapping[str, Any]) -> str:
    if environment.get("collect_env"):
        return str(environment["collect_env"]).strip()
    shown = {
        name: environment.get(name) for name in ("torch", "python", "platform", "cuda", "cudnn", "devices", "libraries")
    }
    return "\n".join(f"{name}: {value}" for name, value in shown.items() if value)


def _origin(snapshot: Snapshot) -> str:
    failure = snapshot.failure
    where = f"step {snapshot.step} of a training run, {wording.phase_words(failure)}"
    if failure.module:
        where += f", module {wording.code_span(failure.module)}"
    if failure.site is not None:
        where += f", at {wording.code_span(f'{Path(failure.site.file).name}:{failure.site.line}')}"
        where += f": {wording.code_span(failure.site.code.strip())}" if failure.site.code.strip() else ""
    return where


def _size(snapshot: Snapshot, reduction: Reduction | None) -> str:
    if reduction is None:
        return f"{snapshot.program.num_calls} torch calls"
    return f"{reduction.before['calls']} torch calls to {reduction.program.num_calls}, in {reduction.checks} checks"


def _fitted(template: str, context: Mapping[str, Any], long_texts: Mapping[str, str]) -> str:
    """The rendered text, its longest parts cut until it fits."""
    texts = dict(long_texts)
    rendered = _render(template, {**context, **texts})
    for name in _CUT_ORDER:
        excess = len(rendered) - MAX_CHARACTERS
        if excess <= 0:
            break
        texts[name] = cut(texts[name], max(200, len(texts[name]) - excess - 80))
        rendered = _render(template, {**context, **texts})
    return cut(rendered, MAX_CHARACTERS)


def cut(text: str, limit: int) -> str:
    """The beginning of a text that is too long, with a line that says so."""
    if len(text) <= limit:
        return text
    kept = text[: max(0, limit - 60)]
    return f"{kept}\n... cut here, {len(text) - len(kept)} characters left out\n"[:limit]


def _render(template: str, context: Mapping[str, Any]) -> str:
    path = Path(template)
    if path.suffix and path.is_file():
        return render_template(path.name, path.resolve().parent, **context)
    if template not in template_names():
        raise UsageError(
            f"there is no issue template `{template}`",
            hint=f"one of {', '.join(template_names())}, or the path of a Jinja file",
        )
    return render_template(f"issue/{template}.md.j2", **context)
