"""Syntax trees as source text, laid out as `ruff format` does it.

Every script is made of `ast` nodes. What comes from a file gets into one as a constant (`constant`) or as a name whose
parts were checked (`path`), never as text. Lines over `WIDTH` are folded at the commas of a call or display; long lists
of numbers, and what has another shape, are filled line by line and marked ``# fmt: skip``. Needs no torch.
"""

from __future__ import annotations

import ast
import contextlib
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
_TAIL = re.compile(r"(?:\.\w+\([\w, -]*\))?")
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


def lines(node: ast.stmt, indent: str = "", width: int = WIDTH) -> list[str]:
    """A statement as source, in lines of at most ``width`` where it can be folded."""
    inner = indent + _INDENT
    match node:
        case ast.ClassDef():
            bodies = [lines(part, inner, width) for part in node.body]
            joined = [line for place, body in enumerate(bodies) for line in ([""] * bool(place) + body)]
            return [f"{indent}class {node.name}({', '.join(map(text, node.bases))}):", *joined]
        case ast.FunctionDef():
            given = [ast.Name(item.arg) for item in node.args.args]
            head = _folded(f"def {node.name}(", [("", name) for name in given], "):", indent, width, is_call=True)
        case ast.With():
            head = [f"{indent}with {', '.join(text(item.context_expr) for item in node.items)}:"]
        case ast.For():
            head = _expression(f"for {text(node.target)} in ", node.iter, ":", indent, width)
        case ast.Try():
            caught = node.handlers[0]
            after = [f"{indent}except {text(caught.type)} as {caught.name}:"] if caught.type is not None else []
            after += [line for part in caught.body for line in lines(part, inner, width)]
            return [f"{indent}try:", *(line for part in node.body for line in lines(part, inner, width)), *after]
        case _:
            return _simple(node, indent, width)
    return [*head, *(line for part in node.body for line in lines(part, inner, width))]


class _UnknownShape(ValueError):
    """A piece that is too long and cannot be broken the way ruff would."""


def _simple(node: ast.stmt, indent: str, width: int) -> list[str]:
    whole = text(node)
    if len(indent) + len(whole) <= width:
        return [indent + whole]
    try:
        match node:
            case ast.Assert(test, ast.expr() as message):
                return [f"{indent}assert {text(test)}, (", f"{indent}{_INDENT}{text(message)}", f"{indent})"]
            case ast.Assign(_, value) | ast.AugAssign(_, _, value) | ast.Expr(value):
                made = _expression(whole.removesuffix(text(value)), value, "", indent, width)
            case ast.Return(ast.expr() as value):
                made = _expression("return ", value, "", indent, width)
            case _:
                return [indent + whole]
    except _UnknownShape:
        return _filled(indent, whole, width)
    return _filled(indent, whole, width) if len(made) > _MAX_ROWS and _NUMBERS.search(whole) else made


def _expression(prefix: str, node: ast.expr, suffix: str, indent: str, width: int) -> list[str]:
    whole = f"{indent}{prefix}{text(node)}{suffix}"
    if len(whole) <= width:
        return [whole]
    inside = node  # of `f(x).backward()` the call of `f` is what is folded
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "(" in text(node.func):
        inside = node.func.value
    opened, parts, closed = _pieces(inside)
    tail = text(node)[len(text(inside)) :]
    if _TAIL.fullmatch(tail) is None or not parts:
        raise _UnknownShape
    is_call = isinstance(inside, ast.Call)
    return _folded(f"{prefix}{opened}", parts, f"{closed}{tail}{suffix}", indent, width, is_call=is_call)


def _folded(
    opened: str, parts: Sequence[tuple[str, ast.expr]], closed: str, indent: str, width: int, *, is_call: bool
) -> list[str]:
    """A bracket with its parts: in one line, else in one of their own, else in one each."""
    inner = indent + _INDENT
    joined = ", ".join(f"{name}{text(value)}" for name, value in parts)
    if opened.endswith("(") and not is_call and len(parts) == 1:
        joined += ","  # else it is no tuple
    whole = f"{indent}{opened}{joined}{closed}"
    if len(whole) <= width:
        return [whole]
    if is_call and len(inner) + len(joined) <= width:
        body = [inner + joined]
    else:
        comma = "" if is_call and len(parts) == 1 else ","
        body = [line for name, value in parts for line in _expression(name, value, comma, inner, width)]
    return [f"{indent}{opened}", *body, f"{indent}{closed}"]


def _pieces(node: ast.expr) -> tuple[str, Sequence[tuple[str, ast.expr]], str]:
    """What opens a call or display, what is in it, each with its keyword or key, and what closes it."""
    match node:
        case ast.Call(function, args, keywords) if "(" not in text(function):
            parts = [*(("", part) for part in args), *((f"{key.arg}=", key.value) for key in keywords)]
            return f"{text(function)}(", parts, ")"
        case ast.List(items):
            return "[", [("", item) for item in items], "]"
        case ast.Tuple(items):
            return "(", [("", item) for item in items], ")"
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return "{", [(f"{text(key)}: ", value) for key, value in pairs if key is not None], "}"
    raise _UnknownShape


def _filled(indent: str, statement: str, width: int) -> list[str]:
    """The largest bracket filled with as many words to a line as fit, out of ruff's reach."""
    start, end = _largest_bracket(_STRING.sub(lambda found: "_" * len(found[0]), statement))
    inside = _STRING.sub(lambda found: found[0].replace(" ", "\0"), statement[start:end])
    inner = indent + _INDENT
    rows = textwrap.wrap(inside, width, initial_indent=inner, subsequent_indent=inner, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
    made = [indent + statement[:start], *rows, indent + statement[end:]] if rows else [indent + statement]
    return [*(line.replace("\0", " ") for line in made[:-1]), made[-1] + _SKIP]


def _largest_bracket(text: str) -> tuple[int, int]:
    def spans() -> Iterator[tuple[int, int]]:
        opened = list[int]()
        for position, character in enumerate(text):
            if character in "([{":
                opened.append(position + 1)
            elif character in ")]}" and opened:
                yield opened.pop(), position

    return max(spans(), key=lambda span: span[1] - span[0], default=(0, 0))
