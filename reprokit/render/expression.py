"""Python expressions as text that knows how tightly it binds, so that parentheses appear exactly where they must.

The precedence table is the one of the language reference, section 6.17, the spacing that of `ruff format`. Also here:
how plain arguments (numbers, slices, dtypes) are written, and `fold`, which lays a long statement out over several
lines as `ruff format` does. It knows the shapes that occur in a repro: calls, displays and assertions. What has another
shape, and long lists of numbers, are filled line by line and marked ``# fmt: skip``. Needs no torch.
"""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from reprokit.program.ir import Device, Slice, Symbol
from reprokit.program.sites import parsed


class Rank(IntEnum):
    """Precedence of the outermost operator of an expression."""

    TUPLE = 0
    COMPARE = 1
    OR = 2
    XOR = 3
    AND = 4
    SHIFT = 5
    ADD = 6
    MULTIPLY = 7
    UNARY = 8
    POWER = 9
    ATOM = 10


@dataclass(frozen=True, slots=True)
class Expr:
    """The text of an expression and the rank of its outermost operator."""

    text: str
    rank: Rank = Rank.ATOM

    def __str__(self) -> str:
        return self.text

    def at_least(self, rank: Rank) -> str:
        """The text, in parentheses if it binds more loosely than ``rank``."""
        return self.text if self.rank >= rank else f"({self.text})"


_SIMPLE = re.compile(r"-?\d[\w.]*(?:-\d+)?|[A-Za-z_][\w.]*")  # powers of such operands are written without spaces
_BOUND = re.compile(r"-?\w+")  # slices with other bounds get spaces around their colons
_OPERATORS: Sequence[tuple[str, Rank, type[ast.AST], str, str]] = (  # special method without underscores, plain method
    ("+", Rank.ADD, ast.Add, "add", "add"), ("-", Rank.ADD, ast.Sub, "sub", "sub"),
    ("*", Rank.MULTIPLY, ast.Mult, "mul", "mul"), ("/", Rank.MULTIPLY, ast.Div, "truediv", "div"),
    ("//", Rank.MULTIPLY, ast.FloorDiv, "floordiv", ""), ("%", Rank.MULTIPLY, ast.Mod, "mod", "remainder"),
    ("@", Rank.MULTIPLY, ast.MatMult, "matmul", "matmul"), ("**", Rank.POWER, ast.Pow, "pow", ""),
    ("<<", Rank.SHIFT, ast.LShift, "lshift", ""), (">>", Rank.SHIFT, ast.RShift, "rshift", ""),
    ("&", Rank.AND, ast.BitAnd, "and", ""), ("^", Rank.XOR, ast.BitXor, "xor", ""), ("|", Rank.OR, ast.BitOr, "or", ""),
    ("<", Rank.COMPARE, ast.Lt, "lt", "lt"), ("<=", Rank.COMPARE, ast.LtE, "le", "le"),
    (">", Rank.COMPARE, ast.Gt, "gt", "gt"), (">=", Rank.COMPARE, ast.GtE, "ge", "ge"),
    ("==", Rank.COMPARE, ast.Eq, "eq", "eq"), ("!=", Rank.COMPARE, ast.NotEq, "ne", "ne"),
)  # fmt: skip
BINARY_RANKS = {symbol: rank for symbol, rank, *_ in _OPERATORS}
SYMBOLS: Mapping[type[ast.AST], str] = {
    **{node: symbol for symbol, _, node, *_ in _OPERATORS}, ast.USub: "-", ast.UAdd: "+", ast.Invert: "~",
}  # fmt: skip
# Methods of a tensor that are written as operators.
UNARY = {"neg": "-", "positive": "+", "__invert__": "~"}
BINARY = {name: symbol for symbol, *_, special, plain in _OPERATORS for name in (f"__{special}__", plain) if name}
REFLECTED = {f"__r{special}__": symbol for symbol, rank, _, special, _ in _OPERATORS if rank >= Rank.ADD}
AUGMENTED = {"floor_divide_": "//="} | {
    name: f"{symbol}="
    for symbol, rank, _, special, plain in _OPERATORS
    for name in (f"__i{special}__", f"{plain}_")
    if rank is not Rank.COMPARE and symbol != "@" and name != "_"
}


def binary(operator: str, left: Expr, right: Expr) -> Expr:
    """``left operator right``."""
    rank = BINARY_RANKS[operator]
    if operator == "**":  # binds less tightly than a sign on its right, more tightly than one on its left
        base, exponent = left.at_least(Rank.ATOM), right.at_least(Rank.UNARY)
        space = "" if _SIMPLE.fullmatch(base) and _SIMPLE.fullmatch(exponent) else " "
        return Expr(f"{base}{space}**{space}{exponent}", rank)
    loosest_left = Rank(rank + 1) if rank is Rank.COMPARE else rank  # comparisons would chain
    return Expr(f"{left.at_least(loosest_left)} {operator} {right.at_least(Rank(rank + 1))}", rank)


def unary(operator: str, operand: Expr) -> Expr:
    """``-x``, ``+x`` or ``~x``."""
    return Expr(f"{operator}{operand.at_least(Rank.ATOM)}", Rank.UNARY)


def attribute(owner: Expr, name: str) -> Expr:
    """``owner.name``."""
    return Expr(f"{owner.at_least(Rank.ATOM)}.{name}")


def call(callee: str, arguments: Sequence[Expr], keywords: Mapping[str, Expr] | None = None) -> Expr:
    """``callee(arguments, name=value)``."""
    parts = [argument.text for argument in arguments]
    parts += [f"{name}={value.text}" for name, value in (keywords or {}).items()]
    return Expr(f"{callee}({', '.join(parts)})")


def method(owner: Expr, name: str, arguments: Sequence[Expr], keywords: Mapping[str, Expr] | None = None) -> Expr:
    """``owner.name(arguments)``."""
    return call(attribute(owner, name).text, arguments, keywords)


def subscript(owner: Expr, index: Any, leaf: Callable[[Any], Expr]) -> Expr:
    """``owner[index]``, with slices in their own notation; ``leaf`` writes what is not plain."""
    if isinstance(index, tuple) and index:
        inside = ", ".join(_index(item, leaf) for item in index)
        inside += "," if len(index) == 1 else ""
    else:
        inside = _index(index, leaf)
    return Expr(f"{owner.at_least(Rank.ATOM)}[{inside}]")


def _index(item: Any, leaf: Callable[[Any], Expr]) -> str:
    if isinstance(item, Slice):
        start, stop, step = (
            "" if part is None else argument(part, leaf).text for part in (item.start, item.stop, item.step)
        )
        is_simple = all(not part or _BOUND.fullmatch(part) for part in (start, stop, step))
        parts = (start, stop, step) if step else (start, stop)
        return ":".join(parts) if is_simple else " : ".join(parts).replace(" :  : ", " :: ").strip()
    return argument(item, leaf).text


def argument(value: Any, leaf: Callable[[Any], Expr]) -> Expr:
    """One argument of a call; ``leaf`` writes what is not plain (a `Ref`)."""
    if isinstance(value, (list, tuple)):
        items = [argument(item, leaf).text for item in value]
        if isinstance(value, tuple):
            return Expr(f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})")
        return Expr(f"[{', '.join(items)}]")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{argument(k, leaf).text}: {argument(v, leaf).text}" for k, v in value.items())
        return Expr("{" + pairs + "}")
    if isinstance(value, Slice):
        return call("slice", [argument(part, leaf) for part in (value.start, value.stop, value.step)])
    if isinstance(value, Symbol):
        return Expr(value.name if value.name.startswith("torch.") else f"torch.{value.name}")
    if isinstance(value, Device):
        return Expr(quoted(value.name))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return constant(value)
    if value is Ellipsis:
        return Expr("...")
    return leaf(value)


def constant(value: bool | int | float | complex | str | None) -> Expr:
    """A Python constant that reads back as the same value."""
    if isinstance(value, str):
        return Expr(quoted(value))
    if isinstance(value, float):
        text = float_text(value)
    elif isinstance(value, complex):
        return call("complex", [Expr(float_text(value.real)), Expr(float_text(value.imag))])
    else:
        text = repr(value)
    return Expr(text, Rank.UNARY if text.startswith("-") else Rank.ATOM)


def float_text(value: float) -> str:
    """The shortest text of a float: ``1e30``, ``0.5``, ``float("-inf")``."""
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def quoted(text: str) -> str:
    """A string literal in double quotes and ASCII; JSON's escapes alone would make two characters of an emoji."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()


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
