"""The public API: the examples of `docs/api.md` run, and a typed project can use every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from tests.conftest import Run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def fails() -> None:
    torch.sqrt(torch.zeros(2, requires_grad=True)).sum().backward()


def test_the_examples_run(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES)
    run = run_python("example.py")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "6 inf torch.log"
    assert re.fullmatch(r"regression-repro/repro\.py \d+ 20/20", lines[1])
    assert lines[2] == "step 0: inf in backward"
    assert lines[3].startswith("`missing.repro.pt` does not exist")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.fc(x))
        return x + hidden


def test_a_block_is_traced_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net, x, seen = Residual(), torch.randn(3, 4, requires_grad=True), dict[str, torch.Tensor]()

    def note(part: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        seen.update(grad_input=inputs[0], grad_output=outputs[0])

    handle = net.fc.register_full_backward_hook(note)
    net(x).square().sum().backward()
    handle.remove()
    bare = [p.grad for p in (x, *net.parameters())]
    for leaf in (x, *net.parameters()):
        leaf.grad = None
    with reprokit.trace(tensors=["grad_*put", "hidden"]) as rows:
        loss = net(x).square().sum()
        loss.backward()
    for leaf, gradient in zip((x, *net.parameters()), bare, strict=True):
        assert leaf.grad is not None and gradient is not None and torch.equal(leaf.grad, gradient)
    for tensor, expected in seen.items():
        (row,) = (row for row in rows if (row["module"], row["tensor"]) == ("fc", tensor))
        found = [row[name] for name in ("norm", "min", "max", "mean", "std")]
        numbers = (expected.norm(), *expected.aminmax(), expected.mean(), expected.std(unbiased=False))
        assert found == pytest.approx([number.item() for number in numbers], rel=1e-6, abs=1e-6)
    (row,) = (row for row in rows if row["tensor"] == "grad_variable")
    assert (row["module"], row["name"], row["shape"]) == ("<Residual>", "hidden", [3, 4])
    lines = str(rows).splitlines()
    assert lines[0].split()[:3] == ["module", "tensor", "shape"] and sum("  fc (Linear)" in line for line in lines) == 2
    with reprokit.trace(classes=["Lin*"], tensors=["output"], steps=[0, 1]) as rows:
        net(x)
        net(2 * x)
    assert [(row["step"], row["pass"]) for row in rows] == [(0, "forward"), (1, "forward")]
    with pytest.raises(RuntimeError), reprokit.trace(tensors=["input"]) as rows:
        net(torch.ones(3, 5))
    assert {tuple(row["shape"]) for row in rows} == {(3, 5)}
    assert capsys.readouterr().err == ""
    with reprokit.capture(quiet=True), reprokit.trace() as rows:
        net(x)
    assert not rows and "no rows: another capture watches already" in capsys.readouterr().err


def test_every_public_name_is_checked_by_mypy_in_a_program_of_a_user() -> None:
    user = (ROOT / "tests" / "typed_user.py").read_text(encoding="utf-8")
    assert [name for name in reprokit.__all__ if f"reprokit.{name}" not in user] == []


def test_every_public_name_is_documented() -> None:
    table = PAGE.partition("\n## ")[0]
    assert [name for name in reprokit.__all__ if name != "__version__" and not re.search(rf"`{name}\b", table)] == []


def test_the_functions_stay_when_packages_of_the_same_names_are_imported() -> None:
    code = (
        "import sys, reprokit\n"
        "names = ('capture', 'locate', 'shrink', 'render')\n"
        "functions = [getattr(reprokit, name) for name in names]\n"
        "assert 'torch' not in sys.modules\n"
        "import reprokit.capture.session, reprokit.locate.blame, reprokit.shrink.reducer, reprokit.render.issue\n"
        "assert functions == [getattr(reprokit, name) for name in names] and all(map(callable, functions))\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'captures'"):
        reprokit.captures  # noqa: B018


def test_on_snapshot_is_called_with_the_file_when_all_hooks_are_gone(tmp_path: Path) -> None:
    seen: list[tuple[Path, bool]] = []

    def note(path: Path) -> None:
        fails()  # would be a second snapshot
        seen.append((path, path.exists()))

    with reprokit.capture(tmp_path / "a.pt", on_snapshot=note, quiet=True) as session:
        fails()
    assert seen == [(tmp_path / "a.pt", True)]
    assert session.snapshots == [tmp_path / "a.pt"]


def test_an_exception_of_on_snapshot_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("first\nsecond \x1b[31m")

    with reprokit.capture(tmp_path / "a.pt", on_snapshot=fail, after="continue"):
        fails()
    assert reprokit.load(tmp_path / "a.pt").failure.kind == "inf"
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("reprokit:") for line in lines) and not any("\x1b" in line for line in lines)
