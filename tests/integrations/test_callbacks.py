"""The callbacks of transformers and Lightning in real scripts, and what they and the span do without them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from reprokit.capture.session import CaptureStop
from reprokit.integrations import MissingFramework
from reprokit.integrations.span import Options, Span
from reprokit.snapshot.format import load

Run = Callable[..., subprocess.CompletedProcess[str]]
TRANSFORMERS = ("train_transformers.py",)
LIGHTNING = ("train_lightning.py", "automatic")
OLD_LIGHTNING = ("train_lightning.py", "manual", "pytorch_lightning")


class Owner:
    """Stands for a callback."""


@pytest.fixture
def span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Span]:
    monkeypatch.chdir(tmp_path)
    span = Span(None, Options(name="loop"))
    yield span
    span.end()


def train(*, bad_step: int | None = None, raising_step: int | None = None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        width = 4 if step == raising_step else 3
        output = model(torch.ones(2, width))
        loss = torch.log(output.square() * (step != bad_step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def is_watched() -> bool:
    """Whether anything of a capture is in place."""
    return bool(torch._C._len_torch_function_stack() or _global_optimizer_pre_hooks)


@pytest.mark.parametrize("words", [TRANSFORMERS, LIGHTNING], ids=" ".join)
def test_callback_changes_nothing_and_leaves_nothing(words: tuple[str, ...], run_python: Run, tmp_path: Path) -> None:
    plain = run_python(words[0], "healthy", *words[1:], "leftovers")
    watched = run_python(words[0], "healthy", *words[1:], "leftovers", "callback")
    assert plain.returncode == 0, plain.stderr
    assert watched.returncode == 0, watched.stderr
    told = [line for line in plain.stdout.splitlines() if line.startswith(("parameters ", "left behind "))]
    assert len(told) == 2
    assert [line for line in watched.stdout.splitlines() if line.startswith(("parameters ", "left behind "))] == told
    assert not list(tmp_path.glob("*.pt"))
    assert "reprokit" not in watched.stderr


@pytest.mark.parametrize("words", [TRANSFORMERS, LIGHTNING, OLD_LIGHTNING], ids=" ".join)
def test_callback_captures_a_bad_batch(words: tuple[str, ...], run_python: Run, tmp_path: Path) -> None:
    result = run_python(words[0], "nan", *words[1:], "callback")
    assert result.returncode == 3, result.stderr
    assert "parameters" not in result.stdout
    assert "Traceback" not in result.stderr
    snapshot = load(tmp_path / f"{Path(words[0]).stem}-step3.repro.pt")
    assert snapshot.step == 3
    assert snapshot.failure.call == "torch.Tensor.div"
    assert snapshot.fidelity == "exact", snapshot.fidelity_note
    assert result.stderr.count("reprokit: captured nan from `torch.Tensor.div` at step 3") == 1


@pytest.mark.parametrize("words", [TRANSFORMERS, LIGHTNING], ids=" ".join)
def test_callback_captures_an_exception(words: tuple[str, ...], run_python: Run, tmp_path: Path) -> None:
    result = run_python(words[0], "raise", *words[1:], "callback")
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "IndexError: " in result.stderr
    assert "reprokit/" not in result.stderr.partition("Traceback")[2].partition("IndexError")[0]
    snapshot = load(tmp_path / f"{Path(words[0]).stem}-step3.repro.pt")
    assert snapshot.failure.kind == "exception"
    assert snapshot.failure.exception is not None
    assert snapshot.failure.exception[0] == "IndexError"


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


def test_span_is_stopped_by_a_capture_and_can_begin_again(span: Span) -> None:
    owner = Owner()
    for _ in range(2):
        span.begin(owner)
        with pytest.raises(CaptureStop) as stop:
            train(bad_step=2)
        span.end(stop.value)
        assert stop.value.code == 3
        assert not is_watched()
    assert [path.name for path in span.snapshots] == ["loop-step2.repro.pt", "loop-step2-1.repro.pt"]


def test_span_that_was_stopped_does_not_finish_well(span: Span) -> None:
    owner = Owner()
    span.begin(owner)
    with pytest.raises(CaptureStop):
        train(bad_step=1)  # a framework that goes on in spite of it
    with pytest.raises(CaptureStop):
        span.finish()
    span.finish()
    assert len(span.snapshots) == 1


def test_failure_found_only_at_the_end_stops_the_program(tmp_path: Path) -> None:
    owner = Owner()
    span = Span(tmp_path / "late.pt", Options(watch="deferred", history=100, quiet=True))
    span.begin(owner)
    train(bad_step=3)
    with pytest.raises(CaptureStop):
        span.finish()
    assert span.snapshots == [tmp_path / "late.pt"]
    assert load(span.snapshots[0]).step == 3
    assert not is_watched()


def test_span_that_goes_on_finishes_well(tmp_path: Path) -> None:
    owner = Owner()
    span = Span(tmp_path / "here.pt", Options(after="continue", quiet=True))
    span.begin(owner)
    train(bad_step=1)
    span.finish()
    assert span.snapshots == [tmp_path / "here.pt"]


def test_span_ends_with_its_owner(span: Span) -> None:
    owner = Owner()
    span.begin(owner)
    train()
    assert is_watched()
    del owner
    assert not is_watched()


def test_span_that_begins_anew_ends_the_old_one(span: Span) -> None:
    owner = Owner()
    span.begin(owner)
    with pytest.raises(RuntimeError):
        train(raising_step=1)  # the program handles it
    span.begin(owner)
    train()
    span.finish()
    assert not is_watched()
    assert span.snapshots == []


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


def test_hook_set_over_the_span_is_left_alone(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    owner = Owner()
    span.begin(owner)
    span.end_when_uncaught()
    below = sys.excepthook

    def over(kind: type[BaseException], error: BaseException, traceback: object) -> None:
        below(kind, error, error.__traceback__)

    monkeypatch.setattr(sys, "excepthook", over)
    span.finish()
    assert sys.excepthook is over
    error = ValueError("later")
    sys.excepthook(ValueError, error, None)
    assert shown == [error]


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_missing_framework_is_an_import_error_with_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"reprokit.integrations.{name}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"reprokit.integrations.{name}")
    error = raised.value
    assert isinstance(error, MissingFramework)
    assert str(error) == f"the callback for `{name}` needs `{name}`, which is not installed"
    assert error.hint is not None
    assert f"pip install {name}" in error.hint
    assert error.__notes__ == [f"hint: {error.hint}"]


def test_no_framework_is_imported_unasked(run_python: Run) -> None:
    names = "{'torch', 'transformers', 'lightning', 'pytorch_lightning'}"
    code = f"import sys, reprokit, reprokit.integrations.span; print({names} & set(sys.modules))"
    result = run_python("-c", code)
    assert result.stdout == "set()\n", result.stderr
