"""``reprokit show`` and the last words of a capture, as text without colour."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reprokit
from reprokit.cli import main
from reprokit.program.ir import Call, Input, Program, Ref, Site
from reprokit.render.survey import source_lines, steps
from reprokit.snapshot.format import CaptureSettings, Snapshot, save
from tests.conftest import run_python_in
from tests.shrink import failing

TRAINING = """\
import torch

torch.manual_seed(0)
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)


def lossy(scale):
    shrunk = weight / 2
    quotient = shrunk / scale
    product = quotient * scale
    return product.sum()


for step in range(5):
    loss = lossy(torch.tensor(0.0 if step == 3 else 1.0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """What capture and show say of a script that fails, and the folder."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "train.py").write_text(TRAINING)

    def run(*words: str) -> str:
        return run_python_in(folder, "-m", "reprokit", *words, COLUMNS="100", NO_COLOR="1").stderr

    return run("capture", "-o", "x.pt", "train.py"), run("show", "x.pt"), folder


def test_one_screen(shown: tuple[str, str, Path]) -> None:
    lines = shown[1].splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 100 for line in lines)
    assert "\x1b" not in shown[1]
    assert lines[0] == "inf from `torch.Tensor.div` at step 3"
    assert lines[-1] == "next: reprokit shrink x.pt"


def test_the_origins_line_stands_among_its_neighbours(shown: tuple[str, str, Path]) -> None:
    lines = [line.strip() for line in shown[1].splitlines()]
    around = [re.sub(r"\s+", " ", line) for line in lines if re.match(r">?\s*\d+  ", line)]
    assert around == [
        "9 shrunk = weight / 2", "> 10 quotient = shrunk / scale", "11 product = quotient * scale",
        "12 return product.sum()",
    ]  # fmt: skip


def test_the_calls_before_the_origin_have_ranges(shown: tuple[str, str, Path]) -> None:
    lines = [re.sub(r"\s+", " ", line.rstrip()) for line in shown[1].splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("> ") and "float32" in line)
    assert lines[at].endswith("float32 3, 3 inf")
    assert "weight / 2" in lines[at - 1] and lines[at - 1].endswith("float32 3, |x| = 0.425")
    assert any(line == " x float32 scalar, |x| = 0" for line in lines)


@pytest.mark.parametrize(
    ("bad", "read"),
    [
        (lambda w: (w - 1.5).log(), "x -0.5 to 1.5"),
        (lambda w: (w[:1] - 2).sqrt(), "x = -1"),
        (lambda w: torch.asin(w * 2), "|x| 2 to 6"),  # outside of [-1, 1] on either side
        (lambda w: (w - 1) / (w - 1), "|x| 0 to 2"),
    ],
)
def test_the_sign_is_shown_where_it_may_be_the_cause(
    bad: Callable[[torch.Tensor], torch.Tensor], read: str, tmp_path: Path
) -> None:
    with reprokit.capture(tmp_path / "x.pt", after="continue", quiet=True):
        weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        bad(weight).sum().backward()
    *_, before, origin = steps(reprokit.load(tmp_path / "x.pt"))
    assert origin.is_origin and before.range.split(", ", 1)[1] == read


def test_the_lines_of_other_functions_are_not_context() -> None:
    def site(line: int, code: str, function: str = "step", file: str = "a.py") -> Site:
        return Site(file, line, code, function)

    calls = [
        Call("torch.exp", (Ref(0),), {}, Ref(1), site=site(8, "y = exp(x)")),
        Call("torch.exp", (Ref(1),), {}, Ref(2), site=site(9, "z = exp(y)", "other")),
        Call("torch.exp", (Ref(2),), {}, Ref(3), site=site(11, "w = exp(z)", file="b.py")),
        Call("torch.log", (Ref(3),), {}, Ref(4), site=site(10, "v = log(w)")),
    ]
    snapshot = failing.masked_softmax()
    program = Program(tuple(calls), (Input(0, "x"),))
    failure = snapshot.failure.__class__("forward", "nan", "nan", "torch.log", 3, site=calls[3].site)
    found = source_lines(Snapshot(program, {}, failure, 0, 0, "loss"))
    assert [(line.number, line.code, line.is_origin) for line in found] == [
        (8, "y = exp(x)", False), (10, "v = log(w)", True),
    ]  # fmt: skip


def test_a_program_that_cannot_run_here_has_no_ranges() -> None:
    snapshot = failing.masked_softmax()
    assert steps(snapshot)
    snapshot = replace(snapshot, tensors={})
    assert steps(snapshot) == []


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_line_is_cut_before_its_number_and_its_mark(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "quotient = scaled / total" + "_of_everything" * 10
    snapshot = failing.masked_softmax()
    failure = replace(snapshot.failure, site=Site("a/b.py", 117, code, "step"))
    save(replace(snapshot, failure=failure), tmp_path / "x.pt")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["show", str(tmp_path / "x.pt")]) == 0
    lines = capsys.readouterr().err.splitlines()
    marked = [line for line in lines if line.startswith(">  117  quotient")]
    assert len(marked) == 1
    assert len(marked[0]) <= width
    assert marked[0].endswith("…")
    assert len([line for line in lines if line.startswith("> ")]) == 2  # the line, and the call among the others


def test_the_process_and_the_compilers_are_in_show_and_issue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CaptureSettings(watch="sampled", rank=1, world_size=4, compilers=("inductor",))
    save(replace(failing.masked_softmax(), settings=settings), tmp_path / "x.pt")
    assert main(["show", str(tmp_path / "x.pt")]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "process rank 1 of 4 compiled parts of the script, with `inductor`" in shown
    assert main(["render", str(tmp_path / "x.pt"), "--as", "issue", "-o", str(tmp_path / "issue.md")]) == 0
    issue = (tmp_path / "issue.md").read_text()
    assert (
        "of a training run on rank 1 of 4 processes (compiled: parts of the script, with `inductor`), in the" in issue
    )
