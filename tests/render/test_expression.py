"""Expressions: parentheses exactly where Python needs them, constants that read back, spaces as ruff has them."""

from __future__ import annotations

import ast
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reprokit.program.ir import Ref, Slice
from reprokit.render.expression import (
    Expr,
    binary,
    constant,
    float_text,
    method,
    subscript,
    unary,
)

X, Y = Expr("x"), Expr("y")
OPERATORS = ["+", "-", "*", "/", "//", "%", "@", "**", "<<", ">>", "&", "^", "|"]


def leaf(value: Any) -> Expr:
    return Expr(f"v{value.value}") if isinstance(value, Ref) else Expr(repr(value))


def tree(depth: int) -> st.SearchStrategy[tuple[Expr, str]]:
    """An expression with its fully parenthesised text."""
    leaves = st.sampled_from([(X, "x"), (Y, "y"), (constant(-2), "(-2)"), (constant(3.5), "3.5")])
    if depth == 0:
        return leaves
    smaller = tree(depth - 1)
    two = st.tuples(st.sampled_from(OPERATORS), smaller, smaller)
    one = st.tuples(st.sampled_from(["-", "~", "+"]), smaller)
    return st.one_of(
        leaves,
        two.map(lambda t: (binary(t[0], t[1][0], t[2][0]), f"({t[1][1]} {t[0]} {t[2][1]})")),
        one.map(lambda t: (unary(t[0], t[1][0]), f"({t[0]}{t[1][1]})")),
        smaller.map(lambda t: (method(t[0], "sum", []), f"({t[1]}).sum()")),
        smaller.map(lambda t: (subscript(t[0], 0, leaf), f"({t[1]})[0]")),
    )


@given(tree(4))
def test_parentheses_keep_the_meaning(pair: tuple[Expr, str]) -> None:
    written, explicit = pair
    assert ast.dump(ast.parse(written.text)) == ast.dump(ast.parse(explicit))


@given(st.floats())
def test_floats_read_back(value: float) -> None:
    back = eval(float_text(value))
    assert (math.isnan(back) and math.isnan(value)) or (back == value and str(back) == str(value))


@given(st.text())
def test_texts_read_back(text: str) -> None:
    written = constant(text).text
    assert written.isascii() and eval(written) == text


@given(st.complex_numbers())
def test_complex_numbers_read_back(value: complex) -> None:
    assert repr(eval(constant(value).text)) == repr(value)


def test_slices_between_expressions_have_spaces() -> None:
    index = Slice(Ref(1), None, Ref(2))
    assert subscript(X, index, lambda ref: method(Expr(f"v{ref.value}"), "sum", [])).text == "x[v1.sum() :: v2.sum()]"
