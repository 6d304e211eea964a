"""The tape's place on torch's stack of function modes: on top while the loop runs, away while what it calls runs.

Torch asks every mode on the stack for every function, so whatever runs with the mode away costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StackedMode(TorchFunctionMode):
    """A function mode that is asked for what the loop itself calls, on one thread.

    ``enabled`` is set by the session; ``switch_off(error)`` is called with an internal error. Invariant: while
    ``depth`` is above 0 the loop is inside something that is noted as a whole. ``thread`` is the watched one; it
    ``is_claimed`` once it has differentiated. ``has_other_thread``: another thread has called backward;
    ``on_other_thread`` is called the first time.
    """

    def __init__(self, switch_off: Callable[[Exception], None]) -> None:
        super().__init__()
        self.switch_off = switch_off
        self.enabled = False
        self.depth = 0
        self.thread = get_ident()
        self.is_claimed = False
        self.has_other_thread = False
        self.on_other_thread: Callable[[], None] = lambda: None
        self._is_lifted = False

    @property
    def is_outermost(self) -> bool:
        """True if the loop itself is running, on the thread that is watched."""
        return self.depth == 0 and self.enabled and get_ident() == self.thread

    def enter_stack(self) -> None:
        """Go on top of torch's stack."""
        _push_mode(self)

    def leave_stack(self) -> None:
        """Take the mode off torch's stack, wherever on it the loop's own modes have left it."""
        self._is_lifted = False
        modes = [torch._C._get_function_stack_at(level) for level in range(torch._C._len_torch_function_stack())]
        lowest = next((level for level, mode in enumerate(modes) if mode is self), None)
        if lowest is None:
            return
        try:
            _cut_stack(lowest)
        finally:
            _cut_stack(lowest)  # again, in case that an exception has arrived meanwhile
            for mode in modes[lowest:]:
                if mode is not self:
                    _push_mode(mode)

    def take_thread(self) -> bool:
        """Watch the thread that runs now, unless another one has differentiated; whether it is watched from now on."""
        levels = range(torch._C._len_torch_function_stack())
        if self.is_claimed or not any(torch._C._get_function_stack_at(level) is self for level in levels):
            return False
        self.thread = get_ident()
        return True

    def miss_backward(self) -> None:
        """A backward call is not noted; remember it if that is because of its thread."""
        is_other = self.enabled and get_ident() != self.thread and torch._C._current_graph_task_id() == -1
        if is_other and not self.has_other_thread:
            self.has_other_thread = True
            self.on_other_thread()

    def run_in_thread(self, run: Callable[[], None]) -> None:
        """Run the body of a new thread, which may be the one that trains, with the mode on the stack of that thread."""
        if not self.enabled:
            run()
            return
        from reprokit.capture.session import CaptureStop

        _push_mode(self)
        try:
            run()
        except CaptureStop:  # a thread that exits prints nothing; `threading` knows only `SystemExit` itself
            pass
        finally:
            self.leave_stack()

    def step_aside(self) -> bool:
        """Be asked nothing until `step_back`; whether the mode was taken off torch's stack for that."""
        self.depth += 1
        if self._is_lifted:
            self._is_lifted = False
            return True
        try:
            top = _pop_mode()
        except RuntimeError:  # the stack is empty
            return False
        if top is self:
            return True
        _push_mode(top)
        return False

    def step_back(self, popped: bool) -> None:
        """The inverse of `step_aside`."""
        if popped:
            _push_mode(self)
        self.depth -= 1

    def lift(self) -> None:
        """Take the mode off torch's stack until `lower`, or until a `step_back` if a `step_aside` comes in between."""
        self._is_lifted = self.step_aside()
        self.depth -= 1

    def lower(self) -> None:
        """The inverse of `lift`."""
        if self._is_lifted:
            self._is_lifted = False
            _push_mode(self)

    def step_back_lifted(self, popped: bool) -> None:
        """The inverse of `step_aside`, but the mode stays off torch's stack until `lower`."""
        self._is_lifted = popped
        self.depth -= 1

    def paused(self) -> Paused:
        """A context in which nothing is noted and, where possible, the mode is not on torch's stack at all."""
        return Paused(self)

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do reprokit's own work unseen, while the session watches; an error in it must never reach the loop."""
        if not self.enabled:
            return None
        try:
            with self.paused():
                return work(*args)
        except Exception as error:
            self.switch_off(error)
            return None


class Paused:
    """See `StackedMode.paused`."""

    __slots__ = ("_mode", "_popped")

    def __init__(self, mode: StackedMode) -> None:
        self._mode = mode
        self._popped = False

    def __enter__(self) -> None:
        self._popped = self._mode.step_aside()

    def __exit__(self, *exc_info: object) -> None:
        self._mode.step_back(self._popped)


def _cut_stack(length: int) -> None:
    while torch._C._len_torch_function_stack() > length:
        _pop_mode()


_pop_mode = torch._C._pop_torch_function_stack
_push_mode = torch._C._push_on_torch_function_stack
