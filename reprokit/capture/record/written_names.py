"""The names that a call's arguments have where it is written, read from the source: ``model(x)`` was given ``x``."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator


def argument_names(filename: str, line: int, num_args: int, keywords: frozenset[str]) -> list[str | None]:
    """For every positional argument of the call on a line its variable's name, ``None`` where it is not a variable.

    Empty unless exactly one call on the line has that many positional arguments and these keywords.
    """
    calls = [call for call in _calls(filename) if call.lineno <= line <= (call.end_lineno or call.lineno)]
    fitting = [call for call in calls if _fits(call, num_args, keywords)]
    if len(fitting) != 1:
        return []
    return [argument.id if isinstance(argument, ast.Name) else None for argument in fitting[0].args]


def _fits(call: ast.Call, num_args: int, keywords: frozenset[str]) -> bool:
    is_plain = not any(isinstance(argument, ast.Starred) for argument in call.args)
    return is_plain and len(call.args) == num_args and {keyword.arg for keyword in call.keywords} == keywords


@functools.lru_cache(maxsize=16)
def _calls(filename: str) -> tuple[ast.Call, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_calls_in(tree))


def _calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))
