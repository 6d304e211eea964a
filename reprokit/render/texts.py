"""The files of a result: repro, piece of the model, summary, issue, report and test.

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
from reprokit.render import TEXTS, sources
from reprokit.render.facts import Facts
from reprokit.render.gate import require_test
from reprokit.render.issue import Issue, make_issue, write_summary
from reprokit.render.kinds import words_of
from reprokit.render.literals import MAX_LITERALS
from reprokit.render.module import MAX_LINES, MODULE_FILE, ModuleScript
from reprokit.render.report import write_report
from reprokit.render.script import Script, require_repro, require_whole, unverified
from reprokit.render.templates import find_template, render_template
from reprokit.render.verify import CleanProcesses, VerifyResult
from reprokit.rules.match import with_rule
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE, RESULTS, replaced, write_text
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.privacy import private
from reprokit.snapshot.source import Source
from reprokit.words import visible_line

ISSUE_FILE, SUMMARY_FILE, REPORT_FILE, TEST_FILE = "issue.md", "summary.md", "report.html", "test_repro.py"
TIMES = 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can name


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
    """Write every file of a result, verified; the parts ``context`` and ``repro`` of the JSON.

    ``source`` says how much of the snapshot's source text is shown. With ``no_data`` a result that needs recorded
    numbers is a `UsageError`. ``check`` is the file of a check of the user's, which the repro runs. ``fast``: the
    minimum and the summary only. ``on_reason`` gets the reason why there is no context. ``processes`` are those that
    verify. Where there is no repro, ``repro`` is ``None``.
    """
    snapshot, reduction = private(snapshot, source), private(reduction, source)
    with contextlib.ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(CleanProcesses([check] if check is not None else []))
        script = begin(reduction, snapshot, out_dir, processes, times, source=source, no_data=no_data, check=check)
        reduction = sources.without_data(reduction) if no_data else reduction
        piece: ModuleScript | str = ""
        try:
            piece = piece_of(reduction, snapshot) if not fast else ""
        except Exception as error:
            piece = f"{type(error).__name__}: {error}"
        if not isinstance(piece, str):
            processes.begin(piece, times)
        try:
            result = _verified(script, times, processes)
        except (ReprokitError, OSError) as error:
            note = f"the header of `{REPRO_FILE}` says that it is not verified"
            raise ReprokitError(f"could not verify `{out_dir / REPRO_FILE}`: {error}", note=note) from error
        path = script.write(out_dir) if not script.reason else None
        reduction.save(out_dir / REDUCTION_FILE)
        found = verified_piece(piece, times, processes)
    context = write_piece(found, reduction, out_dir) if not isinstance(found, str) else None
    beside, reason = ("", found) if isinstance(found, str) else (found[0].text, "")
    if reason:
        on_reason(reason)
    facts = Facts(snapshot, script, result, reduction)
    texts = {SUMMARY_FILE: write_summary(facts, reason)}
    if not fast:
        issue = make_issue(facts, context=beside, no_module=reason)
        texts |= {ISSUE_FILE: issue.text, REPORT_FILE: write_report(facts)}
        texts |= {TEST_FILE: write_test(reduction)} if not script.reason else {}
    for name, text in texts.items():
        write_text(out_dir / name, text)
    repro = {
        "path": str(path),
        "lines": script.num_lines,
        "files": script.files,
        "names": dict(script.names),
        "verified": result.verified if result.fails else f"{result.num_failed}/{times}",
    }
    return {"context": context, "repro": repro if not script.reason else None}


def write_given(snapshot: Snapshot, out_dir: Path, *, source: Source = "all") -> None:
    """Write summary, issue and report about a bad input in the place of an earlier result; there is no repro."""
    for name in (*RESULTS, REDUCTION_FILE):
        (out_dir / name).unlink(missing_ok=True)
    snapshot = private(snapshot, source)
    script = sources.snapshot_script(snapshot)
    facts = Facts(snapshot, script, _verified(script))
    write_text(out_dir / SUMMARY_FILE, write_summary(facts))
    write_text(out_dir / ISSUE_FILE, make_issue(facts).text)
    write_text(out_dir / REPORT_FILE, write_report(facts))


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
    reduction = sources.without_data(reduction) if no_data else reduction
    script = sources.reduction_script(private(reduction, source), private(snapshot, source))
    for name in RESULTS:
        (out_dir / name).unlink(missing_ok=True)
    if check is not None:
        shutil.copy(check, out_dir)
    if not script.reason:
        unverified(script).write(out_dir)
        processes.begin(script, times)
    return script


def piece_of(reduction: Reduction, snapshot: Snapshot | None) -> ModuleScript | str:
    """The context as a script that shows the failure of the minimum, or the reason why there is none."""
    context = reduction.context
    if context is None:
        return "no part of the model was found that fails by itself" if reduction.failure.kind.is_nonfinite else ""
    if sources.is_minimum_again(reduction):
        return "it would be `repro.py` again"
    # By the same rule as the minimum: the spread of nothing is not that of one element.
    is_there = (context.failure.call_index or 0) < len(context.program.calls)  # a file may name a call that is not
    rule, shown = reduction.failure.rule, (context, reduction)
    if not is_there or len({with_rule(item.failure, Step.of(item), rule).key() for item in shown}) > 1:
        return "the part of the model that was found fails in another way than `repro.py`"
    script = sources.context_script(reduction, snapshot)
    if script is None:
        return "it would need more recorded numbers than a repro may hold"
    if script.num_lines > MAX_LINES:
        return f"it would have {script.num_lines} lines, and {MAX_LINES} is the limit"
    return script


def verified_piece(
    piece: ModuleScript | str, times: int = TIMES, processes: CleanProcesses | None = None
) -> tuple[ModuleScript, VerifyResult] | str:
    """A piece that fails by itself every time, or the reason why there is none."""
    if isinstance(piece, str):
        return piece
    result = _verified(piece, times, processes)
    if result.fails and result.is_unanimous:
        return piece, result
    share = f"only {result.num_failed}" if result.num_failed else "none"
    return f"{share} of {times} runs of it failed as the step did"


def write_piece(found: tuple[ModuleScript, VerifyResult], reduction: Reduction, out_dir: Path) -> dict[str, Any]:
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
    on_warning: Callable[[str], None] = lambda _: None,
) -> Path | str:
    """One text from a snapshot, a reduction or a folder of results: its path if written to ``out``, else itself.

    ``on_warning`` gets a line about a script that runs another file.
    """
    if kind not in TEXTS:
        raise UsageError(f"cannot render as `{kind}`", hint=f"one of {', '.join(TEXTS)}")
    opened = sources.open_source(source, snapshot).private(policy, no_data=no_data)
    script = opened.script()
    if kind in ("repro", "test"):
        require_repro(script)
    if kind == "repro" and script.beside is not None:
        on_warning(
            f"the script runs the check in `{script.beside}` beside it: read that file before you run the script"
        )
    if kind == "repro" and out is not None and out.is_dir():
        return script.write(out)
    if kind == "repro":
        if script.side:
            hint = "name an existing folder with -o, to write both there"
            raise UsageError(f"the repro of `{source}` needs a file of tensors beside it", hint=hint)
        text = script.text
    elif kind == "test":
        text = write_test(opened.reduction or opened.whole(source))
    elif kind == "issue":
        text = _issue(opened, source, script).issue.text
    else:
        facts = _facts(opened, source, script)
        text = write_report(facts) if kind == "report" else write_summary(facts)
    if out is None:
        return text
    write_text(out, text)
    return out


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
    opened = sources.open_source(source, snapshot).private(policy, no_data=no_data)
    opened.whole(source)  # raises before any work
    return _issue(opened, source, opened.script(), template)


def _facts(opened: sources.Opened, source: Path, script: Script) -> Facts:
    require_whole(script)
    return Facts(opened.whole(source), script, _verified(script), opened.reduction)


def _issue(opened: sources.Opened, source: Path, script: Script, template: str | None = None) -> PreparedIssue:
    facts = _facts(opened, source, script)
    found = verified_piece(piece_of(opened.reduction, facts.snapshot)) if opened.reduction is not None else ""
    context, reason = (found[0].text, "") if not isinstance(found, str) else ("", found)
    issue = make_issue(facts, template=template, context=context, no_module=reason)
    return PreparedIssue(issue, script, context)


def write_test(subject: Reduction | Snapshot) -> str:
    """A pytest file that runs the ``repro.py`` beside it."""
    words = visible_line(words_of(subject.failure, is_reduced=isinstance(subject, Reduction)).headline)
    name = re.sub(r"\W+", "_", words.lower(), flags=re.ASCII).strip("_") or "repro"
    said = words.replace("\\", "\\\\").replace('"', "'")
    text = render_template("test_repro.py.j2", headline=said, repro=REPRO_FILE, name=name)
    require_test(text)
    return text


def _verified(
    script: Script | ModuleScript, times: int = TIMES, processes: CleanProcesses | None = None
) -> VerifyResult:
    if isinstance(script, Script) and script.reason:
        return VerifyResult(0, 0, 0, None, script.reason, "", "", 0.0)
    if processes is not None:
        return processes.begin(script, times).result()
    with CleanProcesses() as own:
        return own.begin(script, times).result()


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
