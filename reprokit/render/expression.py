"""Python expressions as text that knows how tightly it binds, so that parentheses appear exactly where they must.

The precedence table is the one of the language reference, section 6.17. Also here: how plain arguments (numbers,
slices, dtypes) are written, and how a line that is too long is folded. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from reprokit.program.ir import Device, Slice, Symbol


class Rank(IntEnum):
    """How tightly an expression binds."""

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


_BINARY = {
    "+": Rank.ADD,
    "-": Rank.ADD,
    "*": Rank.MULTIPLY,
    "/": Rank.MULTIPLY,
    "//": Rank.MULTIPLY,
    "%": Rank.MULTIPLY,
    "@": Rank.MULTIPLY,
    "**": Rank.POWER,
    "<<": Rank.SHIFT,
    ">>": Rank.SHIFT,
    "&": Rank.AND,
    "^": Rank.XOR,
    "|": Rank.OR,
    "<": Rank.COMPARE,
    "<=": Rank.COMPARE,
    ">": Rank.COMPARE,
    ">=": Rank.COMPARE,
    "==": Rank.COMPARE,
    "!=": Rank.COMPARE,
}


def binary(operator: str, left: Expr, right: Expr) -> Expr:
    """``left operator right``."""
    rank = _BINARY[operator]
    if operator == "**":  # binds less tightly than a sign on its right, more tightly than one on its left
        return Expr(f"{left.at_least(Rank.ATOM)} ** {right.at_least(Rank.UNARY)}", rank)
    loosest_left = Rank(rank + 1) if rank is Rank.COMPARE else rank  # comparisons would chain
    return Expr(f"{left.at_least(loosest_left)} {operator} {right.at_least(Rank(rank + 1))}", rank)


def unary(operator: str, operand: Expr) -> Expr:
    """``-x``, ``+x`` or ``~x``."""
    return Expr(f"{operator}{operand.at_least(Rank.UNARY)}", Rank.UNARY)


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
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
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
        return _complex(value)
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


def _complex(value: complex) -> Expr:
    if (
        math.isfinite(value.real)
        and math.isfinite(value.imag)
        and str(value.real) != "-0.0"
        and str(value.imag) != "-0.0"
    ):
        text = repr(value)
        return Expr(text, Rank.UNARY if text.startswith("-") else Rank.ATOM)
    return call("complex", [Expr(float_text(value.real)), Expr(float_text(value.imag))])


def sequence(parts: Sequence[str], *, is_tuple: bool) -> Expr:
    """``[a, b]`` or ``(a, b)``."""
    if not is_tuple:
        return Expr(f"[{', '.join(parts)}]")
    return Expr(f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})")


def quoted(text: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(text, ensure_ascii=True)


def fold(line: str, width: int = 100) -> list[str]:
    """A statement over several lines, broken at the commas of its largest bracket when it is longer than ``width``."""
    span = _largest_bracket(line) if len(line) > width else None
    if span is None:
        return [line]
    start, end = span
    head, inside, tail = line[: start + 1], line[start + 1 : end], line[end:]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    parts = [f"{part}," for part in _split(inside)]
    if len(parts) == 1:
        parts[0] = inside
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
    folded = [piece for item in lines for piece in fold(item, width)]
    return [head, *folded, indent[4:] + tail.lstrip()]


def _largest_bracket(line: str) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    depth, start = 0, 0
    for position, character in _code_characters(line):
        if character in "([{":
            if depth == 0:
                start = position
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and position - start > 1 and (best is None or position - start > best[1] - best[0]):
                best = (start, position)
    return best


def _split(inside: str) -> list[str]:
    """The parts between the commas that are in no inner bracket."""
    cuts, depth = [-1], 0
    for position, character in _code_characters(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            cuts.append(position)
    ends = [*cuts[1:], len(inside)]
    parts = (inside[start + 1 : end].strip() for start, end in zip(cuts, ends, strict=True))
    return [part for part in parts if part]


def _code_characters(line: str) -> Iterable[tuple[int, str]]:
    """Positions and characters outside of string literals."""
    in_string = escaped = False
    for position, character in enumerate(line):
        if escaped:
            escaped = False
        elif in_string and character == "\\":
            escaped = True
        elif character == '"':
            in_string = not in_string
        elif not in_string:
            yield position, character
