"""What may leave the machine: no credentials, no personal paths, no more of the user's source than the policy allows.

The types of the fields say what each text is (`reprokit.grammar`), and `private` walks them, so that a new field cannot
be forgotten. The policy ``none`` takes every quotation of code out of a sentence; the words beside it stay.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reprokit import grammar
from reprokit.grammar import Kind, mapped
from reprokit.program.ir import OPAQUE, Call, Program, Site
from reprokit.snapshot.redact import (
    redact_argv,
    redact_sentence,
    redact_source,
    redact_text,
    without_source,
)
from reprokit.snapshot.source import Source, SourceState

T = TypeVar("T")
# A name that is an expression is a piece of source: `x[:, 0]`, `scale(x)`, `a - b`. `layers.0.weight`, `<Net>` and a
# noted `loss (train)` are none.
_EXPRESSION = re.compile(r"\w[\[(]|=|\s(?:[-+*/@%&|<>]|return|in|not|and|or|if)\s|^(?:return|del|assert|raise)\s")


def private(content: T, source: Source = "all", lines: Set[str] = frozenset()) -> T:
    """A snapshot, reduction, failure or event without credentials, personal paths and source beyond the policy.

    ``lines`` are those of the user's code, where they are known; with ``none`` no text keeps one of them.
    """
    policy = _Policy(source, frozenset(lines) if source == "none" else frozenset())
    made: T = mapped(type(content), content, policy.text, policy.finish)
    return made


@dataclass(frozen=True, slots=True)
class _Policy:
    source: Source
    lines: frozenset[str]

    def text(self, kind: Kind, text: str) -> str:
        # a text of one line may be a number or an option, which a line of code may be as well
        return _changed(kind, text, self.source, self.lines if kind is grammar.text else frozenset())

    def finish(self, before: Any, after: Any) -> Any:
        """What one text of a dataclass says about another."""
        if isinstance(after, Site):
            return self._site(before, after)
        if isinstance(after, Call) and after.target == OPAQUE:
            return self._opaque(before, after)
        if isinstance(after, SourceState):
            return self._changes(before, after)
        if isinstance(command := getattr(after, "command", None), list):
            after = replace(after, command=redact_argv(command))
        if isinstance(getattr(after, "program", None), Program) and self.source == "traceback":
            return replace(after, program=_origin_alone(after.program, after.failure.call_index))
        return after

    def _site(self, before: Site, after: Site) -> Site:
        """The place of a call in a statement is that in the text as it was."""
        is_in_place = self.source != "none" and after.text.encode().startswith(before.up_to_call)
        return after if is_in_place else replace(after, statement="", span=None)

    def _opaque(self, before: Call, after: Call) -> Call:
        """The source of a custom function is kept among the arguments of its call."""
        text = before.kwargs.get("source")
        kept = redact_source(text) if isinstance(text, str) and self.source != "none" else ""
        return replace(after, kwargs={**after.kwargs, "source": kept})

    def _changes(self, before: SourceState, after: SourceState) -> SourceState:
        """A command line tells a secret by the flag before it; uncommitted changes may be of any kind of file."""
        kept = before.diff if self.source == "all" else ""
        command = tuple(redact_argv(after.command)) if after.command is not None else None
        is_cut = before.diff_truncated and bool(kept)
        return replace(after, command=command, diff=redact_text(kept), diff_truncated=is_cut)


def _origin_alone(program: Program, origin: int | None) -> Program:
    """A traceback shows the source of the one custom function that failed."""
    others = {n for n, call in enumerate(program.calls) if call.target == OPAQUE and n != origin}
    if not others:
        return program
    calls = list(program.calls)
    for number in others:
        calls[number] = replace(calls[number], kwargs={**calls[number].kwargs, "source": ""})
    return replace(program, calls=tuple(calls))


@functools.lru_cache(maxsize=2**13)  # the names and lines of a step stand at many calls
def _changed(kind: Kind, text: str, source: Source, lines: frozenset[str]) -> str:
    """A text of a kind as the policy lets it out."""
    if kind in (grammar.digest, grammar.rows, grammar.link):
        return text
    if kind is grammar.listing:
        return redact_source(text) if source == "all" else ""
    if kind in (grammar.code, grammar.statement):
        return redact_source(text) if source != "none" else ""
    if kind in (grammar.text, grammar.line):
        return redact_sentence(text) if source != "none" else redact_text(without_source(text, lines))
    if kind is grammar.name and source == "none" and _EXPRESSION.search(text):
        # a name has no marks: it is a key of other fields, and stands in inline code
        return f"name_{zlib.crc32(text.encode('utf-8', 'replace')):08x}"  # alike wherever the step has it
    return redact_text(text)
