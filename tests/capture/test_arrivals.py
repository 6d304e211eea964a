"""Exceptions of the user's that arrive while code of reprokit runs end the training as they would without it."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import reprokit
from reprokit.capture import attributes, loop, recorder, save, session, tape, world
from reprokit.capture.session import Session
from reprokit.snapshot import environment, format
from tests.capture.test_fail_open import failing_at_once, failing_late
from tests.capture.traps_checks import batches, described_once, divided_loss, numbers, plain_training, same_bits, update


class TimeLimit(Exception):
    """As a training script may define it."""


def limit(number: int, frame: object) -> None:
    raise TimeLimit("time is up")


def limit_by_standard_class(*_: Any) -> None:
    raise TimeoutError


def limit_with_more(words: str, number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TimeLimit(words)


class Limits:
    """A handler that is a method."""

    def end(self, number: int, frame: object) -> None:
        self.again()

    def again(self) -> None:
        raise TimeLimit("time is up")


HANDLERS: dict[str, Callable[..., None]] = {
    "function": limit,
    "standard": limit_by_standard_class,
    "partial": functools.partial(limit_with_more, "time is up"),
    "method": Limits().end,
}
PLACES: list[tuple[Any, str]] = [
    (loop.Loop, "_check_update"),
    (recorder.Recorder, "_begin_function"),
    (recorder.Recorder, "_begin_backward"),
    (recorder.Recorder, "finish"),
    (world.World, "is_due"),
    (tape.Tape, "mark"),
    (attributes.AttributeWatch, "note"),
    (save.Describing, "snapshot"),
    (environment, "redact_text"),
    (format, "write_file"),
]
HOOKED = [
    (torch.Tensor, "backward"),
    (torch.nn.Module, "__call__"),
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (threading, "excepthook"),
    (sys, "excepthook"),
]


def _hooked() -> list[Any]:
    return [getattr(owner, name) for owner, name in HOOKED]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = _hooked()
    yield
    assert all(now is then for now, then in zip(_hooked(), before, strict=True))
    assert torch._C._len_torch_function_stack() == 0 and Session.active is None


def _arriving_in(original: Callable[..., Any], arrive: Callable[[], None], nth: int = 2) -> Callable[..., Any]:
    """The function, in which an exception arrives at its ``nth`` call or its only one; a function of reprokit."""
    made: dict[str, Any] = {"__name__": "reprokit.made", "original": original, "arrive": arrive, "calls": []}
    lines = (
        "def faulty(*args, **kwargs):",
        "    calls.append(0)",
        f"    if len(calls) == {nth}:",
        "        arrive()",
        "    return original(*args, **kwargs)",
    )
    exec(compile("\n".join(lines), str(Path(session.__file__).with_name("made.py")), "exec"), made)
    faulty: Callable[..., Any] = functools.wraps(original)(made["faulty"])
    return faulty


def _nth(owner: Any) -> int:
    return 1 if owner in (save.Describing, environment, format) else 2


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [*((*place, "function") for place in PLACES), *((*PLACES[1], name) for name in HANDLERS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_exception_of_a_signal_handler(
    owner: Any, attribute: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arrive = functools.partial(signal.raise_signal, signal.SIGALRM)
    monkeypatch.setattr(owner, attribute, _arriving_in(getattr(owner, attribute), arrive, _nth(owner)))
    before = signal.signal(signal.SIGALRM, HANDLERS[name])
    try:
        with pytest.raises((TimeLimit, TimeoutError)), Session(directory=tmp_path, history=3):
            failing_late()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert list(tmp_path.iterdir()) == []


class Late(Exception):
    """Raised by another thread."""

    __module__ = "__main__"

    def __init__(self) -> None:
        super().__init__("time is up")


@pytest.mark.parametrize(
    ("owner", "attribute", "kind"),
    [
        *((*place, Late) for place in PLACES[:5]),
        *((*PLACES[1], kind) for kind in (TimeoutError, RuntimeError, KeyboardInterrupt, SystemExit)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_exception_that_another_thread_raises(
    owner: Any, attribute: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    arrive = functools.partial(raise_in, ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind))
    monkeypatch.setattr(owner, attribute, _arriving_in(getattr(owner, attribute), arrive, _nth(owner)))
    with pytest.raises(kind), Session(directory=tmp_path, history=3):
        failing_late()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), TimeoutError(110, "network"), MemoryError(), KeyError()])
def test_an_error_of_our_own_is_no_arrival(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: Any) -> None:
        raise error

    monkeypatch.setattr(loop.Loop, "_check_update", broken)
    with described_once(), Session(directory=tmp_path):
        watched = failing_at_once()
    assert same_bits(watched, failing_at_once())


def test_an_interrupt_while_hooks_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = _arriving_in(Session._unhook, lambda: signal.raise_signal(signal.SIGINT), 1)
    monkeypatch.setattr(Session, "_unhook", interrupted)
    with pytest.raises(KeyboardInterrupt), reprokit.capture(quiet=True):
        pass


def test_a_patch_on_top_stays() -> None:
    """Undoing a hook does not undo the patch that somebody else has put on it meanwhile."""
    layer = type("Layer", (torch.nn.Linear,), {})
    places = [(torch.Tensor, "backward"), (torch.optim.Optimizer, "zero_grad"), (layer, "__call__")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    seen: list[str] = []

    def patched(name: str, inner: Any) -> Any:
        return lambda *args, **kwargs: (seen.append(name), inner(*args, **kwargs))[1]

    def step() -> None:
        loss = model(torch.ones(1, 2)).mean()
        update(optimizer, loss)

    model = layer(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with reprokit.capture(quiet=True) as watched:
            for _ in range(4):
                step()
            tops = [patched(name, getattr(owner, name)) for owner, name in places]
            for (owner, name), top in zip(places, tops, strict=True):
                setattr(owner, name, top)
            step()
        assert watched.has_checked
        assert [vars(owner)[name] for owner, name in places] == tops
        del seen[:]
        step()
        assert sorted(seen) == ["__call__", "backward", "zero_grad"]
    finally:
        for owner, name, original in originals[:2]:
            setattr(owner, name, original)


# -- exceptions that the loop handles ---------------------------------------------------------------------------------


class Interrupted(torch.nn.Module):
    """A model that an exception ends behind its batch normalisation, where ``places`` says so."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 1)
        self._places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        _arrive("module", self._places)
        return self.head(x).mean()


class Halting(torch.optim.SGD):
    """An optimizer that an exception ends when it has updated some of its parameters."""

    places: ClassVar[list[str]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=-0.1)
            if parameter is parameters[1]:
                _arrive("optimizer", self.places)


def _arrive(place: str, places: list[str]) -> None:
    if place in places:
        places.remove(place)
        signal.raise_signal(signal.SIGALRM)


def _going_on(place: str, at: int, patch: pytest.MonkeyPatch) -> list[float]:
    """Train until the loss is NaN in step 4; step ``at`` handles an exception first. The values before the NaN."""
    places: list[str] = []
    patch.setattr(Halting, "places", places)
    noted = recorder.Recorder._finish_function

    def finish_function(self: recorder.Recorder, begun: Any, out: Any, facts: Any, *rest: Any) -> None:
        _arrive(facts.name.rpartition(".")[2], places)
        noted(self, begun, out, facts, *rest)

    patch.setattr(recorder.Recorder, "_finish_function", finish_function)
    model = Interrupted(places)
    for name in ("backward", "gradients"):
        model.norm.weight.register_hook(lambda gradient, name=name: _arrive(name, places))
    optimizer = Halting(model.parameters(), lr=0.1)
    seen = []
    for step in range(6):
        x, factor = torch.randn(4, 3), torch.ones(3) * 2
        if step == at:
            places.append(place)
            try:
                factor.mul_(3)
                factor[0] = 5.0
                _arrive("loop", places)
                optimizer.zero_grad()
                model(x * 5).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            except TimeLimit:
                model.eval()
        value = model(x * factor)
        model.train()
        seen.append(value.item())
        if place != "gradients":
            optimizer.zero_grad()
        (value * torch.log(torch.tensor(-1.0 if step == 4 else 1.0))).backward()
        optimizer.step()
    return seen


def _interrupt_halfway(patch: pytest.MonkeyPatch) -> None:
    """Have `zero_grad` and `clip_grad_norm_` ended by an exception when they have changed one gradient."""
    clear, clip = torch.optim.Optimizer.zero_grad, torch.nn.utils.clip_grad_norm_

    def zero_grad(self: Any, *args: Any) -> None:
        self.param_groups[0]["params"][0].grad = None
        _arrive("zero_grad", Halting.places)
        clear(self, *args)

    def clip_grad_norm_(parameters: Any, most: float) -> torch.Tensor:
        parameters = list(parameters)
        parameters[0].grad.mul_(0.5)
        _arrive("clip", Halting.places)
        return clip(parameters, most)

    patch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
    patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)


@pytest.mark.parametrize(
    ("place", "is_known"),
    [("mul_", False), ("__setitem__", False), ("module", False), ("optimizer", False), ("loop", True),
     ("zero_grad", False), ("gradients", False), ("backward", True), ("clip", False)],
)  # fmt: skip
def test_an_exception_that_the_loop_handles(
    place: str, is_known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step is exact only if what the interrupted call had written is known; the steps after it are."""
    before = signal.signal(signal.SIGALRM, limit)
    for at in (4, 2):
        folder = tmp_path / str(at)
        folder.mkdir()
        torch.manual_seed(0)
        with monkeypatch.context() as patch, described_once():
            _interrupt_halfway(patch)
            with Session(directory=folder, after="continue", history=3, quiet=True):
                values = _going_on(place, at, patch)
        (file,) = folder.iterdir()
        snapshot = format.load(file)
        assert (snapshot.step, snapshot.failure.call) == (4, "torch.log")
        assert (snapshot.fidelity == "exact") == (is_known or at == 2), snapshot.fidelity_note
        if snapshot.fidelity == "exact":
            assert values[4] in numbers(snapshot)
        else:
            assert "after an exception" in str(snapshot.fidelity_note)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("owner", "attribute"), PLACES[1:7], ids=lambda value: getattr(value, "__name__", value))
def test_a_loop_that_handles_an_exception_is_watched_again(
    owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The exception arrives in code of reprokit in one of the first steps; the loss of step 7 is NaN."""
    arrive = functools.partial(signal.raise_signal, signal.SIGALRM)
    before, num_handled = signal.signal(signal.SIGALRM, limit), 0
    model, optimizer = plain_training()
    with described_once(), Session(directory=tmp_path, after="continue", history=3, quiet=True) as watched:
        for step, x, y in list(batches(9)):
            if step == 2:
                monkeypatch.setattr(owner, attribute, _arriving_in(getattr(owner, attribute), arrive))
            try:
                update(optimizer, divided_loss(model(x), y, step == 7))
            except TimeLimit:
                num_handled += 1
            assert torch.is_grad_enabled() and (step > 6 or torch._C._len_torch_function_stack() == 1)
    signal.signal(signal.SIGALRM, before)
    assert (num_handled, len(watched.snapshots)) == (1, 1)
