"""Turning a reduction into what people read and run: the repro, the issue text, the report, a test.

`render_all` writes everything that ``reprokit shrink`` leaves behind, `render_one` a single text from a file on disk.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprokit.errors import ReprokitError, UsageError
from reprokit.program.step import Step
from reprokit.render import KINDS, facts
from reprokit.render.findings import one_line
from reprokit.render.gate import require_test
from reprokit.render.issue import Issue, make_issue
from reprokit.render.literals import MAX_LITERALS
from reprokit.render.module import MAX_LINES, MODULE_FILE, ModuleScript
from reprokit.render.report import write_report
from reprokit.render.script import Script, require_repro, require_whole, unverified
from reprokit.render.sources import (
    Opened,
    context_script,
    is_minimum_again,
    open_source,
    reduction_script,
    snapshot_script,
    without_data,
    without_source,
)
from reprokit.render.templates import find_template, render_template
from reprokit.render.verify import CleanProcesses, VerifyResult
from reprokit.render.wording import headline, prose
from reprokit.rules.match import with_rule
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE, RESULTS, replaced, write_text
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import shorten_paths
from reprokit.snapshot.source import Source, private
from reprokit.words import counted, visible_line

ISSUE_FILE, SUMMARY_FILE = "issue.md", "summary.md"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can name


def write_zip(path: Path, script: Script, issue: Issue, *, context: str = "", with_data: bool = False) -> Path:
    """Write the zip, with the text of the context beside the repro where there is one.

    Raises `UsageError` when the side file would hand out many recorded numbers unasked.
    """
    count = sum(tensor.numel() for tensor in script.side.values())
    if count > MAX_LITERALS and not with_data:
        raise UsageError(
            f"the repro needs {count:,} recorded numbers, which may be training data",
            hint="attach them with --with-data",
        )
    with tempfile.TemporaryDirectory(prefix="reprokit-") as folder:
        if not script.reason:
            script.write(Path(folder))
        if context:
            Path(folder, MODULE_FILE).write_text(context, encoding="utf-8")
        Path(folder, ISSUE_FILE).write_text(issue.text, encoding="utf-8")
        names = sorted(item.name for item in Path(folder).iterdir())
        with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in names:
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system = 3
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, Path(folder, name).read_bytes())
    return path


TIMES = 20
_MOST_LINES = 15  # of a summary
REPORT_FILE = "report.html"


def render_all(
    reduction: Reduction,
    snapshot: Snapshot,
    out_dir: Path,
    *,
    times: int = TIMES,
    source: Source = "all",
    no_data: bool = False,
    check: Path | None = None,
    fast: bool = False,
    on_reason: Callable[[str], None] = lambda reason: None,
    processes: CleanProcesses | None = None,
) -> dict[str, Any]:
    """Write every file of a result, verified; the parts ``context`` and ``repro`` of the summary.

    ``source`` says how much of the snapshot's source text is shown. With ``no_data`` a result that needs recorded
    numbers is a `UsageError`. ``check`` is the file of a check of the user's, which the repro runs. ``fast``: the
    minimum and the summary only. ``on_reason`` gets the reason why there is no context. ``processes`` are those that
    verify. Where there is no repro, ``repro`` is ``None``.
    """
    with contextlib.ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(CleanProcesses([check] if check is not None else []))
        options: dict[str, Any] = {"source": source, "no_data": no_data, "check": check}
        script = begin(reduction, snapshot, out_dir, processes, times, **options)
        reduction = without_data(reduction) if no_data else reduction
        with contextlib.suppress(Exception):  # an error comes up again when the context is written
            if (found := presentable_context(reduction, snapshot)) is not None:
                processes.begin(found, times)
        try:
            result = _verified(script, times, processes)
        except (ReprokitError, OSError) as error:
            note = f"the header of `{REPRO_FILE}` says that it is not verified"
            raise ReprokitError(f"could not verify `{out_dir / REPRO_FILE}`: {error}", note=note) from error
        path = script.write(out_dir) if not script.reason else None
        reduction.save(out_dir / REDUCTION_FILE)
        try:
            context = render_context(
                reduction, snapshot, out_dir, times=times, on_reason=on_reason, processes=processes
            )
        except Exception as error:
            on_reason(f"{type(error).__name__}: {error}")
            context = None
    snapshot, reduction = private(snapshot, source), without_source(reduction, source)
    texts = {SUMMARY_FILE: write_summary(snapshot, reduction, script, result)}
    if not fast:
        beside = _beside(script, Path(context["path"]).read_text(encoding="utf-8")) if context is not None else ""
        issue = make_issue(snapshot, script, result, reduction=reduction, context=beside)
        texts[ISSUE_FILE] = issue.text
        texts[REPORT_FILE] = write_report(snapshot, script, result, reduction=reduction, title=issue.title)
    if not (fast or script.reason):
        texts["test_repro.py"] = write_test(reduction)
    for name, text in texts.items():
        write_text(out_dir / name, text)
    if script.reason:
        return {"context": context, "repro": None}
    repro = {
        "path": str(path),
        "lines": script.num_lines,
        "files": script.files,
        "names": dict(script.names),
        "verified": result.verified if result.fails else f"{result.num_failed}/{times}",
    }
    return {"context": context, "repro": repro}


def write_summary(snapshot: Snapshot, reduction: Reduction, script: Script, result: VerifyResult) -> str:
    """What failed, where, why, and how small it is, for a colleague: at most 15 lines of Markdown."""
    story = [("story", facts.story(snapshot))] if facts.story(snapshot) else []
    rows = [row for row in (*facts.of_failure(snapshot), *story) if row[0] != "program"]
    if reduction.diagnosis is not None:
        rows.append(("why", one_line(reduction.diagnosis)))
    if script.reason:
        rows.append(("repro", f"there is none: {script.reason}"))
    else:
        size = counted(script.num_lines, "line")
        rows.append(("repro", f"`{REPRO_FILE}`, {size}, verified {result.verified} in clean processes"))
    title = prose(headline(snapshot.failure, is_reduced=False))
    lines = [f"# {title}", "", *(f"- {name}: {prose(shorten_paths(text))}" for name, text in rows)]
    return "".join(f"{line}\n" for line in lines[:_MOST_LINES])


def write_given(snapshot: Snapshot, out_dir: Path, *, source: Source = "all") -> None:
    """Write issue and report about a bad input in the place of an earlier result; there is no repro."""
    for name in (*RESULTS, REDUCTION_FILE):
        (out_dir / name).unlink(missing_ok=True)
    snapshot = private(snapshot, source)
    script = snapshot_script(snapshot)
    issue = make_issue(snapshot, script, _verified(script))
    write_text(out_dir / ISSUE_FILE, issue.text)
    write_text(out_dir / REPORT_FILE, write_report(snapshot, script, _verified(script), title=issue.title))


def begin(
    reduction: Reduction,
    snapshot: Snapshot,
    out_dir: Path,
    processes: CleanProcesses,
    times: int = TIMES,
    *,
    source: Source = "all",
    no_data: bool = False,
    check: Path | None = None,
) -> Script:
    """Write the repro, whose header says that nothing has verified it, over an earlier result, and begin to verify it.

    The files of the earlier result go first: beside this repro they would be taken for a part of it.
    """
    reduction = without_data(reduction) if no_data else reduction
    script = reduction_script(reduction, private(snapshot, source))
    for name in RESULTS:
        (out_dir / name).unlink(missing_ok=True)
    if check is not None:
        shutil.copy(check, out_dir)
    if not script.reason:
        unverified(script).write(out_dir)
        processes.begin(script, times)
    return script


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
    if kind in ("repro", "test"):
        require_repro(script)
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
    if script.side:
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
    if is_minimum_again(reduction):
        return None
    if reduction.context is not None and not _is_same(reduction):
        on_reason("the part of the model that was found fails in another way than `repro.py`")
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


def _is_same(reduction: Reduction) -> bool:
    """True if the context fails by the same rule as the minimum: the spread of nothing is not that of one element."""
    assert reduction.context is not None
    found = (reduction.context, reduction)
    if (reduction.context.failure.call_index or 0) >= len(reduction.context.program.calls):
        return False  # the file names a call that is not there
    rules = [with_rule(item.failure, Step.of(item), reduction.failure.rule).rule for item in found]
    return rules[0] == rules[1]


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
    if isinstance(script, Script) and script.reason:
        return VerifyResult(0, 0, 0, None, script.reason, "", "", 0.0)
    if processes is not None:
        return processes.begin(script, times).result()
    with CleanProcesses() as own:
        return own.begin(script, times).result()
