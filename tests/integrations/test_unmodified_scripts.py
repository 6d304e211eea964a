"""Scripts of the frameworks under ``reprokit capture``, unmodified: healthy, with a bad batch, and raising."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from reprokit.cli import main
from reprokit.render.expectation import expect
from reprokit.snapshot.format import load
from tests.integrations.conftest import Finished, Run

pytestmark = pytest.mark.slow

MISMATCH = "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 0"


@dataclass(frozen=True)
class Expected:
    """Where a script goes wrong with a bad batch.

    ``healthy`` are modes in which nothing goes wrong, with ``num_healthy`` steps together; steps are counted through.
    """

    script: str
    healthy: tuple[str, ...]
    num_healthy: int
    step: int
    micro_step: int
    call: str
    kind: str
    module: str | None

    def after_healthy(self) -> Expected:
        """What to expect when the healthy modes come first."""
        return replace(self, step=self.num_healthy + self.step)

    @property
    def snapshot(self) -> str:
        return f"{Path(self.script).stem}-step{self.step}.repro.pt"

    def lines_for(self, kind: str, call: str) -> list[str]:
        """What reprokit says of a run, from its first line to its last."""
        return [
            f"reprokit: watching `{self.script}`; a failing step goes to {Path(self.script).stem}-step<N>.repro.pt",
            f"reprokit: captured {kind} from `{call}` at step {self.step} -> {self.snapshot}",
            f"reprokit: next: reprokit shrink {self.snapshot}",
        ]


def headlines(told: list[str]) -> list[str]:
    """What is said, without the announcement of a failure and the indented lines that describe it."""
    is_announced = ("; replaying the step", "; going back to find the step that made it")
    return [line for line in told if not line.startswith("reprokit:   ") and not line.endswith(is_announced)]


TRANSFORMERS = Expected(
    script="train_transformers.py",
    healthy=("healthy",),
    num_healthy=6,
    step=3,
    micro_step=0,
    call="torch.Tensor.div",
    kind="nan",
    module="pool",
)
LIGHTNING = Expected(
    script="train_lightning.py",
    healthy=("automatic:healthy", "manual:healthy", "closure:healthy"),
    num_healthy=18,
    step=3,
    micro_step=0,
    call="torch.Tensor.div",
    kind="nan",
    module="<Standardize>",
)
ACCELERATE = Expected(
    script="train_accelerate.py",
    healthy=("healthy",),
    num_healthy=4,
    step=2,
    micro_step=1,
    call="torch.log",
    kind="inf",
    module="2",
)
IGNITE = Expected(
    script="train_ignite.py",
    healthy=("healthy",),
    num_healthy=7,
    step=4,
    micro_step=0,
    call="torch.sqrt",
    kind="nan",
    module=None,
)


def test_healthy_training_is_not_changed_and_a_bad_batch_is_captured(
    run: Run, plain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = TRANSFORMERS.after_healthy()
    watched = run("-m", "reprokit", "capture", expected.script, *expected.healthy, "nan")
    assert watched.code == 3, watched.stderr
    assert_healthy_modes_are_alike(expected, watched, plain(expected.script))
    assert not parameters_in(watched.modes["nan"])
    assert not watched.tracebacks
    assert headlines(watched.told) == expected.lines_for(expected.kind, expected.call)
    steps = assert_located(expected, watched.folder, capsys)
    assert min(steps) == expected.num_healthy  # the timeline is that of the model that failed
    assert_shrinks(expected, watched.folder, capsys)


@pytest.mark.parametrize(
    ("alone", "mode", "call", "error"),
    [
        (LIGHTNING, "manual:raise", "torch.nn.functional.cross_entropy", "IndexError: Target 3 is out of bounds."),
        (IGNITE, "raise", "torch.Tensor.sub", f"RuntimeError: {MISMATCH}"),
    ],
    ids=["lightning", "ignite"],
)
def test_healthy_training_is_not_changed_and_an_exception_is_captured(
    alone: Expected, mode: str, call: str, error: str, run: Run, plain: Run
) -> None:
    expected, unwatched = alone.after_healthy(), plain(alone.script)
    watched = run("-m", "reprokit", "capture", expected.script, *expected.healthy, mode)
    assert watched.code == 3, watched.stderr
    assert_healthy_modes_are_alike(expected, watched, unwatched)
    assert error in watched.tracebacks[0]
    assert watched.tracebacks == unwatched.tracebacks[:1]
    kind = error.partition(":")[0]
    assert headlines(watched.told) == expected.lines_for(kind, call)
    snapshot = load(watched.folder / expected.snapshot)
    failure = snapshot.failure
    assert (failure.kind, failure.phase, failure.call) == ("exception", "forward", call)
    assert failure.exception is not None
    assert failure.exception[0] == kind
    assert snapshot.observed_at == "exception"
    assert (snapshot.step, snapshot.micro_step) == (expected.step, expected.micro_step)


@pytest.mark.parametrize(
    ("expected", "mode"),
    [(LIGHTNING, "automatic:nan"), (LIGHTNING, "closure:nan"), (IGNITE, "nan")],
    ids=["lightning automatic", "lightning closure", "ignite"],
)
def test_bad_batch_is_captured(
    expected: Expected, mode: str, preloaded: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = preloaded(expected.script, mode)
    assert result.code == 3, result.stderr
    assert not parameters_in(result.modes[mode])
    assert headlines(result.told) == expected.lines_for(expected.kind, expected.call)
    steps = assert_located(expected, result.folder, capsys)
    assert steps[: expected.step] == list(range(expected.step))
    if mode == "automatic:nan":
        assert_shrinks(expected, result.folder, capsys)


def test_a_run_that_goes_on_after_the_capture_is_not_changed(
    run: Run, plain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, modes = ACCELERATE.after_healthy(), ["healthy", "nan", "raise", "healthy"]
    unwatched = plain(expected.script)
    watched = run("-m", "reprokit", "capture", "--after-capture", "continue", expected.script, *modes)
    assert (watched.code, unwatched.code) == (0, 0), watched.stderr
    assert len(parameters_in(watched.stdout.splitlines())) == 3
    assert watched.stdout == unwatched.stdout
    assert watched.tracebacks[0].endswith("\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)")
    assert len(watched.tracebacks) == len(unwatched.tracebacks) == 1
    assert [path.name for path in watched.folder.glob("*.pt")] == [expected.snapshot]
    steps = assert_located(expected, watched.folder, capsys)
    assert min(steps) == expected.num_healthy  # the timeline is that of the model that failed
    assert_shrinks(expected, watched.folder, capsys)


def parameters_in(lines: list[str]) -> list[str]:
    """The digests of final parameters that the script printed."""
    return [line for line in lines if line.startswith("parameters ")]


def assert_healthy_modes_are_alike(expected: Expected, watched: Finished, unwatched: Finished) -> None:
    """The final parameters are the same to the last bit."""
    for mode in expected.healthy:
        assert len(parameters_in(watched.modes[mode])) == 1, watched.stdout
        assert parameters_in(watched.modes[mode]) == parameters_in(unwatched.modes[mode])


def assert_located(expected: Expected, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """``reprokit show`` tells the expected step and origin; the steps of its timeline."""
    assert main(["show", str(folder / expected.snapshot), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    failure = shown["failure"]
    assert (failure["step"], failure["micro_step"]) == (expected.step, expected.micro_step)
    assert (failure["phase"], failure["kind"]) == ("forward", expected.kind)
    assert (failure["call"], failure["module"]) == (expected.call, expected.module)
    assert failure["site"]["file"] == expected.script
    assert failure["observed_at"] == "loss"
    assert shown["fidelity"] == "exact", shown.get("fidelity_note")
    assert expect(load(folder / expected.snapshot)).owner == "own"
    return [item["step"] for item in shown["timeline"]]


def assert_shrinks(expected: Expected, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``reprokit shrink`` makes a program of the snapshot that fails alike every time."""
    assert main(["shrink", str(folder / expected.snapshot), "-o", str(folder / "reduction"), "--json"]) == 0
    reduced = json.loads(capsys.readouterr().out)
    assert reduced["verdict"] == "reduced"
    assert reduced["signature"]["call"] == expected.call
    assert reduced["repro"]["verified"] == "20/20"
