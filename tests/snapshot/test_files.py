"""Files that are replaced in one step keep their place and mode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from reprokit.snapshot.files import write_text

posix = pytest.mark.skipif(sys.platform == "win32", reason="modes, links and /dev of Unix")


@posix
def test_a_link_stays_and_its_target_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, first, second = tmp_path / "far" / "x.md", tmp_path / "first.md", tmp_path / "second.md"
    target.write_text("old")
    target.chmod(0o600)
    first.symlink_to("far/x.md")
    second.symlink_to("first.md")
    write_text(second, "new")
    assert second.is_symlink() and first.is_symlink() and not target.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o600)
    (tmp_path / "dangling").symlink_to("far/y.md")
    write_text(tmp_path / "dangling", "new")
    assert {path.name for path in (tmp_path / "far").iterdir()} == {"x.md", "y.md"}


@posix
def test_an_open_file_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as file:
        inode = os.fstat(file.fileno()).st_ino
        write_text(Path(f"/dev/fd/{file.fileno()}"), "text\n")
    assert log.read_text() == "before\ntext\n" and log.stat().st_ino == inode
    write_text(Path(os.devnull), "text")
