"""Which code ran: the git commit, branch and uncommitted changes around a script, its remote, and the command line.

Everything is optional: without a repository, without git, on a detached head or before the first commit, the rest is
still shown. A snapshot keeps the parts of the user's code that `source` allows. Credentials are taken out first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from reprokit.errors import attempt, ignored_errors
from reprokit.grammar import Line, Text
from reprokit.snapshot.redact import redact_argv, redact_remote, redact_source, redact_text

if TYPE_CHECKING:
    import git

    from reprokit.locate.failure import Failure
    from reprokit.program.ir import Call, ModuleNote, Program, Site
    from reprokit.snapshot.format import Snapshot

MAX_DIFF_CHARACTERS = 200_000
GIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SourceState:
    """The command line, and the state of the repository; ``None``: unknown, or there is none."""

    command: tuple[Line, ...] | None = None
    commit: Line | None = None
    branch: Line | None = None
    remote: Line | None = None
    dirty: bool | None = None
    file: Line | None = None
    diff: Text = ""
    diff_truncated: bool = False


def describe_source(path: Path | None, argv: Sequence[str]) -> SourceState:
    """The command line and, when ``path`` (or the current folder) lies in a repository, its state; never raises."""
    described = SourceState(tuple(redact_argv(argv)))
    repository = _open_repository(path.parent if path is not None and path.exists() else Path())
    if repository is not None:
        with repository:
            return _describe_repository(repository, path, described)
    return described


def _open_repository(folder: Path) -> git.Repo | None:
    """The repository around ``folder``; ``None`` without one, or without git (GitPython then fails on import)."""
    with ignored_errors():
        import git

        return git.Repo(folder.resolve(), search_parent_directories=True)
    return None


def _describe_repository(repository: git.Repo, path: Path | None, described: SourceState) -> SourceState:
    described = replace(
        described,
        commit=attempt(lambda: repository.head.commit.hexsha),
        branch=attempt(lambda: repository.active_branch.name),
        remote=attempt(lambda: redact_remote(_remote_url(repository))),
        dirty=attempt(repository.is_dirty),
        file=attempt(lambda: _path_inside(repository, path)),
    )
    if described.dirty and described.commit is not None:
        return attempt(lambda: _with_changes(repository, described)) or described
    return described


def _remote_url(repository: git.Repo) -> str:
    remotes = {remote.name: remote for remote in repository.remotes}
    remote = remotes.get("origin") or next(iter(remotes.values()))
    return next(iter(remote.urls))


def _with_changes(repository: git.Repo, described: SourceState) -> SourceState:
    """With the uncommitted changes of tracked files, cut to a bearable size."""
    changes: str = repository.git.diff(
        "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", kill_after_timeout=GIT_SECONDS
    )
    shown = redact_text(changes[:MAX_DIFF_CHARACTERS])
    return replace(described, diff=shown, diff_truncated=len(changes) > MAX_DIFF_CHARACTERS)


def _path_inside(repository: git.Repo, path: Path | None) -> str | None:
    top = repository.working_tree_dir
    return path.resolve().relative_to(Path(top).resolve()).as_posix() if path is not None and top is not None else None


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
    if isinstance(value, str):
        return redact_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _redacted(getattr(value, item.name)) for item in fields(value)})
    if isinstance(value, Mapping):
        return {name: _redacted(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_redacted(item) for item in value)
    return value
