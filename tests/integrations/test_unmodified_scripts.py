"""Scripts of the frameworks under ``reprokit capture``, unmodified: healthy, with a bad batch, and raising."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reprokit.cli import main
from reprokit.snapshot.format import load

Run = Callable[..., Any]


@dataclass(frozen=True)
class Expected:
    """Where a script goes wrong with a bad batch, and where with one that raises."""

    script: str
    step: int
    micro_step: int
    call: str
    kind: str
    module: str | None
    raising_call: str
    error: str

    @property
    def snapshot(self) -> str:
        return f"{Path(self.script).stem}-step{self.step}.repro.pt"

    @property
    def is_watched(self) -> str:
        """What reprokit says of a run in which nothing goes wrong."""
        return f"reprokit: watching `{self.script}`; a failing step goes to {Path(self.script).stem}-step<N>.repro.pt"


TRANSFORMERS = Expected(
    script="train_transformers.py",
    step=5,
    micro_step=0,
    call="torch.Tensor.div",
    kind="nan",
    module="pool",
    raising_call="torch.nn.functional.embedding",
    error="IndexError: index out of range in self",
)
LIGHTNING = Expected(
    script="train_lightning.py",
    step=5,
    micro_step=0,
    call="torch.Tensor.div",
    kind="nan",
    module="<Standardize>",
    raising_call="torch.nn.functional.cross_entropy",
    error="IndexError: Target 3 is out of bounds.",
)
ACCELERATE = Expected(
    script="train_accelerate.py",
    step=3,
    micro_step=1,
    call="torch.log",
    kind="inf",
    module="2",
    raising_call="torch.nn.functional.linear",
    error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)",
)
IGNITE = Expected(
    script="train_ignite.py",
    step=5,
    micro_step=0,
    call="torch.sqrt",
    kind="nan",
    module=None,
    raising_call="torch.Tensor.sub",
    error="RuntimeError: The size of tensor a (4) must match the size of tensor b (3)",
)


@pytest.mark.parametrize(
    ("expected", "healthy", "raising"),
    [
        (TRANSFORMERS, ["healthy"], "raise"),
        (LIGHTNING, ["automatic:healthy", "manual:healthy", "closure:healthy"], "manual:raise"),
        (IGNITE, ["healthy"], "raise"),
    ],
    ids=["transformers", "lightning", "ignite"],
)
def test_healthy_training_is_not_changed_and_an_exception_is_captured(
    expected: Expected, healthy: list[str], raising: str, run: Run, plain: Run
) -> None:
    unwatched = plain(expected.script)
    watched = run("-m", "reprokit", "capture", expected.script, *healthy, raising)
    assert watched.code == 3, watched.stderr
    for mode in healthy:
        assert parameters_in(watched.modes[mode]), watched.stdout
        assert parameters_in(watched.modes[mode]) == parameters_in(unwatched.modes[mode])
    assert expected.error in watched.tracebacks[0]
    assert watched.tracebacks == unwatched.tracebacks[:1]
    assert watched.told == [
        expected.is_watched,
        f"reprokit: captured {expected.error.partition(':')[0]} from `{expected.raising_call}` at step {expected.step}"
        f" -> {expected.snapshot}",
        f"reprokit: next: reprokit shrink {expected.snapshot}",
    ]
    assert [path.name for path in watched.folder.glob("*.pt")] == [expected.snapshot]
    snapshot = load(watched.folder / expected.snapshot)
    failure = snapshot.failure
    assert (failure.kind, failure.phase, failure.call) == ("exception", "forward", expected.raising_call)
    assert failure.exception is not None
    assert failure.exception[0] == expected.error.partition(":")[0]
    assert snapshot.observed_at == "exception"
    assert (snapshot.step, snapshot.micro_step) == (expected.step, expected.micro_step)


@pytest.mark.parametrize(
    ("expected", "mode", "is_shrunk"),
    [
        (TRANSFORMERS, "nan", True),
        (LIGHTNING, "automatic:nan", True),
        (LIGHTNING, "closure:nan", False),
        (IGNITE, "nan", False),
    ],
    ids=["transformers", "lightning automatic", "lightning closure", "ignite"],
)
def test_bad_batch_is_captured(
    expected: Expected, mode: str, is_shrunk: bool, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("-m", "reprokit", "capture", expected.script, mode)
    assert result.code == 3, result.stderr
    assert not parameters_in(result.modes[mode])
    assert_located(expected, result.folder, capsys)
    if is_shrunk:
        assert_shrinks(expected, result.folder, capsys)


def test_a_run_that_goes_on_after_the_capture_is_not_changed(
    run: Run, plain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, modes = ACCELERATE, ["healthy", "nan", "raise", "healthy"]
    unwatched = plain(expected.script)
    watched = run("-m", "reprokit", "capture", "--after-capture", "continue", expected.script, *modes)
    assert (watched.code, unwatched.code) == (0, 0), watched.stderr
    assert len(parameters_in(watched.stdout.splitlines())) == 3
    assert watched.stdout == unwatched.stdout
    assert expected.error in watched.tracebacks[0]
    assert watched.tracebacks == unwatched.tracebacks
    assert [path.name for path in watched.folder.glob("*.pt")] == [expected.snapshot]
    assert_located(expected, watched.folder, capsys)
    assert_shrinks(expected, watched.folder, capsys)


def parameters_in(lines: list[str]) -> list[str]:
    """The digests of final parameters that the script printed."""
    return [line for line in lines if line.startswith("parameters ")]


def assert_located(expected: Expected, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``reprokit show`` tells the expected step and origin."""
    assert main(["show", str(folder / expected.snapshot), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    failure = shown["failure"]
    assert (failure["step"], failure["micro_step"]) == (expected.step, expected.micro_step)
    assert (failure["phase"], failure["kind"]) == ("forward", expected.kind)
    assert (failure["call"], failure["module"]) == (expected.call, expected.module)
    assert failure["site"]["file"] == expected.script
    assert failure["observed_at"] == "loss"
    assert shown["fidelity"] == "exact", shown.get("fidelity_note")
    assert [item["step"] for item in shown["timeline"]][: expected.step] == list(range(expected.step))


def assert_shrinks(expected: Expected, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``reprokit shrink`` makes a program of the snapshot that fails alike every time."""
    assert main(["shrink", str(folder / expected.snapshot), "-o", str(folder / "reduction"), "--json"]) == 0
    reduced = json.loads(capsys.readouterr().out)
    assert reduced["verdict"] == "reduced"
    assert reduced["signature"]["call"] == expected.call
    assert reduced["repro"]["verified"] == "20/20"
