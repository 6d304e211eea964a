"""Syntax trees as text: parentheses where Python needs them, constants that read back, lines as ruff lays them out."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprokit.errors import SnapshotError
from reprokit.program.ir import Ref, Slice
from reprokit.render.source import constant, lines, path, subscript, text

NUMBERS = st.one_of(st.floats(), st.integers(), st.complex_numbers(), st.text(), st.booleans(), st.none())
WORDS = ["x", "weight", "hidden_state", "attention_mask", "0.5", "-1", "None", "True", '"a, (b"', "x**2", "-(y**0.5)"]
CALLEES = ["f", "torch.tensor", "F.softmax", "x[0].backward"]


@given(NUMBERS)
def test_constants_read_back(value: object) -> None:
    written = text(constant(value))  # type: ignore[arg-type]
    assert written.isascii() and repr(eval(written)) == repr(value)
    power = eval(text(ast.BinOp(constant(value), ast.Pow(), constant(2)))) if value in (-2, -3.5, 0.5) else None
    assert power is None or math.isclose(power, value**2)  # type: ignore[operator]


@pytest.mark.parametrize(
    "name", ["x y", "", "1", "x\n", "x;y", "a.b()", "x[i]", "a.", "x[0", "blocks.in.weight", "class"]
)
def test_a_name_of_a_file_is_a_name_or_an_error(name: str) -> None:
    with pytest.raises(SnapshotError):
        path(name)


def test_slices_have_their_own_notation() -> None:
    index = (Slice(None, None, 2), Slice(Ref(1), None, None), 0, ...)
    assert text(subscript(path("x"), index, lambda ref: path(f"v{ref.value}"))) == "x[::2, v1:, 0, ...]"


@pytest.mark.parametrize("length", range(66, 76))
def test_a_tuple_of_one_stays_a_tuple_at_any_length(length: int) -> None:
    (tree,) = ast.parse(f"torch.cat((torch.exp({'x' * length}),))").body
    assert ast.dump(ast.parse("\n".join(lines(tree)))) == ast.dump(ast.Module([tree], []))


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Calls and displays inside each other."""
    kind = draw(st.sampled_from(["word", "list", "tuple", "dict", "call"] if depth else ["word"]))
    if kind == "word":
        return draw(st.sampled_from(WORDS))
    parts = [draw(expressions(depth - 1)) for _ in range(draw(st.integers(1, 5)))]
    if kind == "list":
        return f"[{', '.join(parts)}]"
    if kind == "tuple":
        return f"({', '.join([*parts, 'x'])})"
    if kind == "dict":
        return "{" + ", ".join(f'"k{place}": {part}' for place, part in enumerate(parts)) + "}"
    keywords = [f"k{place}={draw(expressions(depth - 1))}" for place in range(draw(st.integers(0, 2)))]
    return f"{draw(st.sampled_from(CALLEES))}({', '.join(parts + keywords)})"


STATEMENTS = st.tuples(st.sampled_from(["x = ", "x.grad = ", "opt.state[x] = ", "return "]), expressions()).map("".join)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STATEMENTS, min_size=1, max_size=25))
def test_it_is_what_ruff_would_do_and_means_the_same(tmp_path: Path, statements: list[str]) -> None:
    source = "\n".join(["def made(x, attention_mask):", *(f"    {statement}" for statement in statements)])
    (tree,) = ast.parse(source).body
    made = "\n".join([*lines(tree), ""])
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(source))
    file = tmp_path / "made.py"
    file.write_text(made)
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", str(file)]
    subprocess.run(ruff, check=True, capture_output=True)
    assert file.read_text() == made
