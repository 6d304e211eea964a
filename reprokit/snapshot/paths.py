"""Checks that the path given to a command can be read; the error suggests files that may have been meant.

One mistake has one answer: everything that reads a file of reprokit asks here first. Whether the file holds what it
should is not known before it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reprokit.errors import UsageError

REDUCTION_FILE = "reduction.pt"
REPRO_FILE = "repro.py"
_MAX_NAMED = 5


def require_file(path: Path, wanted: str) -> None:
    """Raise `UsageError` unless ``path`` is a file that can be read; ``wanted`` is what it should hold.

    That is ``snapshot``, ``reduction`` or ``repro``, and decides which neighbours the hint names.
    """
    try:
        if path.is_dir():
            raise UsageError(f"`{path}` is a folder, not a {wanted}", hint=hint_for_folder(path))
        if path.exists() and not path.is_file():
            raise UsageError(f"`{path}` is not a file", hint="save what it gives as a file")
        with path.open("rb"):
            return
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"`{path}` does not exist", hint=_hint_for_missing(path, wanted)) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}", hint="check its name and its permissions") from None


def hint_for_folder(folder: Path) -> str:
    """The files of a folder that may have been meant."""
    found = snapshots_in(folder)
    if found:
        return f"name a snapshot in it: {_listed(found)}"
    if (folder / REDUCTION_FILE).is_file():
        near = snapshots_in(folder.parent)
        beside = f"; beside it there is {_listed(near)}" if near else ""
        return f"it holds what `reprokit shrink` made of a snapshot: name that snapshot{beside}"
    return "it holds no snapshot; `reprokit capture` prints where it wrote one"


def snapshots_in(folder: Path) -> list[Path]:
    """Files that are snapshots by their names."""
    return sorted(file for file in folder.glob("*.repro.pt") if file.is_file())


def _hint_for_missing(path: Path, wanted: str) -> str:
    if wanted == "repro":
        return "give a repro.py, or the .pt file of a snapshot or reduction"
    near = snapshots_in(path.parent) if path.parent.is_dir() else []
    return f"there is {_listed(near)}" if near else "`reprokit capture` prints where it wrote the snapshot"


def _listed(files: Sequence[Path]) -> str:
    more = len(files) - _MAX_NAMED
    return ", ".join(map(str, files[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")
