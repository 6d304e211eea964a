"""The budget of a capture: a share of the loop's CPU time, kept by noting fewer steps.

The share is measured from time to time, in the steps of a window. A budget that is exceeded makes the tape note every
second, fourth, ... step; at last no step is noted, and only losses are checked. The order is fixed and never goes back.
A run that is short never steps down.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from reprokit.capture.options import DEFAULT_PERCENT
from reprokit.capture.record.function_facts import FACTS, facts_of, is_known
from reprokit.words import counted

PATIENCE = 30.0  # seconds of training before the first window: a short run costs nobody much
RARELY = 64  # steps between two noted ones, above which none is noted
BETWEEN = 10.0  # seconds between two windows
WINDOW = 32  # steps: past steps are frozen 16 at a time
_MOST_SEEN = 4 * WINDOW  # steps with those that do not count, because they copied the state
_WRAPPERS = 5e-5  # seconds that the wrappers of a step take outside of the methods with clocks
_UNSEEN = 1.5  # a step takes this many times what the clocks see: caches are cold after it (benchmarks/README.md)
_DISPATCH_CALLS = 100
Part = tuple[object, str]  # an object and the name of a method of it


class Budget:
    """Says which steps are noted; ``percent`` of the loop's own CPU time, ``None`` for no limit.

    Nothing is noted before the step ``from_step``, and everything from there on. ``every``: the tape notes the steps
    whose number it divides, none if it is 0. ``parts`` are the methods whose time is that of the capture. ``say``
    prints a step down.
    """

    def __init__(self, percent: float | None = DEFAULT_PERCENT, from_step: int | None = None) -> None:
        self.every = 1
        self.from_step = from_step
        self.limit = None if percent is None or from_step is not None else percent / 100
        self._between = BETWEEN
        self.parts: Sequence[Part] = ()
        self.say: Callable[[str], None] = lambda text: None
        self._earlier: tuple[int, float] | None = None
        self._meter: Meter | None = None
        self._next: float | None = None  # when the next window begins
        self._num_copies = -1

    def notes(self, step: int) -> bool:
        """True if the step with this number is to be noted."""
        if self.from_step is not None:
            return step >= self.from_step
        return self.every > 0 and step % self.every == 0

    def why_not(self, step: int) -> str:
        """The reason why a step was not noted, and what to do."""
        if self.from_step is not None:
            return f"step {step} comes before step {self.from_step}, from which on steps are noted"
        noted = f"only every {_ordinal(self.every)} step was noted" if self.every else "no step was noted"
        return f"step {step} was not noted: {noted}, to keep the budget (`--from-step {step}` notes it in the next run)"

    def describe(self, *, is_noted: bool) -> dict[str, Any]:
        """The settings of a snapshot of a step that ``is_noted`` or not; empty if the tape notes every step."""
        found = {"noted_every": self.every} if self.every != 1 else {}
        return found if is_noted else {**found, "is_noted": False}

    def end_step(self, now: float, num_copies: int) -> None:
        """A step ended at ``now``, after ``num_copies`` copies of the state: step down if the budget is exceeded."""
        if self.limit is None or not self.every:
            return
        if self._next is None:
            self._next = now + PATIENCE
        if self._meter is None:
            if now >= self._next:
                self._num_copies = num_copies
                self._meter = Meter(self.parts)
                self._meter.open()
            return
        meter = self._meter
        meter.end_step(is_usual=num_copies == self._num_copies)  # copies have a limit of their own
        self._num_copies = num_copies
        if meter.num_steps >= WINDOW or meter.num_seen >= _MOST_SEEN:
            self.stop_measuring()
            self._next = now + self._between
            if meter.share > self.limit and meter.num_steps:
                self._step_down(meter, self.limit)

    def start_measuring(self) -> None:
        """Measure from the next step on, one window after the other."""
        self._next, self._between = 0.0, 0.0

    def stop_measuring(self) -> None:
        """Give the methods that are measured back their own form."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    def _step_down(self, meter: Meter, limit: float) -> None:
        fixed, noting = 0.0, meter.share * self.every
        if self._earlier is not None:  # two windows tell what does not depend on the steps that are noted
            every, share = self._earlier
            noting = (share - meter.share) / (1 / every - 1 / self.every)
            fixed = meter.share - noting / self.every
        self._earlier = self.every, meter.share
        every = 2 * self.every
        while every < RARELY and fixed + noting / every > limit:
            every *= 2
        self.every = every if every <= RARELY else 0  # none only after a window at `RARELY`: windows are rough
        noted = f"noting every {_ordinal(every)} step" if self.every else "noting no step, only checking losses"
        calls = f", with {counted(round(meter.calls), 'torch call')} a step outside of models" if meter.calls else ""
        self.say(
            f"{noted}: watching took {meter.share:.0%} of the CPU time{calls}; the budget is {limit:.0%}. A failure in "
            "another step is saved without its program; `--budget off` notes all"
        )


class Meter:
    """Measures the CPU time of this thread in the methods ``parts`` and in all, step by step, until `close`.

    A method that another one calls counts once. Of a method called ``__torch_function__`` the time that the torch
    function takes is left out.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.num_steps = self.num_seen = 0
        self._own = self._all = 0.0
        self._num_calls = 0
        self._step_own = self._step_start = 0.0
        self._step_calls = 0
        self._depth = 0
        self._parts = list(parts)
        self._bias, self._function_bias = 0.0, 0.0  # while these are measured
        if parts:
            self._bias, self._function_bias = clock_seconds()
            self._function_bias -= dispatch_seconds()

    def open(self) -> None:
        """Put the clocks in place."""
        for owner, name in self._parts:
            make = self._timed_function if name == "__torch_function__" else self._timed
            setattr(owner, name, make(getattr(owner, name)))
        self._step_start = time.thread_time()

    @property
    def share(self) -> float:
        """Own time as a part of the time that the loop takes without."""
        return self._own / max(self._all - self._own, 1e-9)

    @property
    def calls(self) -> float:
        """Noted torch functions in a step."""
        return self._num_calls / max(self.num_steps, 1)

    def end_step(self, *, is_usual: bool) -> None:
        """A step is over; one that is not usual does not count."""
        now = time.thread_time()
        self.num_seen += 1
        if is_usual:
            self._own += _UNSEEN * self._step_own + _WRAPPERS
            self._all += now - self._step_start
            self._num_calls += self._step_calls
            self.num_steps += 1
        self._step_own, self._step_calls, self._step_start = 0.0, 0, now

    def close(self) -> None:
        """Take the clocks away."""
        for owner, name in self._parts:
            vars(owner).pop(name, None)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            self._depth = 1
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth = 0
                self._step_own += time.thread_time() - started - self._bias

        return timed

    def _timed_function(self, method: MethodType) -> MethodType:
        def timed(mode: object, func: Callable[..., Any], *rest: Any) -> Any:
            self._step_calls += 1
            if self._depth or not is_known(func):
                return method(func, *rest)
            clocked = _Clocked(func)
            self._depth = 1
            started = time.thread_time()
            try:
                return method(clocked, *rest)
            finally:
                self._depth = 0
                self._step_own += time.thread_time() - started - clocked.seconds - self._function_bias

        return MethodType(timed, method.__self__)  # torch takes nothing else from a mode


class _Clocked:
    """A torch function that equals the function itself as a key of a dict, and measures its time."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func
        self.seconds = 0.0

    def __hash__(self) -> int:
        return hash(self._func)

    def __eq__(self, other: object) -> bool:
        return self._func == other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        try:
            return self._func(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - started


@functools.cache
def dispatch_seconds() -> float:
    """Seconds that torch takes to ask a function mode, which no clock of a method sees; measured once."""
    tensor, mode = torch.empty(0, device="cpu"), BaseTorchFunctionMode()
    bare = min(_seconds_of(tensor.numel) for _ in range(3))
    with mode:
        asked = min(_seconds_of(tensor.numel) for _ in range(3))
    return max(asked - bare, 0.0) / _DISPATCH_CALLS


@functools.cache
def clock_seconds() -> tuple[float, float]:
    """Seconds that a clock adds to the time of a method, and of a torch function; measured once."""
    probe, tensor, function = _Probe(), torch.empty(0, device="cpu"), torch.Tensor.numel
    found: list[float] = []
    facts_of(function)
    for name, words in (("method", ()), ("__torch_function__", (function, (), (tensor,)))):
        plain = getattr(probe, name)
        bare = min(_seconds_of(functools.partial(plain, *words)) for _ in range(3))
        own = math.inf
        for _ in range(3):
            meter = Meter([])
            clocked = meter._timed(plain) if not words else meter._timed_function(plain)
            _seconds_of(functools.partial(clocked, *words))
            own = min(own, meter._step_own)
        outside = _seconds_of(functools.partial(function, tensor)) if words else 0.0  # which a clock leaves out
        found.append((own - bare + outside) / _DISPATCH_CALLS)
    return found[0], found[1]


class _Probe:
    """Does as little as a method with a clock can."""

    def method(self) -> None:
        pass

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = ()) -> Any:
        FACTS.get(func)
        return func(*args)


def _seconds_of(function: Callable[[], Any]) -> float:
    started = time.thread_time()
    for _ in range(_DISPATCH_CALLS):
        function()
    return time.thread_time() - started


def _ordinal(number: int) -> str:
    return f"{number}{'nd' if number % 10 == 2 else 'th'}"
