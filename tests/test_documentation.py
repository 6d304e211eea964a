"""The documentation keeps up with the code: every error has its paragraph, every command its page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprokit import errors

ROOT = Path(__file__).parent.parent
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def messages() -> Iterator[str]:
    """The message of every error that the code makes, with an ellipsis for what is filled in."""
    for file in sorted((ROOT / "reprokit").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                text = shown(node.args[0])
                if text is not None:
                    yield text


def shown(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def headings(page: str) -> list[str]:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("### ") for line in lines if line.startswith("### ")]


def test_every_message_is_explained() -> None:
    written = set(messages())
    assert len(written) > 50
    assert sorted(written - set(headings("messages.md"))) == []


def test_every_message_has_one_anchor() -> None:
    found = headings("messages.md")
    assert len(found) == len(set(found))


@pytest.mark.parametrize("command", ["capture", "show", "shrink", "whatif", "render", "verify", "demo"])
def test_every_command_has_a_page(command: str) -> None:
    assert f"reprokit {command}" in (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in (part.partition(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]):
            if "://" not in target:
                assert (page.parent / target.partition("#")[0]).exists(), (page.name, target)
