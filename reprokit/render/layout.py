"""Statements over several lines, laid out as `ruff format` does it, so that a repro passes its check.

Only the shapes that occur in a repro are known: calls, displays and assertions. What is longer than a line and has
another shape, and long lists of numbers, are filled line by line and marked ``# fmt: skip``. Needs no torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence

from reprokit.program.statement import parsed

WIDTH = 88
_INDENT = "    "
_MAX_ROWS = 12
_SKIP = "# fmt: skip"
_TAIL = re.compile(r"(?:\.\w+\([\w, -]*\))?")
_NUMBERS = re.compile(r"\[[^\[\]\"]{40,}\]")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'")
Part = tuple[str, str]
"""An argument or item: its keyword or key with the sign behind, and its value."""


class _UnknownShape(ValueError):
    """A piece that is too long and cannot be broken the way ruff would."""


def fold(line: str, width: int = WIDTH) -> list[str]:
    """A statement on one line, or over several when it is longer than ``width``."""
    if len(line) <= width:
        return [line]
    indent, statement = line[: len(line) - len(line.lstrip())], line.strip()
    try:
        lines = _statement(indent, statement, width)
    except (_UnknownShape, SyntaxError):
        return _filled(indent, statement, width)
    return _filled(indent, statement, width) if len(lines) > _MAX_ROWS and _NUMBERS.search(statement) else lines


def _statement(indent: str, statement: str, width: int) -> list[str]:
    found = parsed(statement)
    node = found.tree.body[0] if found is not None else None
    match node:
        case ast.Assert(_, ast.expr() as message):
            start, end = _ends(statement, message)
            return [f"{indent}{statement[:start]}(", f"{indent}{_INDENT}{statement[start:end]}", f"{indent})"]
        case ast.FunctionDef():
            return _expression(indent, "def ", statement[len("def ") : -1], ":", width)
        case (
            ast.Assign(_, value) | ast.AugAssign(_, _, value) | ast.Return(value) | ast.Expr(value) | ast.For(_, value)
        ):
            start, end = _ends(statement, value) if value is not None else (0, 0)
            return _expression(indent, statement[:start], statement[start:end], statement[end:], width)
    raise _UnknownShape


def _ends(text: str, node: ast.expr) -> tuple[int, int]:
    """The characters from and to which a part of a text of one line goes; those of `ast` count bytes."""
    start, end = (len(text.encode()[:column].decode()) for column in (node.col_offset, node.end_col_offset or 0))
    return start, end


def _expression(indent: str, prefix: str, text: str, suffix: str, width: int) -> list[str]:
    whole = f"{indent}{prefix}{text}{suffix}"
    if len(whole) <= width:
        return [whole]
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "(" in text[: _ends(text, node.func)[1]]:
        node = node.func.value
    start, parts = _parts(text, node)
    end = _ends(text, node)[1] - 1
    tail, is_call = text[end + 1 :], isinstance(node, ast.Call)
    if text[start] not in "([{" or _TAIL.fullmatch(tail) is None or not parts:
        raise _UnknownShape
    inner = indent + _INDENT
    joined = f"{inner}{', '.join(f'{name}{value}' for name, value in parts)}"
    if is_call and len(joined) <= width:
        body = [joined]
    else:
        comma = "" if is_call and len(parts) == 1 else ","
        body = [line for name, value in parts for line in _expression(inner, name, value, comma, width)]
    return [f"{indent}{prefix}{text[: start + 1]}", *body, f"{indent}{text[end]}{tail}{suffix}"]


def _parts(text: str, node: ast.expr) -> tuple[int, Sequence[Part]]:
    """The position of the bracket of a call or display, and what is in it; raises `_UnknownShape` for anything else."""

    def value(part: ast.expr) -> str:
        start, end = _ends(text, part)
        return text[start:end]

    match node:
        case ast.Call(function, args, keywords) if "(" not in value(function):
            parts = [*(("", value(part)) for part in args), *((f"{key.arg}=", value(key.value)) for key in keywords)]
            return _ends(text, function)[1], parts
        case ast.List(items) | ast.Tuple(items):
            return _ends(text, node)[0], [("", value(part)) for part in items]
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return _ends(text, node)[0], [(f"{value(key)}: ", value(part)) for key, part in pairs if key is not None]
    raise _UnknownShape


def _filled(indent: str, statement: str, width: int) -> list[str]:
    """The largest bracket filled with as many words to a line as fit, out of ruff's reach."""
    start, end = _largest_bracket(_STRING.sub(lambda text: "_" * len(text[0]), statement))
    inside = _STRING.sub(lambda text: text[0].replace(" ", "\0"), statement[start:end])
    inner = indent + _INDENT
    rows = textwrap.wrap(inside, width, initial_indent=inner, subsequent_indent=inner, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
    lines = [indent + statement[:start], *rows, indent + statement[end:]] if rows else [indent + statement]
    return [*(line.replace("\0", " ") for line in lines[:-1]), f"{lines[-1]}  {_SKIP}"]


def _largest_bracket(text: str) -> tuple[int, int]:
    opened, spans = list[int](), [(0, 0)]
    for position, character in enumerate(text):
        if character in "([{":
            opened.append(position + 1)
        elif character in ")]}" and opened:
            spans.append((opened.pop(), position))
    return max(spans, key=lambda span: span[1] - span[0])
