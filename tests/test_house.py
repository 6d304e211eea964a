"""The counts of `tests/house.py` and of interpreted steps may fall and not rise; every module is documented."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
from torch import nn

import reprokit
from reprokit import workflow
from reprokit.program import interpreter
from reprokit.shrink.checks.recorded import NonfiniteCheck
from tests import house
from tests.conftest import ROOT

LIMITS = json.loads(house.LIMITS.read_text(encoding="utf-8"))
ROADS = {"runs_of_a_snapshot", "runs_of_a_candidate"}


@pytest.fixture(scope="module")
def counted() -> house.Counted:
    return house.count(ROOT / "reprokit")


def test_every_count_has_a_limit(counted: house.Counted) -> None:
    assert set(counted.limits()) | ROADS == set(LIMITS)


@pytest.mark.parametrize("name", sorted(set(LIMITS) - ROADS))
def test_no_count_of_the_source_rises(counted: house.Counted, name: str) -> None:
    value = counted.limits()[name]
    assert value <= LIMITS[name], f"`{name}` was {LIMITS[name]}; `python -m tests.house --worst 20` names the places"


def test_every_module_is_named_in_the_documents() -> None:
    """ARCHITECTURE.md or docs/internals.md has the name of its file."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "docs/internals.md")]
    missing = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "reprokit").rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py") and not any(path.name in text for text in texts)
    ]
    assert missing == []


# -- how often a step is run ------------------------------------------------------------------------------------


@contextmanager
def counting(code: CodeType, *, below: CodeType | None = None) -> Iterator[Counter[CodeType]]:
    """Count the calls of a function in this thread: all, or those of ``below`` and those made beneath it."""
    calls: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is below or (frame.f_code is code and (below is None or is_below(frame, below))):
            calls[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def is_below(frame: FrameType, code: CodeType) -> bool:
    """True if a function has called this frame, directly or not."""
    caller = frame.f_back
    while caller is not None and caller.f_code is not code:
        caller = caller.f_back
    return caller is not None


def test_a_step_is_run_no_more_often_than_before(tmp_path: Path) -> None:
    """A two-layer model whose loss is NaN in step 6: runs until the file is written, and runs of a candidate."""
    path = tmp_path / "s.pt"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = interpreter.run.__code__

    def train(step: int) -> None:
        target = 5.0 if step == 6 else -5.0  # the logarithm of a negative number
        loss = torch.log(model(torch.randn(4, 8)).squeeze(1) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with counting(run) as runs, reprokit.capture(path, quiet=True):
        for step in range(8):
            train(step)
    assert path.exists()
    assert 1 <= runs[run] <= LIMITS["runs_of_a_snapshot"]

    observe = NonfiniteCheck.observe.__code__
    with counting(run, below=observe) as runs:
        workflow.shrink(reprokit.load(path), whatif=False)
    assert runs[observe] > 5
    assert 1 <= runs[run] / runs[observe] <= LIMITS["runs_of_a_candidate"]


# -- the counting itself ----------------------------------------------------------------------------------------


LOOP = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from package.capture.tape import Tape

class Loop:
    steps: int

    def __init__(self, tape: "Tape") -> None:
        self.tape = tape
        self.steps = 0 if tape.is_new and tape.has_begun else 1
        tape.begun = []
"""
TAPE = """
from package.capture import loop

class Tape:
    '''A docstring has no tokens.'''

    # a reason
    def __init__(self) -> None:
        self.loop: loop.Loop | None = None
        self.begun = [step for step in range(3) if step]
        self.end = 0

    def begin(self, failure, call) -> bool:
        if failure.kind == "nan" or failure.phase is BACKWARD:
            self.begun.clear()
        return call.kind is Root
"""


def test_the_counts_of_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "capture"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "loop": LOOP, "tape": TAPE}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    counted = house.count(tmp_path / "package")
    assert counted.circles == [["package.capture.loop", "package.capture.tape"]]
    row = counted.packages["capture"]
    assert [row[name] for name in ("files", "code", "comments", "ternaries", "functions")] == [3, 19, 1, 1, 3]
    limits = counted.limits()
    assert limits.pop("tokens") > 100
    assert limits.pop("tokens_per_line") > 5
    assert limits.pop("ternaries") == 52.6
    assert limits == {
        "complex": 0,
        "most_complex": 3,
        "foreign_stores": 1,
        "biggest_class": 3,
        "written_outside": 1,
        "circle": 2,
        "failure_kinds": 2,
        "failure_kind_files": 1,
        "call_kinds": 1,
    }


@pytest.mark.parametrize(
    "text", ["x = (1,\n     2)", "x = (1, 2)", "# a comment\nx = (1, 2)", "'''Doc.'''\nx = (1, 2)"]
)
def test_tokens_do_not_depend_on_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    assert house.count(tmp_path).packages["(top)"]["tokens"] == 7
