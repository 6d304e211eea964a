"""The parts of the user's code that a snapshot keeps, with credentials taken out.

A `Source` policy says how much source text stays: none, the lines that a traceback would show, or all that is known.
Done before a snapshot is written, and again when something is rendered from it, as it may come from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from reprokit.snapshot.redact import redact_argv, redact_source, redact_text

if TYPE_CHECKING:
    from reprokit.locate.failure import Failure
    from reprokit.program.ir import Call, ModuleNote, Program, Site
    from reprokit.snapshot.format import Snapshot
    from reprokit.snapshot.source import SourceState

Source = Literal["traceback", "none", "all"]
SOURCES: tuple[Source, ...] = get_args(Source)


def private(snapshot: Snapshot, source: Source = "all") -> Snapshot:
    """The snapshot without credentials, personal paths and source text that the policy leaves out."""
    return replace(
        snapshot,
        program=_program(snapshot.program, snapshot.failure, source),
        failure=private_failure(snapshot.failure, source),
        fidelity_note=redact_text(snapshot.fidelity_note) if snapshot.fidelity_note else snapshot.fidelity_note,
        environment=_redacted(snapshot.environment),
        source=_described(snapshot.source, source),
        command=redact_argv(snapshot.command),
    )


def private_failure(failure: Failure, source: Source = "all") -> Failure:
    """The failure with its line of source and its message made private."""
    raised = failure.exception
    return replace(
        failure,
        site=_site(failure.site, source),
        exception=(raised[0], redact_text(raised[1])) if raised is not None else None,
        cause=private_failure(failure.cause, source) if failure.cause is not None else None,
    )


def _program(program: Program, failure: Failure, source: Source) -> Program:
    calls = tuple(_call(call, source, index == failure.call_index) for index, call in enumerate(program.calls))
    return replace(program, calls=calls, modules={path: _note(note, source) for path, note in program.modules.items()})


def _call(call: Call, source: Source, is_origin: bool) -> Call:
    site = _site(call.site, source)
    text = call.kwargs.get("source") if call.target == "opaque" else None
    if isinstance(text, str):
        kept = source == "all" or (source == "traceback" and is_origin)
        return replace(call, site=site, kwargs={**call.kwargs, "source": redact_source(text) if kept else ""})
    return call if site is call.site else replace(call, site=site)


@functools.lru_cache(maxsize=4096)  # a line of the user's makes many calls
def _site(site: Site | None, source: Source) -> Site | None:
    if site is None:
        return None
    code, text = ("", "") if source == "none" else (redact_source(site.code), redact_source(site.text))
    kept = replace(site, code=code, file=redact_text(site.file), statement=text * bool(site.statement))
    is_in_place = text.encode().startswith(site.up_to_call) and source != "none"
    return kept if is_in_place else replace(kept, statement="", span=None)


def _note(note: ModuleNote, source: Source) -> ModuleNote:
    text = redact_source(note.source) if source == "all" else ""
    return replace(note, source=text, file=redact_text(note.file))  # the file as in the sites inside it


def _described(described: SourceState, source: Source) -> SourceState:
    """Git and command line: uncommitted changes only with all source; a commit's hash stays."""
    kept = described if source == "all" else replace(described, diff="", diff_truncated=False)
    command = tuple(redact_argv(kept.command)) if kept.command is not None else None
    redacted: SourceState = _redacted(kept)
    return replace(redacted, command=command, commit=kept.commit)


def _redacted(value: Any) -> Any:
    """Nested data with every text redacted."""
    if isinstance(value, str):
        return redact_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _redacted(getattr(value, item.name)) for item in fields(value)})
    if isinstance(value, Mapping):
        return {name: _redacted(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_redacted(item) for item in value)
    return value
