"""Lines that are too long: broken where ruff breaks them, with the same meaning."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprokit.render.expression import fold

WORDS = ["x", "weight", "hidden_state", "attention_mask", "0.5", "-1", "None", "True", '"a, (b"']
CALLEES = ["f", "torch.tensor", "F.softmax", "x[0].backward"]


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


def formatted(source: str, folder: Path) -> str:
    """What ruff makes of a file with its own settings."""
    file = folder / "made.py"
    file.write_text(source)
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", str(file)]
    subprocess.run(ruff, check=True, capture_output=True)
    return file.read_text()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STATEMENTS, min_size=1, max_size=25))
def test_it_is_what_ruff_would_do(tmp_path: Path, statements: list[str]) -> None:
    body = [piece for statement in statements for piece in fold(f"    {statement}")]
    source = "\n".join(["def made():", *body, ""])
    ast.parse(source)
    assert formatted(source, tmp_path) == source


@given(STATEMENTS.filter(lambda text: not text.startswith("return ")), st.integers(30, 100))
def test_the_meaning_is_kept(statement: str, width: int) -> None:
    assert ast.dump(ast.parse("\n".join(fold(statement, width)))) == ast.dump(ast.parse(statement))
