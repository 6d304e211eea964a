"""Syntax trees as source text, laid out as `ruff format` does it.

Every script is made of `ast` nodes. What comes from a file gets into one as a constant (`constant`) or as a name whose
parts were checked (`path`), never as text. Lines over `WIDTH` are folded at the commas of a call or display; long lists
of numbers, and what has another shape, are filled line by line and marked ``# fmt: skip``. Needs no torch.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reprokit.errors import SnapshotError
from reprokit.program.ir import Device, Slice, Symbol

WIDTH = 88
Leaf = Callable[[Any], ast.expr]
_INDENT = "    "
_MAX_ROWS = 12
_STANDARD = {
    "runpy": "import runpy",
    "Path": "from pathlib import Path",
    "SimpleNamespace": "from types import SimpleNamespace",
}
_SKIP = "  # fmt: skip"
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*|\[\d+\])*")
# What stands before the bracket that is opened, and after it: a target, a keyword or a key, and a name; another call.
_HEAD = re.compile(r"(def |for .+ in |with |return |[^()=]+ \S?= |\w+=|\"\w+\": )?([\w.]+(\[\w+\])?[\w.]*\(|[(\[{])")
_TAIL = re.compile(r"[)\]}](?:\.\w+\([\w, -]*\))?[:,]?")
_NUMBERS = re.compile(r"\[[^\[\]\"]{40,}\]")
_STRING = re.compile(r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')")
# Powers of a name or number and another one have no spaces.
_POWER = re.compile(r"(?<![\w.)\]])([^\W\d][\w.]*|\d[\w.]*(?:e-\d+)?) \*\* (-?[\w.]+(?:e-\d+)?)(?![\w.(\[])")


def path(text: str) -> ast.expr:
    """``x``, ``self.fc.weight``, ``parts[0]`` or ``torch.exp`` as a node; raises `SnapshotError` for anything else."""
    with contextlib.suppress(SyntaxError):  # of a keyword, such as in `blocks.in.weight`
        if _PATH.fullmatch(text):
            return ast.parse(text, mode="eval").body
    raise SnapshotError(f"`{text:.80}` is no name that a script may hold")


def constant(value: bool | int | float | complex | str | None) -> ast.expr:
    """A Python constant that reads back as the same value."""
    if isinstance(value, complex):
        return ast.Call(path("complex"), [constant(value.real), constant(value.imag)], [])
    if isinstance(value, float) and not math.isfinite(value):
        return ast.Call(path("float"), [ast.Constant(str(value))], [])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.copysign(1, value) < 0:  # type: ignore[arg-type]
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))  # type: ignore[operator]
    return ast.Constant(value)


def argument(value: Any, leaf: Leaf) -> ast.expr:
    """One argument of a call; ``leaf`` writes what is not plain (a `Ref`)."""
    match value:
        case list():
            return ast.List([argument(item, leaf) for item in value])
        case tuple():
            return ast.Tuple([argument(item, leaf) for item in value])
        case Mapping():
            return ast.Dict([argument(key, leaf) for key in value], [argument(item, leaf) for item in value.values()])
        case Slice():
            return call("slice", [argument(part, leaf) for part in (value.start, value.stop, value.step)])
        case Symbol():
            return path(value.name if value.name.startswith("torch.") else f"torch.{value.name}")
        case Device():
            return ast.Constant(value.name)
        case None | bool() | int() | float() | complex() | str():
            return constant(value)
        case _ if value is Ellipsis:
            return ast.Constant(...)
    return leaf(value)


def subscript(owner: ast.expr, index: Any, leaf: Leaf) -> ast.expr:
    """``owner[index]``, with slices in their own notation."""

    def part(item: Any) -> ast.expr:
        if isinstance(item, Slice):
            bounds = (None if bound is None else argument(bound, leaf) for bound in (item.start, item.stop, item.step))
            return ast.Slice(*bounds)
        return argument(item, leaf)

    return ast.Subscript(owner, ast.Tuple(list(map(part, index))) if isinstance(index, tuple) else part(index))


Keywords = Mapping[str, ast.expr]


def call(callee: str | ast.expr, args: Sequence[ast.expr] = (), kwargs: Keywords | None = None) -> ast.Call:
    """``callee(args, name=value)``."""
    function = path(callee) if isinstance(callee, str) else callee
    return ast.Call(function, list(args), [ast.keyword(name, value) for name, value in (kwargs or {}).items()])


def method(owner: ast.expr, name: str, args: Sequence[ast.expr] = (), kwargs: Keywords | None = None) -> ast.Call:
    """``owner.name(args)``."""
    return call(ast.Attribute(owner, name), args, kwargs)


def assign(target: ast.expr, value: ast.expr) -> ast.stmt:
    return ast.Assign([target], value)


def fill(template: str, **nodes: ast.expr) -> list[ast.stmt]:
    """The statements of a template with a node in the place of each name in capitals."""
    return [mapped(s, lambda n: nodes.get(n.id) if isinstance(n, ast.Name) else None) for s in ast.parse(template).body]


def define(name: str, arguments: Sequence[str], body: Iterable[ast.stmt]) -> ast.FunctionDef:
    """The function ``def name(arguments):``."""
    made = ast.parse(f"def {text(path(name))}({', '.join(text(path(word)) for word in arguments)}): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = list(body)
    return made


def mapped(node: Any, change: Callable[[ast.AST], ast.AST | None]) -> Any:
    """A copy of a tree, with the node that ``change`` gives in the place of another."""
    if isinstance(node, list):
        return [mapped(item, change) for item in node]
    if not isinstance(node, ast.AST):
        return node
    made = change(node)
    if made is not None:
        return made
    fields = {name: mapped(value, change) for name, value in ast.iter_fields(node)}
    return ast.copy_location(type(node)(**fields), node)


def text(node: ast.AST) -> str:
    """The node in one line."""
    written = ast.unparse(ast.fix_missing_locations(spelled(node)))
    pieces = _STRING.split(written)
    return "".join(piece if place % 2 else _POWER.sub(r"\1**\2", piece) for place, piece in enumerate(pieces))


def spelled(node: ast.AST) -> Any:
    """A copy whose texts are in double quotes, and whose floats have no zeros in their exponent."""

    def change(part: ast.AST) -> ast.AST | None:
        match part:
            case ast.JoinedStr():
                return part
            case ast.Constant(str() as value):
                return ast.Name(quoted(value))
            case ast.Constant(float() as value):
                return ast.Name(float_text(value))
            case ast.UnaryOp(operator, ast.BinOp(_, ast.Pow()) as power):
                return ast.UnaryOp(operator, ast.Name(f"({text(power)})"))
        return None

    return mapped(node, change)


def float_text(value: float) -> str:
    """The shortest text of a float: ``1e30``, ``0.5``, ``float("-inf")``."""
    if not math.isfinite(value):
        return f'float("{value}")'
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def quoted(text: str) -> str:
    """A string literal in ASCII and the quotes that need no escape; JSON would make two characters of an emoji."""
    if '"' in text and "'" not in text and "\\" not in text and text.isprintable() and text.isascii():
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()


def imports_of(statements: Iterable[ast.AST]) -> list[str]:
    """The imports that statements need, in ruff's order."""
    used = {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
    found = [line for name, line in _STANDARD.items() if name in used]
    lines = [*found, *([""] if found else []), "import torch"]
    lines += ["import torch.nn.functional as F"] if "F" in used else []
    return [*lines, *(["from torch import nn"] if "nn" in used else [])]


def script(header: Sequence[str], *parts: Sequence[ast.stmt]) -> str:
    """A whole script: a comment, imports, and statements in parts with a blank line between them."""
    made = [*(f"# {line}" for line in header), *imports_of(node for part in parts for node in part)]
    is_after_definition = False
    for part in filter(None, parts):
        for place, statement in enumerate(part):
            is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
            made += ["", ""] if is_definition or is_after_definition else [""] if not place else []
            made += lines(statement)
            is_after_definition = is_definition
    return "\n".join(made) + "\n"


def lines(node: ast.stmt | ast.excepthandler, indent: str = "", width: int = WIDTH) -> list[str]:
    """A statement as source, in lines of at most ``width`` where it can be folded."""
    inner = indent + _INDENT
    match node:
        case ast.Try():
            head = [f"{indent}try:"]
        case ast.ExceptHandler():
            head = [f"{indent}except {text(node.type) if node.type is not None else ''} as {node.name}:"]
        case ast.ClassDef() | ast.FunctionDef() | ast.With() | ast.For():
            alone = mapped(node, lambda part: ast.Pass() if part in node.body else None)
            head = _laid_out(text(alone).splitlines()[0], indent, width)
        case _:
            return _laid_out(text(node), indent, width)
    bodies = [lines(part, inner, width) for part in node.body]
    blank = [""] * isinstance(node, ast.ClassDef)
    body = [line for place, part in enumerate(bodies) for line in (blank * bool(place) + part)]
    handlers = node.handlers if isinstance(node, ast.Try) else ()
    return [*head, *body, *(line for handler in handlers for line in lines(handler, indent, width))]


class _UnknownShape(ValueError):
    """A piece that is too long and cannot be broken the way ruff would."""


def _laid_out(statement: str, indent: str, width: int) -> list[str]:
    try:
        made = _folded(statement, indent, width)
    except _UnknownShape:
        return _filled(statement, indent, width)
    is_of_numbers = len(made) > _MAX_ROWS and _NUMBERS.search(statement) is not None
    return _filled(statement, indent, width) if is_of_numbers else made


def _folded(piece: str, indent: str, width: int) -> list[str]:
    """A statement or a part of one: in one line, else what its bracket holds in one line, else in one line each."""
    if len(indent) + len(piece) <= width:
        return [indent + piece]
    inner = indent + _INDENT
    if piece.startswith("assert "):
        *_, message = _split(piece)
        return [f"{indent}{piece.removesuffix(message)}(", f"{inner}{message}", f"{indent})"]
    opened = [(start, end) for start, end, depth in _brackets(piece) if not depth and start < end]
    for start, end in reversed(opened):
        if _HEAD.fullmatch(piece[:start]) and _TAIL.fullmatch(piece[end:]):
            break
    else:
        raise _UnknownShape
    body, is_call = piece[start:end], re.search(r"[\w\])]\($", piece[:start]) is not None
    if is_call and len(inner) + len(body) <= width:
        rows = [inner + body]
    else:
        parts = [part for part in _split(body) if part]
        comma = "" if is_call and len(parts) == 1 else ","
        rows = [row for part in parts for row in _folded(part + comma, inner, width)]
    return [indent + piece[:start], *rows, indent + piece[end:]]


def _brackets(text: str) -> Iterator[tuple[int, int, int]]:
    """Where the contents of every bracket begin and end, and how many brackets it stands in."""
    opened = list[int]()
    for position, character in enumerate(_STRING.sub(lambda found: "_" * len(found[0]), text)):
        if character in "([{":
            opened.append(position + 1)
        elif character in ")]}" and opened:
            yield opened.pop(), position, len(opened)


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    outside = list(_STRING.sub(lambda found: "_" * len(found[0]), text))
    for start, end, _ in _brackets(text):
        outside[start:end] = "_" * (end - start)
    places = [-1, *(place for place, character in enumerate(outside) if character == ","), len(text)]
    return [text[start + 1 : end].strip() for start, end in itertools.pairwise(places)]


def _filled(statement: str, indent: str, width: int) -> list[str]:
    """The largest bracket filled with as many words to a line as fit, out of ruff's reach."""
    start, end, _ = max(_brackets(statement), key=lambda found: found[1] - found[0], default=(0, 0, 0))
    inside, inner = _STRING.sub(lambda found: found[0].replace(" ", "\0"), statement[start:end]), indent + _INDENT
    rows = textwrap.wrap(inside, width, initial_indent=inner, subsequent_indent=inner, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
    made = [indent + statement[:start], *rows, indent + statement[end:]] if rows else [indent + statement]
    return [*(line.replace("\0", " ") for line in made[:-1]), made[-1] + _SKIP]
