"""The statement that a call was written in, as a tree; the expression of the call in it; the variables it assigns."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reprokit.program.ir import Call, Ref, Site, Span


@dataclass(frozen=True, slots=True)
class ParsedStatement:
    """A statement that is whole; of a compound statement its head.

    ``before`` and ``after`` are what it takes to make a statement of it: columns of ``tree`` are places in ``body``.
    """

    body: str
    tree: ast.Module
    before: str = ""
    after: str = ""


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> ParsedStatement | None:
    """The statement as a tree, ``None`` where it is not whole."""
    before, after = "el" * text.startswith("elif "), " pass" * text.endswith(":")
    body = f"{text.removeprefix(before)}{after}"
    try:
        return ParsedStatement(body, ast.parse(body), before, after) if body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parts(site: Site | None) -> Sequence[ast.AST]:
    """The expressions with the span of a call: its own; for an augmented assignment also the statement.

    Empty for a call inside a library, and without a statement or span.
    """
    if site is None or site.library is not None or site.span is None:
        return ()
    return _parts(site.text, site.span)


@functools.lru_cache(maxsize=1024)
def _parts(text: str, span: Span) -> Sequence[ast.AST]:
    statement = parsed(text)
    if statement is None:
        return ()
    removed = len(statement.before) * (span[0] == 1), len(statement.before) * (span[2] == 1)
    wanted = (span[0], span[1] - removed[0], span[2], span[3] - removed[1])
    return [node for node in ast.walk(statement.tree) if wanted in _spans(node)]


def _spans(node: ast.AST) -> Iterator[tuple[int, int, int, int]]:
    """The span of a node, and for a method behind a line break the one that Python gives its call: from the name on."""
    if isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno is not None and node.end_col_offset is not None:
        end = (node.end_lineno, node.end_col_offset)
        yield node.lineno, node.col_offset, *end
        if isinstance(node, ast.Call) and isinstance(owner := node.func, ast.Attribute):
            column = (owner.end_col_offset or 0) - len(owner.attr.encode())
            yield owner.end_lineno or 0, column, *end


def called_name(node: ast.AST) -> str:
    """The last part of the name that a part of a statement calls, empty if it calls none."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def variables(calls: Sequence[Call]) -> dict[int, str]:
    """The variables that statements assign the results of calls to.

    A layer may make several calls; the last of them returns what is assigned.
    """
    found: dict[int, str] = {}
    for position, call in enumerate(calls):
        following = calls[position + 1].site if position + 1 < len(calls) else None
        for part in parts(call.site):
            is_itself = not isinstance(part, ast.Call) or called_name(part) == call.name
            if is_itself or following != call.site:
                for value, name in _matched(call, _assigned(call, part)):
                    found.setdefault(value, name)
    return found


def _assigned(call: Call, part: ast.AST) -> Sequence[str]:
    """The variables that a statement assigns exactly one of its parts to, with empty names for other targets."""
    statement = parsed(call.site.text) if call.site is not None else None
    for target, value in _assignments(statement.tree) if statement is not None else ():
        if value is part:
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            return [name.id if isinstance(name, ast.Name) else "" for name in names]
    return ()


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and what they are assigned, in ``a, b = x, y`` each by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            yield target, value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=False)


def _matched(call: Call, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The values of a result with the variables of an assignment."""
    outputs = [call.outputs] if isinstance(call.outputs, Ref) else call.outputs
    if isinstance(outputs, (tuple, list)) and len(outputs) == len(names):
        pairs = zip(outputs, names, strict=True)
        yield from ((ref.value, name) for ref, name in pairs if isinstance(ref, Ref) and name)
