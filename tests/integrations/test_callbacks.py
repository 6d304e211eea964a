"""The callbacks of transformers and Lightning in real scripts, and what they and the span do without them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from reprokit.capture.mode import CaptureStop
from reprokit.integrations import MissingFramework
from reprokit.integrations.span import Options, Span
from reprokit.snapshot.format import load
from tests import conftest
from tests.integrations.conftest import Finished, Run

CALLBACKS = [("train_transformers.py", ""), ("train_lightning.py", "automatic:")]  # and the loops that they are in


class Owner:
    """Stands for a callback."""


@pytest.fixture
def span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Span]:
    monkeypatch.chdir(tmp_path)
    span = Span(None, Options(name="loop"))
    yield span
    span.end()


def train(*, bad_step: int | None = None, raising_step: int | None = None, bad_rate: int | None = None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        width = 4 if step == raising_step else 3
        output = model(torch.ones(2, width))
        loss = torch.log(output.square() * (step != bad_step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = float("inf") if step == bad_rate else 0.1
        optimizer.step()


def is_watched() -> bool:
    """Whether anything of a capture is in place."""
    return bool(torch._C._len_torch_function_stack() or _global_optimizer_pre_hooks)


@pytest.mark.parametrize(("script", "loop"), CALLBACKS)
def test_callback_changes_nothing_and_leaves_nothing(script: str, loop: str, plain: Run) -> None:
    result = plain(script)
    without, within = result.modes[f"{loop}healthy"], result.modes[f"{loop}healthy:callback"]
    assert [line.partition(" ")[0] for line in without] == ["parameters", "left"]
    assert within == without
    assert result.stderr.index("reprokit: the loss is nan") == result.stderr.index("reprokit: ")  # the run that fails


@pytest.mark.parametrize(("script", "loop"), CALLBACKS)
def test_callback_captures_a_bad_batch(script: str, loop: str, plain: Run) -> None:
    result = plain(script)
    assert "stopped with 3" in result.modes[f"{loop}nan:callback"]
    assert not any(line.startswith("parameters ") for line in result.modes[f"{loop}nan:callback"])
    assert_captured_nan(result, f"{Path(script).stem}-step3.repro.pt")


@pytest.mark.parametrize(("script", "loop"), CALLBACKS)
def test_callback_captures_an_exception(script: str, loop: str, plain: Run) -> None:
    result = plain(script)
    assert result.code == 1, result.stderr
    without, within = result.tracebacks[-2:]  # the former was raised without a callback, and was handled by the script
    assert within.rpartition("\n")[2].startswith("IndexError: ")
    assert within == without
    snapshots = sorted(path.name for path in result.folder.glob("*.pt"))
    assert snapshots == [f"{Path(script).stem}-step3-1.repro.pt", f"{Path(script).stem}-step3.repro.pt"]
    snapshot = load(result.folder / snapshots[0])
    assert snapshot.step == 3
    assert snapshot.failure.kind == "exception"
    assert snapshot.failure.exception is not None
    assert snapshot.failure.exception[0] == "IndexError"


def assert_captured_nan(result: Finished, name: str) -> None:
    snapshot = load(result.folder / name)
    assert snapshot.step == 3
    assert snapshot.failure.call == "torch.Tensor.div"
    assert snapshot.fidelity == "exact", snapshot.fidelity_note
    assert result.stderr.count("reprokit: captured nan from `torch.Tensor.div` at step 3") == 1


def test_span_ends_where_it_is_told_to(span: Span) -> None:
    before = is_watched(), sys.excepthook
    owner = Owner()
    span.begin(owner)
    span.end_when_uncaught()
    assert is_watched()
    train()
    span.finish()
    assert (is_watched(), sys.excepthook) == before
    train(bad_step=2)
    assert span.snapshots == []


def test_failure_found_only_at_the_end_stops_the_program(tmp_path: Path) -> None:
    owner = Owner()
    span = Span(tmp_path / "late.pt", Options(history=100, quiet=True))
    span.begin(owner)
    train(bad_rate=3)
    with pytest.raises(CaptureStop):
        span.finish()
    assert span.snapshots == [tmp_path / "late.pt"]
    assert load(span.snapshots[0]).step == 3
    assert not is_watched()


def test_span_ends_with_its_owner(span: Span) -> None:
    owner = Owner()
    span.begin(owner)
    train()
    assert is_watched()
    del owner
    assert not is_watched()


def test_span_ends_with_an_exception_that_nobody_handles(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    outer = sys.excepthook
    owner = Owner()
    span.begin(owner)
    span.end_when_uncaught()
    with pytest.raises(RuntimeError) as raised:
        train(raising_step=2)
    error = raised.value
    sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [error]
    assert sys.excepthook is outer
    assert not is_watched()
    assert [path.name for path in span.snapshots] == ["loop-step2.repro.pt"]
    assert load(span.snapshots[0]).failure.call == "torch.nn.functional.linear"


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_missing_framework_is_an_import_error_with_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"reprokit.integrations.{name}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"reprokit.integrations.{name}")
    error = raised.value
    assert isinstance(error, MissingFramework)
    assert str(error) == f"`{name}` is not installed"
    assert error.hint is not None
    assert f"pip install {name}" in error.hint
    assert error.__notes__ == [f"hint: {error.hint}"]


def test_no_framework_is_imported_unasked(start_python: conftest.Run) -> None:
    names = "{'torch', 'transformers', 'lightning', 'pytorch_lightning'}"
    code = f"import sys, reprokit, reprokit.integrations.span; print({names} & set(sys.modules))"
    result = start_python("-c", code)
    assert result.stdout == "set()\n", result.stderr
