"""A loss that leaves its course: the step where that began, its cause, and a repro, by the public commands."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reprokit
from reprokit.rules.match import diagnose
from reprokit.words import data_words, number_words
from tests.capture.traps_checks import update
from tests.conftest import run_python_in
from tests.early import mlp

SPIKE = """
import torch
import torch.nn as nn

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(m.parameters(), lr=0.01)
for step in range(60):
    x = torch.randn(8, 16)
    y = x.sum(1, keepdim=True)
    if step == 30:
        y = y * 1e4
    loss = (m(x) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_python_in(folder, "-m", "reprokit", *words)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("spike")
    (folder / "train.py").write_text(SPIKE)
    return folder, _run(folder, "capture", "--on", "spike", "train.py")


def test_the_step_where_it_began_is_saved(captured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = captured
    assert done.returncode == 3
    shown = json.loads(_run(folder, "show", "--json", "train-step30.repro.pt").stdout)
    failure = shown["failure"]
    assert (failure["kind"], failure["step"], failure["observed_at"]) == ("spike", 30, "loss")
    assert failure["site"]["code"].strip() == "y = y * 1e4"
    event = failure["event"]
    assert (event["quantity"], event["began_at"], event["reference_step"]) == ("loss", 30, 29)
    assert event["value"] > 1e6 * event["usual"]
    assert event["threshold"] < event["value"]
    assert event["rows"] == "rows 0-7"
    assert shown["fidelity"] == "exact"
    assert failure["module"] is None  # the call is in the loop
    first = shown["story"][0]
    assert (first["step"], first["module"], first["quantity"]) == (30, "2", "gradient norm")


def test_events_are_told_and_logged(captured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = captured
    told = [line for line in done.stderr.splitlines() if "spike at step" in line]
    assert len(told) == 1
    assert told[0].count("step 30") == 1 and "began at" not in told[0]
    (line,) = (folder / "train.events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["severity"], event["began_at"], event["place"]) == ("spike", "error", 30, "2")
    assert event["snapshot"].endswith("train-step30.repro.pt")


@pytest.mark.parametrize("odd", [(), (40, 46)])
def test_a_loss_that_was_as_high_before_does_not_begin_anew(
    odd: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the data have grown; they are in single batches before they are in several in a row."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with reprokit.capture(tmp_path / "s.pt", on=("spike",)):
        for step in range(80):
            x = torch.randn(16, 4) * (20 if step in odd else 1 if step < 52 else 10 if step < 54 else 60)
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: spike" in line]
    assert re.search(r"at step 52, after \d+ at step 4[06]: the loss was" if odd else "began at step 52: ", line), line


def test_the_repro_asserts_the_recorded_threshold(captured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = captured
    done = _run(folder, "shrink", "-f", "--no-whatif", "--json", "train-step30.repro.pt")
    result = json.loads(done.stdout)
    assert result["repro"]["verified"] == "20/20"
    assert result["elements"] <= 20  # a row of the batch as it was recorded
    text = next(folder.glob("train-step30*/repro.py")).read_text()
    assert "10000" in text
    assert "assert loss < " in text
    issue = next(folder.glob("train-step30*/issue.md")).read_text()
    assert "In training step 30 the loss was" in issue
    assert "the limit of what was usual in this run, whose median before was" in issue
    assert (
        "**The data of this step** (likely). Step 30 differs from step 29 in its data: rows 0-7 of the batch" in issue
    )
    assert "# spike: the loss of this reduced program is" in text
    assert _run(folder, "verify", "train-step30.repro.pt").returncode == 0


def _bad_rows(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = torch.randn(16, 16)
    y = x.sum(1, keepdim=True)
    if step == 60:
        x[3:5] *= 1e4
    return F.mse_loss(model(x), y)


def _rate(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if step == 60:
        optimizer.param_groups[0]["lr"] = 3.0
    x = torch.randn(16, 16)
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def _bad_weight(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if step == 60:
        with torch.no_grad():
            next(model.children()).weight.mul_(1e3)  # type: ignore[operator, union-attr]
    x = torch.randn(16, 16)
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def _loop(
    tmp_path: Path, loss_of: Callable[..., torch.Tensor], on: tuple[str, ...] = ("nonfinite", "early"), **settings: Any
) -> Any:
    """A training with a planted cause at step 60; the session and its events."""
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(tmp_path / "run.pt", on=on, on_event=events.append, quiet=True, **settings) as session:
        for step in range(150):
            loss = loss_of(step, model, optimizer)
            update(optimizer, loss)
    return session, events


@pytest.mark.parametrize(
    ("loss_of", "quantity", "call", "rows"),
    [
        (_bad_rows, "loss", "torch.Tensor.__setitem__", "rows 3-4"),
        (_rate, "update", "torch.optim.SGD.step", None),
        (_bad_weight, "loss", "torch.nn.functional.linear", None),
    ],
)
def test_a_planted_cause_is_found(
    loss_of: Callable[..., torch.Tensor], quantity: str, call: str, rows: str | None, tmp_path: Path
) -> None:
    session, events = _loop(tmp_path, loss_of)
    (result,), (event,) = session.results, events
    failure = result["failure"]
    assert (failure["step"], failure["event"]["quantity"], failure["call"]) == (60, quantity, call)
    assert failure["event"].get("rows") == rows
    assert result["fidelity"] == "exact"
    assert (event.kind, event.began_at, event.snapshot) == ("spike", 60, str(tmp_path / "run.pt"))


def _negative_decay(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if step == 60:
        optimizer.param_groups[0]["weight_decay"] = -8.0
    x = torch.randn(16, 16) * (1 + 2 * (torch.rand(16, 1) < 0.1))  # rows differ, but these have always been there
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def test_a_gradient_that_nobody_clips_is_told_once_it_has_grown(tmp_path: Path) -> None:
    def grows(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.randn(16, 16)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        factor = 1e6 if step >= 110 else 1.0
        return loss.detach() + (loss - loss.detach()) * factor  # of the gradient only

    torch.manual_seed(0)
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(tmp_path / "run.pt", on=("early",), on_event=events.append, quiet=True) as session:
        for step in range(200):
            update(optimizer, grows(step, model, optimizer))
    (event,) = [one for one in events if one.kind == "explosion"]
    assert event.severity == "warning" and "the norm of all gradients is " in event.evidence and event.step >= 110
    assert not session.snapshots


def test_weights_that_grow_are_not_laid_to_a_batch(tmp_path: Path) -> None:
    session, _ = _loop(tmp_path, _negative_decay, history=40)  # what is usual depends on how far back a copy lies
    (result,) = session.results
    event = result["failure"]["event"]
    assert event["began_at"] > 60
    assert event.get("source") in (None, "0.weight", "2.weight", "4.weight")
    assert not event.get("rows")
    assert result["cause"]["evidence"] == ["`weight_decay` went from 0 to -8 at step 60"]


@pytest.mark.parametrize(("wrong_at", "quantity"), [(60, "update"), (50, "loss")])
def test_a_learning_rate_that_is_wrong_in_one_step_is_dated_by_its_update(
    wrong_at: int, quantity: str, tmp_path: Path
) -> None:
    """The steps after it are as small as those before; one long before the loss leaves its course is not the cause."""
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with reprokit.capture(tmp_path / "run.pt", on=("early",), quiet=True) as session:
        for step in range(100):
            optimizer.param_groups[0]["lr"] = (1.0 if wrong_at == 60 else 0.02) if step == wrong_at else 1e-3
            x = torch.randn(16, 16)
            y = x.sum(1, keepdim=True) * (1e4 if step >= 60 and wrong_at != 60 else 1.0)
            loss = F.mse_loss(model(x), y)
            update(optimizer, loss)
    (result,) = session.results
    failure = result["failure"]
    assert (failure["step"], failure["event"]["quantity"]) == (60, quantity)
    if quantity == "update":
        assert failure["call"] == "torch.optim.Adam.step"
        found = diagnose(reprokit.load(tmp_path / "run.pt"))
        assert found.id == "learning-rate-jump" and "In step 60 the learning rate rose" in found.mechanism


def test_a_nan_soon_after_is_traced_to_the_spike(tmp_path: Path) -> None:
    session, _ = _loop(tmp_path, functools.partial(_bad_labels, factor=1e15))
    (result,) = session.results
    assert (result["failure"]["kind"], result["failure"]["step"]) == ("spike", 60)


def _bad_labels(
    step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1e4
) -> torch.Tensor:
    x = torch.randn(16, 16)
    return F.mse_loss(model(x), x.sum(1, keepdim=True) * (factor if step == 60 else 1.0))


@pytest.mark.usefixtures("few_runs")
@pytest.mark.parametrize(("loss_of", "argument"), [(_bad_labels, "target of mse_loss"), (_bad_rows, None)])
def test_labels_that_are_off_are_named_with_their_numbers(
    loss_of: Callable[..., torch.Tensor], argument: str | None, tmp_path: Path
) -> None:
    session, (event,) = _loop(tmp_path, loss_of)
    (result,) = session.results
    found = result["failure"]["event"]
    assert found.get("argument") == argument
    shown = _run(tmp_path, "show", "run.pt").stderr
    if argument is None:
        assert "target" not in event.evidence and "target" not in " ".join(shown.split())
        return
    assert found["largest"] > 1e4 and found["largest_usual"] < 20
    words = f"the target of `mse_loss` is up to {number_words(found['largest'])} in magnitude, in step 59 up to "
    assert words in event.evidence and words in " ".join(shown.split())
    snapshot = reprokit.load(tmp_path / "run.pt")
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60, whatif=False), snapshot, tmp_path / "out")
    title, *issue = rendered.issue.read_text().splitlines()
    assert words in issue[1] and "target" not in title
    assert words in diagnose(snapshot).evidence[0]


def _with_written_momentum() -> list[torch.Tensor]:
    """A training that writes into its momentum in step 60; the parameters and the momentum that it ends with."""
    torch.manual_seed(0)
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for step in range(70):
        if step == 60:
            optimizer.state[model[0].weight]["momentum_buffer"].mul_(1e4)
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.abs().sum(1, keepdim=True))
        update(optimizer, loss)
    return [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]


def test_a_write_into_the_state_of_an_optimizer_is_played(tmp_path: Path) -> None:
    """The copy is from before the optimizer had any state, so the replay makes a state of its own."""
    bare = _with_written_momentum()
    with reprokit.capture(tmp_path / "run.pt", on=("early",), history=1000, after="continue", quiet=True) as session:
        watched = _with_written_momentum()
    (result,) = session.results
    failure = result["failure"]
    assert (failure["step"], failure["event"]["quantity"], result["fidelity"]) == (60, "update", "exact")
    assert bare[0].isfinite().all() and all(map(torch.equal, bare, watched))


def _end(model: torch.nn.Module) -> None:
    pass


def _raise(model: torch.nn.Module) -> None:
    model(torch.randn(16, 3))


def _spoil(model: torch.nn.Module) -> None:
    model(torch.randn(16, 16)).mul(math.nan).sum().backward()


def _convert(model: torch.nn.Module) -> None:
    model.double()


@pytest.mark.parametrize("last", [_end, _raise, _spoil, _convert])
def test_what_happens_between_two_looks_does_not_hide_an_event(
    last: Callable[[torch.nn.Module], None], tmp_path: Path
) -> None:
    """The numbers of steps 64 to 67 wait to be looked at together."""
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    events: list[reprokit.TrainingEvent] = []
    settings: Any = {"on": ("nonfinite", "exception", "early"), "history": 1000, "after": "continue", "quiet": True}
    with (
        contextlib.suppress(RuntimeError),
        reprokit.capture(tmp_path / "run.pt", on_event=events.append, **settings) as session,
    ):
        for step in range(68):
            x = torch.randn(16, 16)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True) * (1e4 if step >= 64 else 1.0))
            update(optimizer, loss)
        assert not events
        last(model)
    (event,), (result,) = events, session.results
    assert (event.kind, event.severity, event.began_at, event.step) == ("spike", "error", 64, 64)
    assert (result["failure"]["kind"], result["failure"]["step"], result["fidelity"]) == ("spike", 64, "exact")


@pytest.mark.parametrize("on", ["early", "dead"])
def test_events_alone_save_a_nan_as_a_nan(tmp_path: Path, on: str) -> None:
    def loss_of(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.randn(16, 16)
        predicted = model(x) - 100 if step == 60 else model(x)
        return F.mse_loss(predicted.log() if step == 60 else predicted, x.sum(1, keepdim=True))

    session, events = _loop(tmp_path, loss_of, on=(on,))
    (result,) = session.results
    failure = result["failure"]
    assert (failure["kind"], failure["step"], failure["call"]) == ("nan", 60, "torch.Tensor.log")
    assert not events


@pytest.mark.parametrize("also", [False, True])
def test_a_loss_of_which_the_loop_asks_for_gradients_is_followed(also: bool, tmp_path: Path) -> None:
    """Updates by hand; with a second call of `torch.autograd.grad` it is not known which one starts from the loss."""
    torch.manual_seed(0)
    model = mlp(16, 32, 1)
    parameters = list(model.parameters())
    ending = pytest.raises(RuntimeError, match="shapes") if also else contextlib.nullcontext()
    with ending, reprokit.capture(tmp_path / "run.pt", on=("early", "exception"), quiet=True) as session:
        for step in range(80):
            x = torch.randn(16, 16)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True) * (1e4 if step == 60 and not also else 1.0))
            gradients = torch.autograd.grad(loss, parameters)
            if also:
                torch.autograd.grad(model(x).sum() * 10.0 ** (step % 30), parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(0.01 * gradient)
        model(x[:, 1:])  # raises, and shows what was noted
    (result,) = session.results
    losses = [row.loss for row in reprokit.load(tmp_path / "run.pt").timeline]
    if also:
        assert result["failure"]["kind"] == "exception" and set(losses) == {None}
        return
    failure = result["failure"]
    assert (failure["kind"], failure["step"], failure["event"]["quantity"]) == ("spike", 60, "loss")
    assert failure["event"]["argument"] == "target of mse_loss"
    assert losses[-1] == failure["event"]["value"] and None not in losses


def test_an_error_of_on_event_never_reaches_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(event: reprokit.TrainingEvent) -> None:
        raise ValueError("mine")

    torch.manual_seed(0)
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with reprokit.capture(tmp_path / "run.pt", on=("early",), on_event=fail, after="continue"):
        for step in range(100):
            update(optimizer, model(torch.randn(4, 16)).abs().mean() * (1e9 if step > 60 else 1.0))
    assert step == 99
    assert "`on_event` raised (ValueError: mine)" in capsys.readouterr().err


def test_a_code_for_missing_values_is_told_by_all_its_digits() -> None:
    event = {"argument": "target of mse_loss", "source": "y", "reference_step": 29, "largest_usual": 5.8215}
    words = data_words({**event, "largest": 999999.0})
    assert words == "the target of `mse_loss` is up to 999999 in magnitude, in step 29 up to 5.82"
    assert "up to 3e+12 in" in data_words({**event, "largest": 3e12}) and "up to inf" in data_words(
        {**event, "largest": math.inf}
    )
