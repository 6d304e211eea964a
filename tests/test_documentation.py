"""The documentation keeps up with the code: every error has its paragraph, every command its page."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprokit import errors
from reprokit.cli.app import _parse, app

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


@pytest.mark.parametrize("command", app.commands)
def test_every_command_has_a_page(command: str) -> None:
    assert f"reprokit {command}" in (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of reprokit in the pages, with its page."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^(?:    |\$ )?(reprokit [a-z].*)$", text, re.MULTILINE)
        for line in (*lines, *re.findall(r"`(reprokit [a-z][^`\n]*)`", text)):
            words = re.split(r"\s+#|[>|]", line)[0]
            if not re.search(r"[…\[\](]|FILE\\|:$|'[^']*$", words):
                yield page.name, shlex.split(words)[1:]


INCOMPLETE = re.compile(r"missing argument|no script given|requires an argument")  # it is mentioned, not called


def test_every_shown_command_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [found for found in shown_commands() if len(found[1]) > 1 and found[1][0] in app.commands]
    assert len(shown) > 60
    wrong = []
    for page, words in shown:
        try:
            _parse(words)
        except errors.UsageError as error:
            wrong += [(page, words, error.message)] if not INCOMPLETE.search(error.message) else []
    assert wrong == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in (part.partition(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]):
            if "://" not in target:
                assert (page.parent / target.partition("#")[0]).exists(), (page.name, target)


def named_files(page: str) -> Iterator[str]:
    """What a page names in backticks and looks like a file or folder of the package."""
    for code in re.findall(r"`([\w./*-]+)`", (ROOT / page).read_text(encoding="utf-8")):
        if code.endswith((".py", "/", ".j2")):
            yield code.removesuffix("/")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/internals.md"])
def test_every_file_that_the_architecture_names_is_there(page: str) -> None:
    globs = ("*", "reprokit/**/*", "templates/**/*", "tests/**/*")
    found = {str(path.relative_to(ROOT)) for pattern in globs for path in ROOT.glob(pattern)}
    named = set(named_files(page))
    assert len(named) > 20
    assert sorted(name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in found)) == []


def test_the_architecture_is_short() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 120
