"""The gallery is what the commands write: made again and compared, but for versions, durations and the machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).resolve().parents[2] / "examples" / "gallery"
CODE = ("repro.py", "repro_module.py", "test_repro.py")
_VARIES = re.compile(
    r"\d+\.\d+\.\d+[\w.+]*"  # versions
    r"|\d+(?:\.\d+)? ?(?:ms|s|min|µs|us)\b"  # durations
)


def read(file: Path) -> str | None:
    return masked(file.read_text(encoding="utf-8")) if file.is_file() else None


def masked(text: str) -> str:
    """Without versions, durations, the what-if table and what follows the heading about the machine.

    The tests run without the table, whose rows depend on devices and compilers.
    """
    for heading in ("\n### Versions\n", "<summary>Versions</summary>"):
        text = text.partition(heading)[0]
    rows = [line for line in text.splitlines() if not line.startswith("| ")]
    return re.sub(r"\n{3,}", "\n\n", _VARIES.sub("#", "\n".join(rows)))


def headings(html: str) -> list[str]:
    found = (re.sub(r"<[^>]*>", "", inner).strip() for inner in re.findall(r"<h[12][^>]*>(.*?)</h[12]>", html, re.S))
    return [heading for heading in found if heading != "What if"]


@pytest.mark.parametrize("name", ["forward", "backward", "optimizer"])
def test_the_gallery_is_reproducible(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(GALLERY / "make.py"), "--into", str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for file in CODE:
        assert read(tmp_path / name / file) == read(GALLERY / name / file), file
    issue = read(GALLERY / name / "issue.md")
    assert issue is not None and read(tmp_path / name / "issue.md") == issue
    made, kept = ((folder / name / "report.html").read_text(encoding="utf-8") for folder in (tmp_path, GALLERY))
    assert headings(made) == headings(kept) != []


def test_the_repros_fail() -> None:
    for repro in sorted(GALLERY.glob("*/repro*.py")):
        done = subprocess.run([sys.executable, "-I", str(repro)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "AssertionError" in done.stderr, repro
