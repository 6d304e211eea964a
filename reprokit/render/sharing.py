"""Handing results over: a zip for attaching, and the command that creates an issue.

Nothing is sent from here. The zip holds the repro, its side files, the context and the issue text, always in the same
bytes.
"""

from __future__ import annotations

import shlex
import tempfile
import zipfile
from pathlib import Path

from reprokit.errors import UsageError
from reprokit.render.issue import Issue
from reprokit.render.literals import MAX_LITERALS
from reprokit.render.module import MODULE_FILE
from reprokit.render.script import Script
from reprokit.snapshot.files import replaced

ISSUE_FILE = "issue.md"
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


def create_command(issue: Issue, file: Path | str, repository: str | None = None) -> str:
    """The command of GitHub's own tool that creates the issue, quoted for a shell."""
    target = repository or issue.repository
    where = ["--repo", target] if target is not None else []
    return shlex.join(["gh", "issue", "create", *where, "--title", issue.title, "--body-file", str(file)])
