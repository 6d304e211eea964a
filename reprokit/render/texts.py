"""Turning a reduction into what people read and run: the repro, the issue text, the report, a test.

`render_all` writes everything that ``reprokit shrink`` leaves behind, `render_one` a single text from a file on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprokit.errors import UsageError
from reprokit.render import KINDS
from reprokit.render.gate import require_test
from reprokit.render.issue import Issue, make_issue
from reprokit.render.module import MAX_LINES, ModuleScript
from reprokit.render.report import write_report
from reprokit.render.script import Script, require_whole
from reprokit.render.sources import (
    Opened,
    context_script,
    is_minimum_again,
    open_source,
    reduction_script,
    without_source,
)
from reprokit.render.templates import find_template, render_template
from reprokit.render.verify import CleanProcesses, VerifyResult
from reprokit.render.wording import headline
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.files import REPRO_FILE, write_text
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.source import Source, private
from reprokit.visible import visible_line

TIMES = 20


def render_all(
    reduction: Reduction,
    snapshot: Snapshot,
    out_dir: Path,
    *,
    times: int = TIMES,
    source: Source = "all",
    withheld: tuple[int, ...] = (),
    context: Path | None = None,
    processes: CleanProcesses | None = None,
) -> dict[str, Any]:
    """Write ``repro.py``, verify it, write issue, report and test beside it; a summary of the repro.

    ``source`` says how much of the snapshot's source text is shown. The values of the inputs in ``withheld`` are in no
    file. ``context`` is what `render_context` wrote, for the issue to show. ``processes`` are those that verify.
    """
    script = first_repro(reduction, snapshot, source=source, withheld=withheld)
    snapshot, reduction = private(snapshot, source), without_source(reduction, source)
    result = _verified(script, times, processes)
    path = script.write(out_dir)
    beside = _beside(script, context.read_text(encoding="utf-8")) if context is not None else ""
    issue = make_issue(snapshot, script, result, reduction=reduction, context=beside)
    texts = {
        "issue.md": issue.text,
        "report.html": write_report(snapshot, script, result, reduction=reduction, title=issue.title),
        "test_repro.py": write_test(reduction),
    }
    for name, text in texts.items():
        write_text(out_dir / name, text)
    return {
        "path": str(path),
        "lines": script.num_lines,
        "files": script.files,
        "names": dict(script.names),
        "verified": result.verified if result.fails else f"{result.num_failed}/{times}",
    }


def first_repro(
    reduction: Reduction, snapshot: Snapshot, *, source: Source = "all", withheld: tuple[int, ...] = ()
) -> Script:
    """The repro that `render_all` writes, before any run has verified it."""
    return reduction_script(reduction, private(snapshot, source), withheld=withheld)


def render_context(
    reduction: Reduction,
    snapshot: Snapshot | None,
    out_dir: Path,
    *,
    times: int = TIMES,
    on_reason: Callable[[str], None] = lambda reason: None,
    processes: CleanProcesses | None = None,
) -> dict[str, Any] | None:
    """Write ``repro_module.py`` and verify it; a summary, or ``None`` when there is no context to show.

    ``on_reason`` is given the reason when there is one that cannot be shown.
    """
    found = _verified_context(reduction, snapshot, times, on_reason, processes)
    if found is None:
        return None
    script, result = found
    return {
        "path": str(script.write(out_dir)),
        "modules": script.modules,
        "calls": script.calls,
        "lines": script.num_lines,
        "ordinary": reduction.context is not None and reduction.context.is_ordinary,
        "verified": result.verified,
    }


def render_one(
    source: Path,
    kind: str,
    out: Path | None = None,
    *,
    snapshot: Path | None = None,
    policy: Source = "all",
    no_data: bool = False,
) -> Path | str:
    """One text from a snapshot, a reduction or a folder of results: its path if written to ``out``, else itself."""
    if kind not in KINDS:
        raise UsageError(f"cannot render as `{kind}`", hint=f"one of {', '.join(KINDS)}")
    opened = open_source(source, snapshot).private(policy, no_data=no_data)
    script = opened.script()
    if kind == "repro":
        return _write_repro(script, source, out)
    if kind == "test":
        text = write_test(opened.reduction or opened.whole(source))
    elif kind == "report":
        require_whole(script)
        text = write_report(opened.whole(source), script, _verified(script), reduction=opened.reduction)
    else:
        text = _issue(opened, source, script).issue.text
    return _written(text, out)


@dataclass(frozen=True, slots=True)
class PreparedIssue:
    """An issue, the repro that it is about, and the text of the context beside that, empty where there is none."""

    issue: Issue
    script: Script
    context: str


def prepare_issue(
    source: Path,
    template: str | None = None,
    *,
    snapshot: Path | None = None,
    policy: Source = "all",
    no_data: bool = False,
) -> PreparedIssue:
    """The issue about a snapshot, a reduction or a folder of results."""
    if template is not None:
        find_template(template)  # reports a mistake in it before any work
    opened = open_source(source, snapshot).private(policy, no_data=no_data)
    opened.whole(source)  # raises before any work
    return _issue(opened, source, opened.script(), template)


def _issue(opened: Opened, source: Path, script: Script, template: str | None = None) -> PreparedIssue:
    require_whole(script)
    snapshot, reduction, verified = opened.whole(source), opened.reduction, _verified(script)
    found = _verified_context(reduction, snapshot) if reduction is not None else None
    context = _beside(script, found[0].text) if found is not None else ""
    issue = make_issue(snapshot, script, verified, reduction=reduction, template=template, context=context)
    return PreparedIssue(issue, script, context)


def write_test(subject: Reduction | Snapshot) -> str:
    """A pytest file that runs the ``repro.py`` beside it."""
    words = visible_line(headline(subject.failure, is_reduced=isinstance(subject, Reduction)))
    name = re.sub(r"\W+", "_", words.lower(), flags=re.ASCII).strip("_") or "repro"
    said = words.replace("\\", "\\\\").replace('"', "'")
    text = render_template("test_repro.py.j2", headline=said, repro=REPRO_FILE, name=name)
    require_test(text)
    return text


def _write_repro(script: Script, source: Path, out: Path | None) -> Path | str:
    if out is not None and out.is_dir():
        return script.write(out)
    if script.side and not script.is_withheld:
        raise UsageError(
            f"the repro of `{source}` needs a file of tensors beside it",
            hint="name an existing folder with -o, to write both there",
        )
    return _written(script.text, out)


def _written(text: str, out: Path | None) -> Path | str:
    if out is None:
        return text
    write_text(out, text)
    return out


def _beside(script: Script, context: str) -> str:
    """The text of the context, empty where it is the repro itself."""
    return context if context != script.text else ""


def presentable_context(
    reduction: Reduction, snapshot: Snapshot | None, on_reason: Callable[[str], None] = lambda reason: None
) -> ModuleScript | None:
    """The context as a script; ``None`` when there is none to show, and `on_reason` gets the reason if there is one."""
    if reduction.level != "module" and is_minimum_again(reduction):
        return None
    script = context_script(reduction, snapshot)
    if script is None:
        if reduction.context is not None:
            on_reason("it would need more recorded numbers than a repro may hold")
        return None
    if script.num_lines > MAX_LINES:
        on_reason(f"it would have {script.num_lines} lines, and {MAX_LINES} is the limit")
        return None
    return script


def _verified_context(
    reduction: Reduction,
    snapshot: Snapshot | None,
    times: int = TIMES,
    on_reason: Callable[[str], None] = lambda reason: None,
    processes: CleanProcesses | None = None,
) -> tuple[ModuleScript, VerifyResult] | None:
    """The context as a script that fails by itself every time; otherwise ``None``, and `on_reason` gets the reason."""
    script = presentable_context(reduction, snapshot, on_reason)
    if script is None:
        return None
    result = _verified(script, times, processes)
    if not (result.fails and result.is_unanimous):
        on_reason(f"only {result.num_failed} of {times} runs of it failed by themselves")
        return None
    return script, result


def _verified(
    script: Script | ModuleScript, times: int = TIMES, processes: CleanProcesses | None = None
) -> VerifyResult:
    """The result of running a script in these processes, or in some of its own."""
    if processes is not None:
        return processes.begin(script, times).result()
    with CleanProcesses() as own:
        return own.begin(script, times).result()
