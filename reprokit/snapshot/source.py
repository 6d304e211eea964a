"""Which code ran: the git commit, branch and uncommitted changes around a script, its remote, and the command line.

Everything is optional: without a repository, without git, on a detached head or before the first commit, the rest is
still shown. Credentials are taken out first; `snapshot.privacy` does the same with all else that a file holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from reprokit.errors import attempt, ignored_errors
from reprokit.grammar import Digest, Line, Listing
from reprokit.grammar import Path as FilePath
from reprokit.snapshot.redact import redact_argv, redact_remote, redact_text

if TYPE_CHECKING:
    import git


MAX_DIFF_CHARACTERS = 200_000
GIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SourceState:
    """The command line, and the state of the repository; ``None``: unknown, or there is none."""

    command: tuple[Line, ...] | None = None
    commit: Digest | None = None
    branch: Line | None = None
    remote: Line | None = None
    dirty: bool | None = None
    file: FilePath | None = None
    diff: Listing = ""
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
