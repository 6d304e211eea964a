"""The budget of a capture: a share of the loop's CPU time, kept by noting fewer steps.

The share is an estimate, made from time to time over a window of steps: a cost for each call that is noted, one for
each step that is noted and one for every step, by what torch takes at that time to ask a function mode. Above the
budget the tape notes every second, fourth, ... step, at last every 64th; more again when that would take less than half
the budget. Where what every step takes leaves less, noting may take a quarter of the budget all the same: fewer noted
steps would save little then. A run that is short never steps down.
"""

from __future__ import annotations

import functools
import math
import timeit
from collections.abc import Callable
from typing import Any

from torch.overrides import BaseTorchFunctionMode

from reprokit import native
from reprokit.capture.mode import seen
from reprokit.capture.options import DEFAULT_PERCENT
from reprokit.native import clock

PATIENCE = 30.0  # seconds of training before the first window: a short run costs nobody much
RARELY = 64  # steps between two noted ones at most
BETWEEN = 10.0  # seconds between two windows
WINDOW = 32  # steps: past steps are frozen 16 at a time
_CALL = 12.0  # a noted call takes 10 us where an empty mode takes 0.8 us
_NOTED = 80.0  # and what is done once in a step that is noted 0.06 ms
_STEP = 350.0  # and in any step 0.3 ms
_DISPATCH_CALLS = 100


class Budget:
    """Says which steps are noted; ``percent`` of the loop's own CPU time, ``None`` for no limit.

    Nothing is noted before the step ``from_step``, and everything from there on. ``every``: the tape notes the steps
    whose number it divides. ``say`` prints a change.
    """

    def __init__(self, percent: float | None = DEFAULT_PERCENT, from_step: int | None = None) -> None:
        self.every = 1
        self.is_sparing = from_step is not None  # some steps are not noted
        self.from_step = from_step
        self.limit = None if percent is None or from_step is not None else percent / 100
        self.say: Callable[[str], None] = lambda text: None
        self._next: float | None = None  # when the next window begins
        self._started: float | None = None  # CPU time when this one has begun
        self._num_steps = self._num_noted = self._num_calls = 0

    def notes(self, step: int) -> bool:
        """True if the step with this number is to be noted."""
        if self.from_step is not None:
            return step >= self.from_step
        return step % self.every == 0

    def why_not(self, step: int) -> str:
        """The reason why a step was not noted, and what to do."""
        if self.from_step is not None:
            return f"step {step} comes before step {self.from_step}, from which on steps are noted"
        noted = f"only every {_ordinal(self.every)} step was noted, to keep the budget"
        return f"step {step} was not noted: {noted} (`--from-step {step}` notes it in the next run)"

    def describe(self, *, is_noted: bool) -> dict[str, Any]:
        """The settings of a snapshot of a step that ``is_noted`` or not; empty if the tape notes every step."""
        found = {"noted_every": self.every} if self.every != 1 else {}
        return found if is_noted else {**found, "is_noted": False}

    def end_step(self, now: float, num_calls: int, *, is_noted: bool) -> None:
        """A step with so many calls, which were noted or not, ended at ``now``: note more or fewer if it is time to."""
        if self.limit is None:
            return
        if self._next is None:
            self._next = now + PATIENCE
        if now < self._next:
            return
        if self._started is None:
            self._started, self._num_steps, self._num_noted, self._num_calls = clock.thread_time(), 0, 0, 0
            return
        self._num_steps += 1
        self._num_noted += is_noted
        self._num_calls += num_calls if is_noted else 0
        if self._num_steps >= WINDOW and self._num_noted:
            self.keep(self._num_calls, self._num_noted, self._num_steps, clock.thread_time() - self._started)
            self._next, self._started = now + BETWEEN, None

    def interrupt(self) -> None:
        """Time has passed that does not belong to the loop."""
        self._started = None

    def keep(self, num_calls: int, num_noted: int, num_steps: int, seconds: float) -> None:
        """Choose which steps are noted, after some that took so many seconds of CPU time, with calls in those noted."""
        unit, before, limit, every = dispatch_seconds(), self.every, self.limit or math.inf, 1
        noting, rest = (num_calls * _CALL + num_noted * _NOTED) * unit, num_steps * _STEP * unit
        bare, whole = max(seconds - noting - rest, 1e-9), noting * num_steps / num_noted
        while every < RARELY:
            bound = limit if every >= before else limit / 2
            if whole / every / bare <= max(bound - rest / bare, bound / 4):
                break
            every *= 2
        if every == before:
            return
        self.every, self.is_sparing = every, every != 1
        pace = f"noting every {_ordinal(every)} step" if every > 1 else "noting every step again"
        share = f"{(noting + rest) / bare:.0%} of the CPU time"
        more = ". A failure in another step is saved without its program; `--budget off` notes all" if every > 1 else ""
        self.say(f"{pace}: watching took about {share}; the budget is {limit:.0%}{more}")


def dispatch_seconds() -> float:
    """Seconds that torch takes to ask an empty function mode."""
    with seen():
        return _dispatch_seconds()


def _dispatch_seconds() -> float:
    ask = functools.partial(native.numel, native.empty(0, device="cpu"))
    bare = min(timeit.repeat(ask, timer=clock.thread_time, repeat=3, number=_DISPATCH_CALLS))
    with BaseTorchFunctionMode():
        asked = min(timeit.repeat(ask, timer=clock.thread_time, repeat=3, number=_DISPATCH_CALLS))
    return max(asked - bare, 0.0) / _DISPATCH_CALLS


def _ordinal(number: int) -> str:
    return f"{number}{'nd' if number % 10 == 2 else 'th'}"
