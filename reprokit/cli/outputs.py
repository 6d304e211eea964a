"""Where results go: checks made before any work starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from reprokit.errors import UsageError


def check_file(path: Path, *, overwrite: bool, option: str = "-o") -> None:
    """Raise `UsageError` unless a file can be written at ``path``, which the command calls ``option``."""
    _require_name(path, option)
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder", hint="name the file to write in it")
    if path.exists() and not overwrite:
        raise UsageError(f"`{path}` exists already", hint="choose another name, or overwrite it with -f")
    check_folder(path.parent, option)


def check_folder(folder: Path, option: str = "-o") -> None:
    """Raise `UsageError` unless a file can be made in ``folder``; tries it, as permissions do not tell all."""
    another = f"choose another place with {option}"
    if not folder.exists():
        raise UsageError(f"the folder `{folder}` does not exist", hint="create it first")
    if not folder.is_dir():
        raise UsageError(f"`{folder}` is not a folder", hint=another)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write into `{folder}`: {reason}", hint=another) from None


def remove_file(path: Path, option: str) -> None:
    """Take an older file away that is to begin anew; raises `UsageError` for a pipe or a device."""
    if path.exists() and not path.is_file():
        raise UsageError(f"`{path}` is not a file", hint=f"choose another name with {option}")
    path.unlink(missing_ok=True)


def make_folder(folder: Path, *, overwrite: bool = False, option: str = "-o", force: str = "-f") -> None:
    """Make a folder for results; raises `UsageError` when it holds something already, unless ``overwrite``.

    ``option`` is what the command calls the folder, ``force`` what lets it be written into, empty if nothing does.
    """
    another = f"choose another one with {option}"
    _require_name(folder, option)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"`{folder}` is not a folder", hint=another)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        hint = f"{another}, or write into it with {force}" if force else another
        raise UsageError(f"the folder `{folder}` is not empty", hint=hint)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    check_folder(existing, option)
    folder.mkdir(parents=True, exist_ok=True)


def _require_name(path: Path, option: str = "-o") -> None:
    """Raise `UsageError` for what no file can be called, or where it cannot even be asked for."""
    try:
        path.exists()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{path}`: {reason}", hint=f"choose another name with {option}") from None
