"""Python expressions as text that knows how tightly it binds, so that parentheses appear exactly where they must.

The precedence table is the one of the language reference, section 6.17, the spacing that of `ruff format`. Also here:
how plain arguments (numbers, slices, dtypes) are written. Needs no torch.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from reprokit.program.ir import Device, Slice, Symbol


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
        return sequence([argument(item, leaf).text for item in value], is_tuple=isinstance(value, tuple))
    if isinstance(value, Mapping):
        items = ", ".join(f"{argument(k, leaf).text}: {argument(v, leaf).text}" for k, v in value.items())
        return Expr("{" + items + "}")
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


def sequence(parts: Sequence[str], *, is_tuple: bool) -> Expr:
    """``[a, b]`` or ``(a, b)``."""
    if not is_tuple:
        return Expr(f"[{', '.join(parts)}]")
    return Expr(f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})")


def quoted(text: str) -> str:
    """A string literal in double quotes and ASCII; JSON's escapes alone would make two characters of an emoji."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()
