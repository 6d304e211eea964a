"""Scripts of the frameworks under ``reprokit capture``, unmodified: healthy, with a bad batch, and raising."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reprokit.cli import main
from reprokit.render.expectation import expect
from reprokit.snapshot.format import load
from tests.integrations.conftest import Finished, Run

pytestmark = pytest.mark.slow

MISMATCH = "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 0"
LIGHTNING = ("automatic:healthy", "manual:healthy", "closure:healthy")


def parameters_in(lines: list[str]) -> list[str]:
    """The digests of final parameters that the script printed."""
    return [line for line in lines if line.startswith("parameters ")]


def assert_alike(watched: Finished, unwatched: Finished, healthy: tuple[str, ...]) -> None:
    """The final parameters of healthy modes are the same to the last bit."""
    for mode in healthy:
        (digest,) = parameters_in(watched.modes[mode])
        assert [digest] == parameters_in(unwatched.modes[mode])


def assert_located_and_shrunk(
    file: Path, origin: dict[str, Any], num_healthy: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """``reprokit show`` has the expected origin, ``reprokit shrink`` makes a program that fails alike every time."""
    assert main(["show", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    failure = shown["failure"]
    assert {name: failure[name] for name in origin} == origin
    assert failure["site"]["file"].startswith("train_") and failure["observed_at"] == "loss"
    assert shown["fidelity"] == "exact", shown.get("fidelity_note")
    assert min(item["step"] for item in shown["timeline"]) == num_healthy  # it is that of the model that failed
    assert expect(load(file)).owner == "own"
    assert main(["shrink", str(file), "-o", str(file.parent / "reduction"), "--json"]) == 0
    reduced = json.loads(capsys.readouterr().out)
    assert (reduced["verdict"], reduced["signature"]["call"]) == ("reduced", origin["call"])
    assert reduced["repro"]["verified"] == "20/20"


@pytest.mark.parametrize(
    ("script", "healthy", "mode", "num_healthy", "step", "call", "module"),
    [
        ("train_transformers.py", ("healthy",), "nan", 6, 3, "torch.Tensor.div", "pool"),
        ("train_lightning.py", LIGHTNING, "closure:nan", 18, 3, "torch.Tensor.div", "<Standardize>"),
        ("train_ignite.py", ("healthy",), "nan", 7, 4, "torch.sqrt", None),
    ],
    ids=["transformers", "lightning", "ignite"],
)
def test_healthy_training_is_not_changed_and_a_bad_batch_is_captured(
    script: str,
    healthy: tuple[str, ...],
    mode: str,
    num_healthy: int,
    step: int,
    call: str,
    module: str | None,
    run: Run,
    plain: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched = run("-m", "reprokit", "capture", script, *healthy, mode)
    assert watched.code == 3, watched.stderr
    assert_alike(watched, plain(script), healthy)
    assert not parameters_in(watched.modes[mode]) and not watched.tracebacks
    (file,) = watched.folder.glob("*.pt")
    assert watched.stderr.splitlines()[-1] == f"reprokit: next: reprokit shrink {file.name}"
    origin = {"step": num_healthy + step, "micro_step": 0, "phase": "forward", "kind": "nan", "call": call}
    assert_located_and_shrunk(file, {**origin, "module": module}, num_healthy, capsys)


@pytest.mark.parametrize(
    ("script", "healthy", "mode", "step", "call", "error"),
    [
        (
            *("train_lightning.py", LIGHTNING, "manual:raise", 21, "torch.nn.functional.cross_entropy"),
            "IndexError: Target 3 is out of bounds.",
        ),
        ("train_ignite.py", ("healthy",), "raise", 11, "torch.Tensor.sub", f"RuntimeError: {MISMATCH}"),
    ],
    ids=["lightning", "ignite"],
)
def test_healthy_training_is_not_changed_and_an_exception_is_captured(
    script: str, healthy: tuple[str, ...], mode: str, step: int, call: str, error: str, run: Run, plain: Run
) -> None:
    watched = run("-m", "reprokit", "capture", script, *healthy, mode)
    assert watched.code == 3, watched.stderr
    assert_alike(watched, plain(script), healthy)
    assert error in watched.tracebacks[0]
    assert watched.tracebacks == plain(script).tracebacks[:1]
    (file,) = watched.folder.glob("*.pt")
    snapshot = load(file)
    failure = snapshot.failure
    assert (failure.kind, failure.phase, failure.call) == ("exception", "forward", call)
    assert failure.exception is not None and failure.exception[0] == error.partition(":")[0]
    assert (snapshot.observed_at, snapshot.step, snapshot.micro_step) == ("exception", step, 0)


def test_a_run_that_goes_on_after_the_capture_is_not_changed(
    run: Run, plain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    script, modes = "train_accelerate.py", ["healthy", "nan", "raise", "healthy"]
    watched = run("-m", "reprokit", "capture", "--after-capture", "continue", script, *modes)
    assert (watched.code, watched.stdout) == (0, plain(script).stdout), watched.stderr
    assert len(parameters_in(watched.stdout.splitlines())) == 3
    assert watched.tracebacks[0].endswith("\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)")
    assert len(watched.tracebacks) == len(plain(script).tracebacks) == 1
    (file,) = watched.folder.glob("*.pt")
    origin = {"step": 6, "micro_step": 1, "phase": "forward", "kind": "inf", "call": "torch.log", "module": "2"}
    assert_located_and_shrunk(file, origin, 4, capsys)
