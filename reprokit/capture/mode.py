"""The recorder's place on torch's stack of function modes: on top while the loop runs, away while what it calls runs.

Torch asks every mode on the stack for every function, so whatever runs with the mode away costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from reprokit import torch_private
from reprokit.capture.posing import POSING
from reprokit.own_work import PASSED_OVER


class CaptureStop(SystemExit):
    """Ends the user's script after a capture.

    As a `SystemExit` it passes ``except Exception``, runs ``finally`` blocks and prints no traceback.
    """

    def __init__(self, session: object) -> None:
        super().__init__(3)
        self.session = session

    def __reduce__(self) -> tuple[type[SystemExit], tuple[int]]:
        """An executor that runs tasks in other processes sends it to the process that waits for the result."""
        return SystemExit, (3,)


class StackedMode(TorchFunctionMode):
    """A function mode that is asked for what the loop itself calls, on one thread.

    ``enabled`` is set by the session; ``switch_off(error)`` is called with an internal error. Invariant: while
    ``depth`` is above 0 the loop is inside something that is noted as a whole. ``thread`` is the watched one; it
    ``is_claimed`` once it has differentiated. ``has_other_thread``: another thread has called backward;
    ``on_other_thread`` is called the first time. While an optimizer ``is_stepping`` an exception may end that, which
    `end_step_left` has to find out.
    """

    def __init__(self, switch_off: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.switch_off = switch_off
        self.enabled = False
        self.is_installed = True  # else the mode may be on torch's stack all the same, and does not return to it
        self.depth = 0
        self.thread = get_ident()
        self.is_claimed = False
        self.has_other_thread = False
        self.on_other_thread: Callable[[], None] = lambda: None
        self.is_stepping = False
        self.end_step_left: Callable[[], None] = lambda: None
        self._is_on = True
        self._is_turned = False
        # While a compiled function runs inside of a noted call no hook is in place: this context holds them away, and
        # ends when ``depth`` falls below that of the call.
        self._bare: contextlib.AbstractContextManager[None] | None = None
        self._bare_depth = 0

    @property
    def is_outermost(self) -> bool:
        """True if the loop itself is running, on the thread that is watched."""
        if self.is_stepping and self.depth == 1 and self.enabled:
            self.end_step_left()
        is_loop = self.depth == 0 and self.enabled and get_ident() == self.thread
        return is_loop and not (_num_dispatch_modes() and is_tracing())

    def turn(self, *, is_on: bool) -> None:
        """Be on torch's stack while the loop runs, or not at all; from the next time on that the loop runs."""
        if is_on is not self._is_on:
            self._is_on = is_on
            self._is_turned = True
            if not self.depth:
                self._settle()

    def _settle(self) -> None:
        """Go to where `turn` has said. On the stack that is its lowest place: modes of the loop leave from the top."""
        self._is_turned = False
        self.leave_stack()
        if not (self._is_on and self.is_installed):
            return
        modes = [_mode_at(level) for level in range(_num_modes())]
        arrived: BaseException | None = None
        for _ in range(_MOST_ARRIVALS):
            try:
                _cut_stack(0)
                for mode in (self, *modes):
                    _push_mode(mode)
                break
            except BaseException as error:  # of a signal handler: the loop's modes come first
                arrived = error
        if arrived is not None:
            raise arrived

    def leave_stack(self) -> None:
        """Take the mode off torch's stack, wherever on it the loop's own modes have left it."""
        modes = [_mode_at(level) for level in range(_num_modes())]
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

    def miss_backward(self) -> None:
        """A backward call of another thread is not noted; remember it."""
        is_other = self.enabled and torch_private.graph_task_id() == -1
        if is_other and not self.has_other_thread:
            self.has_other_thread = True
            self.on_other_thread()

    def step_aside(self) -> bool:
        """Be asked nothing until `step_back`; whether the mode was taken off torch's stack for that."""
        num_modes = _num_modes()
        self.depth += 1
        if not num_modes:
            return False
        if _mode_at(num_modes - 1) is not self:  # a mode of the user's is on top, such as `with torch.device(...)`
            return self._leave_from_below(num_modes - 1)
        try:
            _pop_mode()
        except BaseException:  # of a signal handler: nobody calls `step_back` then
            self.depth -= 1
            _push_mode(self)
            raise
        return True

    def _leave_from_below(self, num_others: int) -> bool:
        """Leave the stack although modes of the user's are above: a compiler would follow calls into this one
        (`test_unseen_by_compilers.py`)."""
        if all(_mode_at(level) is not self for level in range(num_others)):
            return False
        try:
            self.leave_stack()
        except BaseException:  # of a signal handler, as in `step_aside`
            self.depth -= 1
            self._settle()
            raise
        return True

    def step_back(self, popped: bool) -> None:
        """The inverse of `step_aside`."""
        self.depth -= 1
        if self._bare is not None and self.depth < self._bare_depth:
            self._end_bare()
        if self._is_turned:
            if not self.depth:
                self._settle()
        elif popped and self.is_installed:
            if _num_modes():
                self._settle()
            else:
                _push_mode(self)

    def make_way(self, bare: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """A compiled function is about to run inside of a noted call: the context ``bare()`` holds until that is over.

        A compiler follows the calls of modules, and some of their classes may be watched as roots of other calls.
        """
        is_inside = self.depth and self.enabled and get_ident() == self.thread
        if is_inside and self._bare is None:
            context = bare()
            context.__enter__()
            self._bare, self._bare_depth = context, self.depth

    def _end_bare(self) -> None:
        bare, self._bare = self._bare, None
        try:
            if bare is not None:
                bare.__exit__(None, None, None)
        except Exception as error:
            self.switch_off(error)

    def leave_when_over(self) -> None:
        """Leave torch's stack now and for good, also if what is running has been called by this mode.

        Torch takes a mode off the stack while it asks it, and puts it back when the call is over. So in that case a
        profile function, or a trace function beside a profiler of the user's, waits until the asking frame has
        returned: at the next event it takes the mode off the stack, and itself away.
        """
        self.leave_stack()
        asking = self._asking_frame(sys._getframe(1))
        hooks: Any = ((sys.getprofile, sys.setprofile), (sys.gettrace, sys.settrace))
        put = next((put for read, put in hooks if read() is None), None)
        if asking is None or put is None:
            return
        is_over = False

        def look(frame: FrameType, event: str, argument: object) -> None:
            nonlocal is_over
            if is_over:
                if not self.is_installed:
                    self.leave_stack()
                put(None)
            elif event == "return" and frame is asking:
                is_over = True

        if put is sys.settrace:
            asking.f_trace = look  # a trace function hears of a frame that runs already only from there
        put(look)

    def _asking_frame(self, frame: FrameType | None) -> FrameType | None:
        """The outermost frame in which torch calls this mode for a function, or is about to push it again."""
        found = None
        while frame is not None:
            is_own = frame.f_code.co_name == "__torch_function__" and frame.f_locals.get("self") is self
            if is_own or frame.f_code is torch_private.handle_code:
                found = frame
            frame = frame.f_back
        return found

    def recover(self, frame: FrameType | None) -> bool:
        """Step back if nothing that `step_aside` was called for is running; true if an exception had prevented that.

        ``frame`` is the innermost one of what is running: an exception may arrive where `step_back` begins.
        """
        while frame is not None:
            is_caller = frame.f_code.co_filename.removesuffix(PASSED_OVER) in _CALLERS
            if is_caller or frame.f_code is POSING:
                return False
            frame = frame.f_back
        self.depth = 0
        self._settle()
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In this context nothing is noted and, where possible, the mode is not on torch's stack at all."""
        popped = self.step_aside()
        try:
            yield
        finally:
            self.step_back(popped)

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do reprokit's own work unseen, while the session watches; an error in it must never reach the loop."""
        if not self.enabled:
            return None
        try:
            popped = self.step_aside()
            try:
                with unseen():
                    return work(*args)
            finally:
                self.step_back(popped)
        except BaseException as error:
            self.switch_off(error)
            return None


def unseen() -> contextlib.AbstractContextManager[object]:
    """A context for work of our own: modes and tensor subclasses of the user's are not asked about it.

    One of them may count calls, or know only the functions that its script calls (`test_unseen.py`).
    """
    if _num_dispatch_modes():
        return _unseen_by_dispatch()
    functions: contextlib.AbstractContextManager[object] = _disable_functions()
    return functions


class _Stack(threading.local):
    """One of torch's two stacks of modes. ``away`` are modes of the script that work of our own has taken off it."""

    def __init__(
        self,
        count: Callable[[], int],
        pop: Callable[[], Any],
        push: Callable[[Any], object],
        away: tuple[Any, ...] = (),
    ) -> None:
        self._count, self._pop, self._push = count, pop, push
        self.away = away

    def _take(self) -> tuple[Any, ...]:
        return tuple(reversed([self._pop() for _ in range(self._count())]))

    def _put(self, modes: Iterable[Any]) -> None:
        for mode in modes:
            self._push(mode)

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """In this context no mode is on the stack but those that are entered in it."""
        before, modes = self.away, self._take()
        self.away = (*before, *modes)
        try:
            yield
        finally:
            self.away = before
            self._put((*modes, *self._take()))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In this context the modes that are away are back, below those that are on the stack."""
        away, ours = self.away, self._take()
        self.away = ()
        self._put((*away, *ours))
        try:
            yield
        finally:
            known = set(map(id, away))
            self.away = away
            self._put([mode for mode in self._take() if id(mode) not in known])


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """Inside of `unseen` or `played_unseen`, a context for code of the user's: a call that is played again, a function
    for events."""
    with _enable_functions(), _FUNCTIONS.whole(), _OPERATORS.whole():
        yield


@contextlib.contextmanager
def played_unseen() -> Iterator[None]:
    """`unseen` for a replay: torch calls the modes that are entered in this context, such as a `Tracer`."""
    with _enable_functions(), torch_private.disable_subclasses(), _FUNCTIONS.cleared(), _OPERATORS.cleared():
        yield


@contextlib.contextmanager
def _unseen_by_dispatch() -> Iterator[None]:
    with _disable_functions(), _OPERATORS.cleared():
        yield


def _cut_stack(length: int) -> None:
    while _num_modes() > length:
        _pop_mode()


_HERE = os.path.dirname(__file__)
_CALLERS = frozenset(  # the files that call `step_aside`
    os.path.join(_HERE, f"{name}.py") for name in ("hooks", "loop", "mode", "recorder", "roots", "transformed")
)
_MOST_ARRIVALS = 100
_mode_at = torch_private.mode_at
_num_dispatch_modes = torch_private.num_dispatch_modes
_num_modes = torch_private.num_modes
is_tracing = torch_private.is_tracing
_pop_mode = torch_private.pop_mode
_push_mode = torch_private.push_mode
_disable_functions = without_functions = torch_private.disable_functions  # `unseen` where there is no dispatch mode
_enable_functions = torch_private.enable_functions
_FUNCTIONS = _Stack(_num_modes, _pop_mode, _push_mode)
_OPERATORS = _Stack(_num_dispatch_modes, torch_private.pop_dispatch_mode, torch_private.push_dispatch_mode)
