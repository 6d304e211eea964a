"""Scripts of the frameworks under ``reprokit capture``, unmodified: healthy, with a bad batch, and raising."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from reprokit.cli import main
from reprokit.snapshot.format import load

Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Expected:
    """Where a script goes wrong with a bad batch, and where with one that raises."""

    words: tuple[str, ...]
    step: int
    micro_step: int
    call: str
    kind: str
    module: str | None
    raising_call: str
    error: str

    @property
    def script(self) -> str:
        return self.words[0]

    @property
    def snapshot(self) -> str:
        return f"{Path(self.script).stem}-step{self.step}.repro.pt"

    def command(self, mode: str) -> list[str]:
        """The script with its mode as first argument."""
        return [self.script, mode, *self.words[1:]]


TRANSFORMERS = Expected(
    words=("train_transformers.py",),
    step=3,
    micro_step=0,
    call="torch.Tensor.div",
    kind="nan",
    module="pool",
    raising_call="torch.nn.functional.embedding",
    error="IndexError: index out of range in self",
)
ACCELERATE = Expected(
    words=("train_accelerate.py",),
    step=2,
    micro_step=1,
    call="torch.log",
    kind="inf",
    module="2",
    raising_call="torch.nn.functional.linear",
    error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)",
)
IGNITE = Expected(
    words=("train_ignite.py",),
    step=4,
    micro_step=0,
    call="torch.sqrt",
    kind="nan",
    module=None,
    raising_call="torch.Tensor.sub",
    error="RuntimeError: The size of tensor a (4) must match the size of tensor b (3)",
)


def lightning(loop: str) -> Expected:
    return Expected(
        words=("train_lightning.py", loop),
        step=3,
        micro_step=0,
        call="torch.Tensor.div",
        kind="nan",
        module="<Standardize>",
        raising_call="torch.nn.functional.cross_entropy",
        error="IndexError: Target 3 is out of bounds.",
    )


def name_of(expected: Expected) -> str:
    return " ".join(expected.words)


@pytest.mark.parametrize(
    "words",
    [TRANSFORMERS.words, ("train_lightning.py", "automatic,manual,closure"), ACCELERATE.words, IGNITE.words],
    ids=" ".join,
)
def test_healthy_training_is_not_changed(
    words: tuple[str, ...], run_python: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    command = [words[0], "healthy", *words[1:]]
    plain = run_python(*command)
    captured = run_reprokit("capture", *command)
    assert plain.returncode == 0, plain.stderr
    assert captured.returncode == 0, captured.stderr
    parameters = parameters_of(plain)
    assert len(parameters) == words[-1].count(",") + 1
    assert parameters_of(captured) == parameters
    assert not list(tmp_path.glob("*.pt"))
    assert [line for line in captured.stderr.splitlines() if line.startswith("reprokit: ")] == [
        f"reprokit: watching `{words[0]}`; a failing step goes to {Path(words[0]).stem}-step<N>.repro.pt"
    ]


@pytest.mark.parametrize("loop", ["manual", "closure"])
def test_bad_batch_is_captured(
    loop: str, run_reprokit: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = lightning(loop)
    assert_captured(expected, run_reprokit("capture", *expected.command("nan")), tmp_path, capsys)


@pytest.mark.parametrize("expected", [TRANSFORMERS, lightning("automatic"), ACCELERATE, IGNITE], ids=name_of)
def test_bad_batch_is_captured_and_shrunk(
    expected: Expected, run_reprokit: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_captured(expected, run_reprokit("capture", *expected.command("nan")), tmp_path, capsys)
    assert main(["shrink", str(tmp_path / expected.snapshot), "-o", str(tmp_path / "reduction"), "--json"]) == 0
    reduced = json.loads(capsys.readouterr().out)
    assert reduced["verdict"] == "reduced"
    assert reduced["signature"]["call"] == expected.call
    assert reduced["repro"]["verified"] == "20/20"


@pytest.mark.parametrize("expected", [TRANSFORMERS, lightning("automatic"), ACCELERATE, IGNITE], ids=name_of)
def test_exception_is_captured_with_its_own_traceback(
    expected: Expected, run_python: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    plain = run_python(*expected.command("raise"))
    assert plain.returncode == 1
    result = run_reprokit("capture", *expected.command("raise"))
    assert result.returncode == 3, result.stderr
    assert expected.error in traceback_of(result)
    assert traceback_of(result) == traceback_of(plain)
    snapshot = load(tmp_path / expected.snapshot)
    failure = snapshot.failure
    assert (failure.kind, failure.phase, failure.call) == ("exception", "forward", expected.raising_call)
    assert failure.exception is not None
    assert failure.exception[0] == expected.error.partition(":")[0]
    assert snapshot.observed_at == "exception"
    assert (snapshot.step, snapshot.micro_step) == (expected.step, expected.micro_step)


def parameters_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The digests of final parameters that the script printed."""
    return [line for line in result.stdout.splitlines() if line.startswith("parameters ")]


def traceback_of(result: subprocess.CompletedProcess[str]) -> str:
    """The traceback on stderr, without what reprokit says after it."""
    text = result.stderr[result.stderr.index("Traceback (most recent call last)") :]
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("reprokit: "))


def assert_captured(
    expected: Expected, result: subprocess.CompletedProcess[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script was stopped in the expected step, and ``reprokit show`` tells the expected origin."""
    assert result.returncode == 3, result.stderr
    assert not parameters_of(result)
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
