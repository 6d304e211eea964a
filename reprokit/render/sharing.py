"""Handing results over: a zip for attaching, a link to a form that is filled in, the command that creates an issue.

Nothing is sent from here. The zip holds the repro, its side files, the context and the issue text, always in the same
bytes.
"""

from __future__ import annotations

import shlex
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlencode

from reprokit.errors import UsageError
from reprokit.render.issue import Issue
from reprokit.render.literals import MAX_LITERALS
from reprokit.render.module import MODULE_FILE
from reprokit.render.script import Script
from reprokit.snapshot.files import replaced

MAX_URL = 8_000
ISSUE_FILE = "issue.md"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can name


def write_zip(path: Path, script: Script, issue: Issue, *, context: str = "", with_data: bool = False) -> Path:
    """Write the zip, with the text of the context beside the repro where there is one.

    Raises `UsageError` when the side file would hand out many recorded numbers unasked.
    """
    count = sum(tensor.numel() for tensor in script.side.values())
    if count > MAX_LITERALS and not (with_data or script.is_withheld):
        raise UsageError(
            f"the repro needs {count:,} recorded numbers, which may be training data",
            hint="attach them with --with-data, or leave all data out with --no-data",
        )
    with tempfile.TemporaryDirectory(prefix="reprokit-") as folder:
        script.write(Path(folder))
        if context:
            Path(folder, MODULE_FILE).write_text(context, encoding="utf-8")
        Path(folder, ISSUE_FILE).write_text(issue.text, encoding="utf-8")
        names = sorted(item.name for item in Path(folder).iterdir())
        with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in names:
                archive.writestr(_entry(name), Path(folder, name).read_bytes())
    return path


def issue_url(issue: Issue, repository: str | None = None) -> str | None:
    """A link to a new issue with title and text filled in, as much of it as fits; ``None`` when too little does.

    Raises `UsageError` without a repository.
    """
    target = repository or issue.repository
    if target is None:
        raise UsageError(
            "it is not known in which repository the issue belongs",
            hint="name it with --repo OWNER/NAME, or choose a --template that has one, such as pytorch",
            note=f"the template `{issue.template}` has none, and no remote on GitHub was recorded; "
            "without --url the text itself is printed",
        )
    urls = (
        f"https://github.com/{target}/issues/new?{urlencode({'title': issue.title, 'body': body})}"
        for body in (issue.text, issue.short)
    )
    return next((url for url in urls if len(url) <= MAX_URL), None)


def create_command(issue: Issue, file: Path | str, repository: str | None = None) -> str:
    """The command of GitHub's own tool that creates the issue, quoted for a shell."""
    target = repository or issue.repository
    where = ["--repo", target] if target is not None else []
    return shlex.join(["gh", "issue", "create", *where, "--title", issue.title, "--body-file", str(file)])


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry
