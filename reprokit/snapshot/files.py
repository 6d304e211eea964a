"""Files that are whole or not there: written beside their place, flushed to disk, and moved into it in one step.

A killed process leaves the old file or the new one, and at most a hidden temporary file beside it. The path of a
command is checked first; the error suggests files that may have been meant.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from reprokit.errors import UsageError

_KEPT = 40  # characters of a name, so that the temporary one is not too long


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` at the end, with its mode; a symlink stays, its target is replaced.

    Output to pipes, devices and ``/dev/stdout`` is appended directly. Raises `OSError` when the disk refuses, and
    leaves nothing half-written.
    """
    is_of_system = os.path.abspath(path).startswith(("/dev/", "/proc/"))  # even where it leads to an open file
    if is_of_system or (path.exists() and not path.is_file()):
        with path.open("ab") as device:
            yield device
        return
    given, path = path, Path(os.path.realpath(path))
    umask = os.umask(0)
    os.umask(umask)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~umask
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:_KEPT]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(given), None  # and not the temporary one
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file with `replaced`."""
    with replaced(path) as file:
        file.write(text.encode())


REDUCTION_FILE = "reduction.pt"
REPRO_FILE = "repro.py"
RESULTS = (
    *(REPRO_FILE, "repro_inputs.pt", "repro_module.py", "test_repro.py"),
    *("summary.md", "issue.md", "report.html"),
)
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
        beside = f"; beside it {_there_are(near)}" if near else ""
        return f"it holds what `reprokit shrink` made of a snapshot: name that snapshot{beside}"
    return "it holds no snapshot; `reprokit capture` prints where it wrote one"


def snapshots_in(folder: Path) -> list[Path]:
    """Files that are snapshots by their names."""
    return sorted(file for file in folder.glob("*.repro.pt") if file.is_file())


def _hint_for_missing(path: Path, wanted: str) -> str:
    if wanted == "repro":
        return "give a repro.py, or the .pt file of a snapshot or reduction"
    near = snapshots_in(path.parent) if path.parent.is_dir() else []
    return _there_are(near) if near else "`reprokit capture` prints where it wrote the snapshot"


def _there_are(files: Sequence[Path]) -> str:
    return f"there {'is' if len(files) == 1 else 'are'} {_listed(files)}"


def _listed(files: Sequence[Path]) -> str:
    more = len(files) - _MAX_NAMED
    return ", ".join(map(str, files[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")
