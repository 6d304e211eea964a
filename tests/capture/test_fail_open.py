"""Whatever breaks inside capture, the training ends with the bits it would have had, and one line is said.

Faults are put into every function of capture in turn, found by looking; then the disk, odd arguments, and signals.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import importlib
import inspect
import pkgutil
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture import early_warning, tape
from reprokit.capture.options import DEFAULT_ON
from reprokit.capture.recorder import Recorder
from reprokit.capture.session import Session
from reprokit.snapshot.format import load
from tests.capture.test_compiled import miscompiled
from tests.capture.traps_checks import (
    BAD_STEP,
    Gated,
    Loop,
    batches,
    check_caught,
    classify,
    complaints,
    described_once,
    divided_loss,
    ending,
    net,
    plain_training,
    rooted_loss,
    run_both,
    run_plain,
    same_bits,
    scaled_update,
    training,
    update,
    without_own_lines,
)
from tests.conftest import Run, import_benchmark

GUARDS = import_benchmark("faults").GUARDS | {
    "give_gradients",  # which gives back, as `State.give_back` does
    *("CompiledCalls.watched", "CompiledCalls._perform"),
}
# The guards, their callers, and what runs before or without a loop.
WITHOUT_FAULTS = {
    *("session", "launch", "block", "options"),
    *("hooks", "mode", "structure"),
}
NOT_IN_THESE_RUNS = {
    *("lockstep", "meeting", "ranks"),  # `test_faults_of_ranks.py`
    "compiled_calls",  # `test_a_fault_where_compiled_code_fails`
    *("failure_text", "exceptions", "operands", "recomputed"),  # what is printed of an exception
    *("retry", "data_code", "step_inputs"),  # the script runs for its answer alone
    "posing",  # runs once, at import
}
HOME = "reprokit.capture."
MODULES = (part for part in pkgutil.walk_packages(sys.modules["reprokit.capture"].__path__, HOME) if not part.ispkg)
PARTS = [name for part in MODULES if (name := part.name.removeprefix(HOME)) not in WITHOUT_FAULTS]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape is swept in loops as small as these, too; batches of numbers end by their length, never by time."""
    monkeypatch.setattr(tape, "SWEEP_OPS", 16)
    monkeypatch.setattr(early_warning, "_DELAY", 1e9)


def failing_late() -> list[torch.Tensor]:
    """The gate is ruined at step 4 and read at step 7."""
    model = Gated()
    optimizer = torch.optim.SGD([{"params": model.body.parameters()}, {"params": [model.gate]}], lr=0.01, momentum=0.9)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step, x, y in batches(9):
        optimizer.param_groups[1]["lr"] = float("inf") if step == 4 else 0.01
        noisy = x + 0.1 * torch.randn_like(x) * random.random()
        optimizer.zero_grad()
        F.cross_entropy(model(noisy, step == 7), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average, model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            model.body[0].weight.clamp_(-0.5, 0.5)
    return ending(model, optimizer, average)


def failing_at_once() -> list[torch.Tensor]:
    model, optimizer = training()
    for step, x, y in batches():
        update(optimizer, rooted_loss(model(x), y, step == BAD_STEP))
    return ending(model, optimizer)


def scaled_and_failing() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step, x, y in batches(12):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = divided_loss(model(x), y, step == 10)
        scaled_update(scaler, optimizer, loss)
    return ending(model, scaler)


def closed_and_failing() -> list[torch.Tensor]:
    """The optimizer calls the loss itself, some gradients are asked for, and the loop writes into data and teacher."""
    model, teacher = net(), net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches():
        x[:, 0] = x[:, 0].mul(0.5).clamp_(-1.0, 1.0)
        (slope,) = torch.autograd.grad(teacher(x).sum(), [teacher[0].weight])
        weight = torch.full((), 0.0 if step == BAD_STEP else 1.0)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, weight: torch.Tensor = weight) -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            loss = classify(model, x, y) * (weight / weight)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            teacher[0].weight.sub_(slope, alpha=1e-3)
            for old, new in zip(teacher.buffers(), model.buffers(), strict=True):
                old.copy_(new)
    return ending(model, teacher)


def stopped_by_an_error() -> list[torch.Tensor]:
    """The loop handles exceptions of its calls, of a model in training, and of a backward call."""
    model, optimizer = training()
    for step, x, y in batches():
        for call in (lambda x=x: x @ x, lambda x=x: model(x[:, :2]), lambda x=x: x.sum().backward()):
            with contextlib.suppress(RuntimeError):
                call()
        update(optimizer, divided_loss(model(x), y, step == BAD_STEP))
    return ending(model, optimizer)


def transformed_and_failing() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches():
        weight = torch.full((4,), 0.0 if step == BAD_STEP else 1.0)
        shares = torch.vmap(lambda row, weight=weight: (row * weight).sum() / weight.sum())(x)
        update(optimizer, classify(model, x, y) * shares.mean())
    return ending(model)


def leaving_its_course() -> list[torch.Tensor]:
    """Labels of step 40 are wrong by a factor of 10,000; then the loss grows, and a hook repairs what is left."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in batches(48):
        target = model(x).detach() + 0.1 + (1e4 if step == 40 else 0.0)
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), target) + 0.1 * F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss * 1e4 if step > 40 else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return ending(model, optimizer)


def learning_nothing() -> list[torch.Tensor]:
    """The first layer is dead and the scale of a grad scaler never falls; where nobody sees it the loss ends as nan."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, x, y in batches(48):
        scaled_update(scaler, optimizer, classify(model, x, y) * (torch.nan if step == 46 else 1.0))
    return ending(model, scaler)


def miscompiled_and_failing() -> list[torch.Tensor]:
    """The loss is nan in the compiled code alone."""
    return miscompiled("loss")


ON: dict[Loop, tuple[str, ...]] = {leaving_its_course: ("early",), learning_nothing: ("early",)}
RUNS: dict[Loop, int | None] = {  # and how often the state is copied; the quickest first
    failing_at_once: None,
    transformed_and_failing: None,
    closed_and_failing: None,
    stopped_by_an_error: None,
    scaled_and_failing: None,
    failing_late: 3,
    learning_nothing: 3,
    leaving_its_course: None,
}
NTH = 3  # call of a function that raises, and those after it


# -- faults in every function ---------------------------------------------------------------------------------------


class Fault:
    """Lets a function raise from its ``nth`` call on, while armed."""

    def __init__(self, original: Callable[..., Any], nth: int) -> None:
        self.is_armed = False
        self.num_calls = 0
        self._original = original
        self._nth = nth

    def function(self) -> Callable[..., Any]:
        """What to put in the place of the original."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed:
                self.num_calls += 1
                if self.num_calls >= self._nth:
                    raise RuntimeError("injected")
            return self._original(*args, **kwargs)

        return faulty


def functions_of(module: ModuleType) -> Iterator[tuple[str, Any, str, Callable[..., Any]]]:
    """Name, owner, attribute and function of everything a module defines."""
    for name, value in vars(module).items():
        is_own = inspect.isfunction(value) and value.__module__ == module.__name__ and name not in GUARDS
        if is_own and not inspect.isgeneratorfunction(value):
            yield name, module, name, value
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for attribute, function in vars(value).items():
                label = f"{name}.{attribute}"
                if inspect.isfunction(function) and label not in GUARDS and "__create_fn__" not in str(function):
                    yield label, value, attribute, function


@contextlib.contextmanager
def fault_in(owner: Any, attribute: str, function: Callable[..., Any], nth: int) -> Iterator[Fault]:
    """Put a fault into a function wherever capture has imported it to."""
    fault = Fault(function, nth)
    faulty = fault.function()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, faulty)
        if isinstance(owner, ModuleType):
            for name, module in list(sys.modules.items()):
                if name.startswith("reprokit.") and vars(module).get(attribute) is function:
                    patch.setattr(module, attribute, faulty)
        yield fault


def session_of(loop: Loop, folder: Path) -> Session:
    """The session that watches a loop."""
    on = ON.get(loop, DEFAULT_ON)
    return Session(directory=folder, after="continue", history=RUNS.get(loop), on=on, record="2", on_numbers=str)


def broken_promises(loop: Loop, fault: Fault, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a fault did that it may not do. ``loop`` fails, so that either a snapshot or a line has to come of it."""
    random.seed(0)
    capsys.readouterr()
    session = session_of(loop, folder)
    watched, broken = None, []
    try:
        with session:
            fault.is_armed = True
            watched = loop()
    except BaseException as error:
        broken.append(f"the training ended with {error!r}")
    fault.is_armed = False
    said = complaints(capsys.readouterr().err)
    promises = {
        "a bit was changed": watched is None or same_bits(ending_of(loop), watched),
        f"it said {said}": len(said) <= 1 and all(line.startswith("reprokit: ") for line in said),
        "nothing was saved and nothing was said": bool(said) or bool(session.snapshots) or watched is None,
        "half a file was left": sorted(folder.glob("*.pt*")) == sorted(session.snapshots),
        "something was left in torch": torch._C._len_torch_function_stack() == 0 and Session.active is None,
    }
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    Session.active = None
    return broken + [promise for promise, is_kept in promises.items() if not is_kept]


ending_of = functools.cache(run_plain)


@functools.cache
def calls_in(loop: Loop) -> collections.Counter[CodeType]:
    """How often every function is called while a loop is captured."""
    calls: collections.Counter[CodeType] = collections.Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    random.seed(0)
    with tempfile.TemporaryDirectory() as folder, described_once():
        session = session_of(loop, Path(folder))
        with session:
            sys.setprofile(note)
            try:
                loop()
            finally:
                sys.setprofile(None)
        assert len(session.snapshots) == 1
    return calls


def check_faults(
    part: str, runs: Callable[[CodeType], tuple[int, Loop]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> int:
    """Put a fault into each function of a module, in the run and at the call that ``runs`` names; how many were met."""
    broken: dict[str, list[str]] = {}
    num_met = 0
    found = [(item, *runs(item[3].__code__)) for item in functions_of(importlib.import_module(HOME + part))]
    called = [entry for entry in found if entry[1]]
    for number, ((label, owner, attribute, function), nth, loop) in enumerate(called):
        if number % 6 and num_met:  # a run each; `benchmarks/faults.py` draws of all
            continue
        (own := folder / label).mkdir()
        with described_once(), fault_in(owner, attribute, function, nth) as fault:
            promises = broken_promises(loop, fault, own, capsys)
        num_met += fault.num_calls > 0
        if promises:
            broken[f"{label} in {loop.__name__}"] = promises
    assert broken == {}
    return num_met


def most_calls(code: CodeType) -> tuple[int, Loop]:
    """The run in which a function is called most often, up to what is needed."""
    return max(((min(NTH, calls_in(loop)[code]), loop) for loop in RUNS), key=lambda pair: pair[0])


@pytest.mark.parametrize("part", PARTS)
def test_a_fault_in_any_function(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_faults(part, most_calls, tmp_path, capsys) or part in NOT_IN_THESE_RUNS


@pytest.mark.filterwarnings("ignore")  # dynamo looks at `grad` of tensors that are no leaves
def test_a_fault_where_compiled_code_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call of each function raises."""
    assert check_faults("compiled_calls", lambda code: (1, miscompiled_and_failing), tmp_path, capsys)


# -- the disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["reprokit.native.save", "os.fsync", "os.replace", "tempfile.mkstemp"])
def test_a_full_disk(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    plain = run_plain(failing_at_once)
    random.seed(0)
    monkeypatch.setattr(place, full)
    with described_once(), Session(directory=tmp_path, after="stop") as session:
        watched = failing_at_once()
    assert session.snapshots == [] and list(tmp_path.iterdir()) == []
    assert same_bits(plain, watched)
    lines = complaints(capsys.readouterr().err)
    assert len(lines) == 1 and "No space left on device" in lines[0]


# -- odd arguments --------------------------------------------------------------------------------------------------


class Unwilling:
    """Can be neither copied nor pickled, compared, hashed, counted or shown."""

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *args: Any) -> Any:
        raise TypeError("leave me alone")

    __reduce_ex__ = __deepcopy__ = __copy__ = __eq__ = __len__ = __iter__ = __bool__ = __repr__ = _refuse


class Odd(nn.Module):
    """Takes anything beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor, extra: Any, *, option: Any = None) -> tuple[torch.Tensor, Any]:
        return self.body(x), extra


ODD: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda x: x,
    "generator": lambda: (number for number in range(3)),
    "lock": threading.Lock,
    "file": lambda: sys.__stdout__,
    "unwilling": Unwilling,
    "loop_in_itself": lambda: _inside_itself(),
}


def _inside_itself() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def odd_loop(make: Callable[[], Any], *, bad: bool) -> Loop:
    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Odd()
        optimizer = torch.optim.Adam(model.parameters())
        for step, x, y in batches():
            logits, _ = model(x, make(), option=[make()])
            update(optimizer, rooted_loss(logits, y, bad and step == BAD_STEP))
        return ending(model)

    return loop


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_of_a_failing_step(name: str, tmp_path: Path) -> None:
    snapshot = check_caught(odd_loop(ODD[name], bad=True), tmp_path)
    assert (snapshot.step, snapshot.failure.call) == (BAD_STEP, "torch.Tensor.sqrt")


def test_a_stream_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str = "") -> int:
            raise ValueError("I/O operation on closed file")

        flush = close = write

    plain = run_plain(failing_at_once)
    random.seed(0)
    monkeypatch.setattr(sys, "stderr", Closed())
    with described_once(), Session(directory=tmp_path / "gone"):
        watched = failing_at_once()
    assert same_bits(plain, watched)


# -- signals --------------------------------------------------------------------------------------------------------

TRAINING = """
import os, signal, sys
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(number, bad=False):
    x = torch.randn(8, 4)
    count = torch.full((), 0.0 if bad else 1.0)
    loss = F.cross_entropy(model(x), (x.sum(1) > 0).long()) * (count / count)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, flush=True)
"""

DURING_TRAINING = """
for number in range(6):
    step(number)
    if number == 3:
        os.kill(os.getpid(), signal.{signal})
"""

WITH_HANDLER = """
def leave(number, frame):
    print("checkpoint written", float(sum(p.detach().sum() for p in model.parameters())))
    sys.exit(17)

signal.signal(signal.SIGTERM, leave)
for number in range(6):
    step(number)
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
"""

DURING_SAVING = """
synchronize = os.fsync

def interrupted(descriptor):
    os.fsync = synchronize
    os.kill(os.getpid(), signal.{signal})
    return synchronize(descriptor)

os.fsync = interrupted
for number in range(6):
    step(number, bad=number == 3)
"""


SIGNALLED = {
    **{name: (DURING_TRAINING.format(signal=name), "") for name in ("SIGTERM", "SIGINT", "SIGKILL")},
    "handler": (WITH_HANDLER, "checkpoint written"),
}


@pytest.mark.parametrize("name", SIGNALLED)
def test_a_signal_during_training(name: str, run_python: Run, tmp_path: Path) -> None:
    script, printed = SIGNALLED[name]
    plain, watched = run_both(TRAINING + script, run_python, tmp_path)
    assert watched.returncode == plain.returncode != 0
    assert watched.stdout == plain.stdout and printed in watched.stdout
    assert without_own_lines(watched.stderr) == plain.stderr
    assert list(tmp_path.glob("*.pt")) == []


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 3), ("SIGKILL", -9), ("SIGINT", -2)])
def test_a_signal_during_saving_leaves_no_half_file(name: str, code: int, run_reprokit: Run, tmp_path: Path) -> None:
    """The first SIGTERM waits for the file, see `failures._termination_deferred`."""
    (tmp_path / "train.py").write_text(TRAINING + DURING_SAVING.format(signal=name))
    watched = run_reprokit("capture", "train.py")
    assert watched.returncode == code
    assert watched.stdout.split() == ["0", "1", "2"]
    assert [load(path).step for path in tmp_path.glob("*.pt")] == ([3] if code == 3 else [])


def test_a_handler_that_exits_while_saving_is_obeyed(run_reprokit: Run, tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(17))"
    (tmp_path / "train.py").write_text(TRAINING + handler + DURING_SAVING.format(signal="SIGTERM"))
    watched = run_reprokit("capture", "train.py")
    assert watched.returncode == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_nothing_is_left_of_a_capture_that_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer as optimizers

    def broken(*args: Any) -> Any:
        raise RuntimeError("injected")

    before = torch.nn.Module.__call__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    with Session(directory=tmp_path, quiet=True):
        monkeypatch.setattr(Recorder, "finish", broken)
        model, optimizer = plain_training()
        for _, x, y in batches():
            update(optimizer, classify(model, x, y))
        assert (torch.nn.Module.__call__, torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == before
        assert not optimizers._global_optimizer_pre_hooks
    assert torch._C._len_torch_function_stack() == 0
