"""The benchmark of hostile files in short, what it would notice, and texts that stay in their place."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reprokit.render.gate import require_closed
from reprokit.render.script import write_script
from reprokit.render.templates import jinja_environment
from reprokit.render.wording import prose
from reprokit.words import visible, visible_line, visible_name
from tests.conftest import import_benchmark
from tests.render.programs import masked_softmax, snapshot_of

ANYTHING = st.text() | st.lists(
    st.sampled_from(["`", "``", "<b>", "-->", "--", "|", "\n", "\r", "\\", '"""', "'", "#", "[a](b)", "*", "_", "&lt;",
                     "~~~", "\x1b[2J", "\x85", "\u2028", "1.", "- ", "{{", "x", " ", "print(1)", "<!--", "```"])
).map("".join)  # fmt: skip
TEXT_OR_CODE = {"text", "text_special", "code_inline", "softbreak"}


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    """The benchmark, with one thread, because it opens files in forked children."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield import_benchmark("hostile")
    torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="opens files in forked children")
def test_files_from_strangers(hostile: ModuleType, tmp_path: Path) -> None:
    seeds = hostile.make_seeds(tmp_path / "seeds", ("backward",), is_quick=True)
    fields = hostile.spread(list(hostile.field_trials(seeds, tmp_path)), 40)
    crafted: list[Any] = []
    for trials, batch in ((fields, 40), (crafted, 1), (islice(hostile.mutations(seeds, 0), 120), 40)):
        tried = list(trials)
        counts = hostile.try_all(tried, tmp_path, batch, 2)
        assert counts.files == len(tried)
        assert counts.accepted
        assert counts.first == {}
        if trials is fields:
            joined = list(hostile.joined(counts.accepted, seeds))
            crafted += [replace(trial, number=1) for trial in hostile.spread(joined, 3)]


@pytest.mark.parametrize("text", ["<script>x</script>", "[a](https://hostile0)", "![a](hostile0)", "# hostile0", "<b>"])
def test_markup_in_an_issue_is_noticed(hostile: ModuleType, text: str) -> None:
    assert hostile.markdown_escapes(f"A\n\n{text}\n")
    shown = f"A\n\n```text\n{text}\n```\n\n<details><summary>x</summary>\n\n`{text}`\n\n</details>\n"
    assert not hostile.markdown_escapes(shown)


@pytest.mark.parametrize("text", ["<img src=x>", "<a href='javascript:x'>", "<p onclick=x>", "<style>hostile0</style>"])
def test_markup_in_a_report_is_noticed(hostile: ModuleType, text: str) -> None:
    assert hostile.html_escapes(f"<p>{text}</p>")
    assert not hostile.html_escapes("<p title='hostile0'><code>hostile0</code></p>")


@settings(max_examples=100)
@given(ANYTHING)
@example("__0__")
def test_prose_is_text_and_code(text: str) -> None:
    paragraphs = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(f"- {prose(visible(text))} end")
    assert {token.type for token in paragraphs} <= {
        "bullet_list_open", "list_item_open", "paragraph_open", "inline", "paragraph_close", "list_item_close",
        "bullet_list_close",
    }  # fmt: skip
    assert {inner.type for token in paragraphs for inner in token.children or ()} <= TEXT_OR_CODE


@settings(max_examples=100)
@given(ANYTHING)
def test_an_html_comment_stays_a_comment(text: str) -> None:
    shown = jinja_environment().filters["in_comment"](text)
    assert "-->" not in f"<!--{shown}" and "--!>" not in shown and "\n" not in shown


@settings(max_examples=30)
@given(ANYTHING)
def test_any_text_leaves_the_code_of_a_repro_as_it_is(text: str) -> None:
    snapshot = snapshot_of(masked_softmax())
    name = visible_name(text)
    program = replace(snapshot.program, inputs=tuple(replace(item, name=name) for item in snapshot.program.inputs))
    script = write_script(program, snapshot.tensors, snapshot.failure, torch_version=visible_line(text)).text
    require_closed(script)
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    assert len(calls) == len(_calls_of(snapshot))


def _calls_of(snapshot: Any) -> list[ast.AST]:
    script = write_script(snapshot.program, snapshot.tensors, snapshot.failure, torch_version="2").text
    return [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
