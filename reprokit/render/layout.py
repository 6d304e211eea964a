"""Statements over several lines, laid out as `ruff format` does it, so that a repro passes its check.

Only the shapes that occur in a repro are known: calls, displays and assertions. What is longer than a line and has
another shape, and long lists of numbers, are filled line by line and marked ``# fmt: skip``. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

WIDTH = 88
_INDENT = "    "
_MAX_ROWS = 12
_SKIP = "# fmt: skip"
_OPEN = "([{"
_CLOSE = ")]}"
_PREFIX = re.compile(r"(?:\w+=(?!=)|\"[^\"\\]*\": )")
_SHAPE = re.compile(r"(?:[\w.]+(?:\[[^\[\](){}]*\]\.[\w.]+)*)?(?=[(\[{])")
_TAIL = re.compile(r"(?:\.\w+\([\w, -]*\))?")
_NUMBERS = re.compile(r"\[[^\[\]\"]{40,}\]")


class _UnknownShape(ValueError):
    """A piece that is too long and cannot be broken the way ruff would."""


def fold(line: str, width: int = WIDTH) -> list[str]:
    """A statement on one line, or over several when it is longer than ``width``."""
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    statement = line.strip()
    if statement.startswith("assert "):
        return _assertion(indent, statement)
    try:
        lines = _statement(indent, statement, width)
    except _UnknownShape:
        return _filled(line, width)
    return _filled(line, width) if len(lines) > _MAX_ROWS and _NUMBERS.search(statement) else lines


def _assertion(indent: str, statement: str) -> list[str]:
    condition, message = _split(statement)
    return [f"{indent}{condition}, (", f"{indent}{_INDENT}{message}", f"{indent})"]


def _statement(indent: str, statement: str, width: int) -> list[str]:
    found = re.match(r"(?:def |return |for \w+ in )?", statement)
    assert found is not None, "everything is optional"
    prefix = found.group()
    equals = _assignment(statement)
    if not prefix and equals is not None:
        prefix = statement[:equals]
    suffix = ":" if statement.endswith(":") else ""
    return _expression(indent, prefix, statement[len(prefix) : len(statement) - len(suffix)], suffix, width)


def _assignment(statement: str) -> int | None:
    """The position of the value of an assignment."""
    for position, character, depth in _depths(statement):
        if depth == 0 and character == "=" and statement[position + 1 : position + 2] == " ":
            is_comparison = statement[position - 1] in "=<>!"
            return None if is_comparison else position + 2
    return None


def _expression(indent: str, prefix: str, text: str, suffix: str, width: int) -> list[str]:
    whole = f"{indent}{prefix}{text}{suffix}"
    if len(whole) <= width:
        return [whole]
    shape = _SHAPE.match(text)
    if shape is None:
        raise _UnknownShape
    start = shape.end()
    end = _closing(text, start)
    tail, bracket, parts = text[end + 1 :], text[start], _split(text[start + 1 : end])
    is_call = bool(shape.group())
    if _TAIL.fullmatch(tail) is None or not parts or (is_call and bracket != "("):
        raise _UnknownShape
    if bracket == "(" and not is_call and len(parts) == 1:
        raise _UnknownShape
    inner = indent + _INDENT
    joined = f"{inner}{', '.join(parts)}"
    if is_call and len(joined) <= width:
        body = [joined]
    else:
        comma = "" if is_call and len(parts) == 1 else ","
        body = [line for part in parts for line in _part(inner, part, comma, width)]
    return [f"{indent}{prefix}{text[: start + 1]}", *body, f"{indent}{text[end]}{tail}{suffix}"]


def _part(indent: str, part: str, comma: str, width: int) -> list[str]:
    """One argument or item, with its keyword or key."""
    found = _PREFIX.match(part)
    prefix = found.group() if found is not None else ""
    return _expression(indent, prefix, part[len(prefix) :], comma, width)


def _filled(line: str, width: int) -> list[str]:
    """Broken at the commas of the largest bracket, as many parts to a line as fit, out of ruff's reach."""
    lines = _fill(line, width)
    return [*lines[:-1], f"{lines[-1]}  {_SKIP}"]


def _fill(line: str, width: int) -> list[str]:
    span = _largest_bracket(line) if len(line) > width else None
    if span is None:
        return [line]
    start, end = span
    indent = " " * (len(line) - len(line.lstrip()) + len(_INDENT))
    parts = [f"{part}," for part in _split(line[start + 1 : end])]
    if len(parts) == 1:
        parts[0] = line[start + 1 : end]
    rows: list[str] = []
    for part in parts:
        if rows and len(rows[-1]) + 1 + len(part) <= width:
            rows[-1] += f" {part}"
        else:
            rows.append(indent + part)
    folded = [piece for row in rows for piece in _fill(row, width)]
    return [line[: start + 1], *folded, indent[len(_INDENT) :] + line[end:].lstrip()]


def _largest_bracket(line: str) -> tuple[int, int] | None:
    """The ends of the largest outermost bracket that is not empty."""
    spans, start = list[tuple[int, int]](), 0
    for position, character, depth in _depths(line):
        if character in _OPEN and depth == 1:
            start = position
        elif character in _CLOSE and depth == 0 and position - start > 1:
            spans.append((start, position))
    return max(spans, key=lambda span: span[1] - span[0], default=None)


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at ``start``, the first one."""
    closing = (position for position, _, depth in _depths(text) if position >= start and depth == 0)
    try:
        return next(closing)
    except StopIteration:
        raise _UnknownShape from None


def _split(inside: str) -> list[str]:
    """The parts between the commas that are in no inner bracket."""
    commas = [position for position, character, depth in _depths(inside) if character == "," and depth == 0]
    parts = (inside[start + 1 : end].strip() for start, end in zip([-1, *commas], [*commas, len(inside)], strict=True))
    return [part for part in parts if part]


def _depths(line: str) -> Iterator[tuple[int, str, int]]:
    """Positions and characters outside of string literals, and how many brackets are open behind each."""
    depth = 0
    for position, character in code_characters(line):
        depth += (character in _OPEN) - (character in _CLOSE)
        yield position, character, depth


def code_characters(line: str) -> Iterable[tuple[int, str]]:
    """Positions and characters outside of string literals."""
    quote, is_escaped = "", False
    for position, character in enumerate(line):
        if is_escaped:
            is_escaped = False
        elif quote and character == "\\":
            is_escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            yield position, character
