"""Expressions: parentheses exactly where Python needs them, constants that read back, spaces as ruff has them."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprokit.program.ir import Device, Ref, Slice, Symbol
from reprokit.render.expression import (
    Expr,
    argument,
    attribute,
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


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (binary("**", binary("-", Expr("1"), X), Expr("0.5")), "(1 - x) ** 0.5"),
        (binary("-", X, binary("-", Y, X)), "x - (y - x)"),
        (binary("-", binary("-", X, Y), X), "x - y - x"),
        (unary("-", binary("**", X, Expr("2"))), "-(x**2)"),
        (binary("**", unary("-", X), Expr("2")), "(-x) ** 2"),
        (binary("<", binary("<", X, Y), X), "(x < y) < x"),
        (binary("**", attribute(X, "scale"), constant(-1)), "x.scale**-1"),
        (binary("**", method(X, "sum", []), Y), "x.sum() ** y"),
        (unary("-", unary("-", X)), "-(-x)"),
        (attribute(binary("@", X, Y), "T"), "(x @ y).T"),
        (method(constant(-1), "f", []), "(-1).f()"),
    ],
)
def test_shape(made: Expr, text: str) -> None:
    assert made.text == text


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "x[0]"),
        (Ref(1), "x[v1]"),
        ((Slice(None, None, None), 0), "x[:, 0]"),
        ((Ellipsis, Slice(1, None, 2)), "x[..., 1::2]"),
        (Slice(None, Ref(3), None), "x[:v3]"),
        ((None, True), "x[None, True]"),
        ((), "x[()]"),
        ((0,), "x[0,]"),
        (Slice(Ref(3), -1, None), "x[v3:-1]"),
        ([0, 2], "x[[0, 2]]"),
    ],
)
def test_subscript(index: Any, text: str) -> None:
    assert subscript(X, index, leaf).text == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Symbol("torch.float16"), "torch.float16"),
        (Device("cuda:0"), '"cuda:0"'),
        ("ij,jk->ik", '"ij,jk->ik"'),
        (float("-inf"), 'float("-inf")'),
        (1e30, "1e30"),
        (1e-05, "1e-5"),
        ((3,), "(3,)"),
        ([Ref(1), None], "[v1, None]"),
        ({"a": Ref(2)}, '{"a": v2}'),
        (Slice(0, 2, None), "slice(0, 2, None)"),
        (2 + 1j, "(2 + 1j)"),
        (complex(0, float("inf")), 'complex(0.0, float("inf"))'),
    ],
)
def test_argument(value: Any, text: str) -> None:
    assert argument(value, leaf).text == text


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
