"""The statement around a call and the expression of the call in it, cut from the source by the call's position."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from reprokit.program.ir import Site
from reprokit.program.sites import make_site, parts


class Recorder:
    """Notes where its methods and operators are called."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def __getattr__(self, name: str) -> Any:
        return self.note

    def note(self, *_: Any, **__: Any) -> Any:
        frame = sys._getframe(1)
        self.sites.append(make_site(frame.f_code, frame.f_lasti))
        return self

    __add__ = __neg__ = __getitem__ = __setitem__ = __iadd__ = __gt__ = note


def sites_of(source: str, folder: Path) -> list[Site]:
    script = folder / "train.py"
    script.write_text(source)
    x = Recorder()
    exec(compile(source, str(script), "exec"), {"x": x, "f": lambda *_: None})
    return x.sites


def spanned(site: Site) -> str:
    """The text of the span."""
    assert site.span is not None
    first, start, last, end = site.span
    lines = site.text.encode().split(b"\n")[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"\n".join(lines).decode()


@pytest.mark.parametrize(
    ("source", "first_line", "text", "span"),
    [
        ("y = x.log() + 1\n", 1, "y = x.log() + 1", "x.log()"),
        ("if True:\n    'ä'; y = x.log()  # why\n", 2, "'ä'; y = x.log()  # why", "x.log()"),
        ("if True:\n    y = f(\n        1,\n      x.log(),\n    )\n", 2, "y = f(\n    1,\n  x.log(),\n)", "x.log()"),
        ("y = (x\n  .log(\n  2))\n", 1, "y = (x\n  .log(\n  2))", "log(\n  2)"),
        ("if (\n  x.log()\n):\n  # why\n\n  y = 1\n", 1, "if (\n  x.log()\n):", "x.log()"),
        ("for _ in [x.log()]:\n    pass\n", 1, "for _ in [x.log()]:", "x.log()"),
        ("def step():\n  def inner():\n    return -x\n  inner()\nstep()\n", 3, "return -x", "-x"),
        ("x[0] += 1\n", 1, "x[0] += 1", "x[0]"),
        ("if not x:\n  pass\nelif x.log():\n  pass\n", 3, "elif x.log():", "x.log()"),
    ],
)
def test_the_statement_and_the_span_of_a_call(
    source: str, first_line: int, text: str, span: str, tmp_path: Path
) -> None:
    site = sites_of(source, tmp_path)[-1 if "elif" in source else 0]
    assert (site.first_line, site.text, spanned(site)) == (first_line, text, span)
    assert len(parts(site)) == 1


@pytest.mark.parametrize(
    "source",
    [
        'y = x.log(), """\n  a\n"""\n',  # its text changes with the indentation
        "y = [x.log(),\n" + "  1,\n" * 30 + "]\n",
    ],
)
def test_statements_that_are_not_kept(source: str, tmp_path: Path) -> None:
    (site,) = sites_of(source, tmp_path)
    assert (site.code, site.statement, parts(site)) == (source.split("\n")[0], "", ())
