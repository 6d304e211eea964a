"""Meets the modules that the loop calls itself, and only those, and notes their calls.

For the first steps ``nn.Module.__call__`` is watched, and put back while a root runs, so that nothing inside one sees
it. Every class met at the outermost level gets a ``__call__`` of its own; then the global watch goes. A root that
appears later is noted from the frame of its call on.

Whose code is running: the user's, that of a module's call, of a custom autograd function, a library's, or torch's.

What a frame runs is looked up once for each piece of code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import AttributeWatch
from reprokit.capture.record.current_step import Listener, RunningStep
from reprokit.capture.record.entry import Entry, generator_states, unwrapped, versions_of
from reprokit.capture.record.stack import StackedMode
from reprokit.program.ir import OPAQUE, Call
from reprokit.program.sites import current_site, is_standard, kind_of_file
from reprokit.program.trace import current_mode


def applying(original: Any) -> Callable[..., Any]:
    """``Function.apply`` with a frame; ``original`` is the class method, which is written in C from torch 2.14 on."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    return apply


_APPLY = getattr(torch.autograd.Function.apply, "__func__", None)
HAS_FRAME_OF_APPLY = _APPLY is not None
_FUNCTION_APPLY = (_APPLY or applying(None)).__code__


def first_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from ``frame`` outwards; ``frame`` itself if there is none."""
    walker: FrameType | None = frame
    while walker is not None:
        if (_KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)) in _USER:
            return walker
        walker = walker.f_back
    return frame


def plain_caller(frame: FrameType) -> FrameType | None:
    """The user's frame that calls a torch function; ``None`` unless it does so itself, and the loop runs around it."""
    user: FrameType | None = None
    walker: FrameType | None = frame
    while walker is not None:
        kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind == "user":
            user = user or walker
        elif kind == "top" or kind == "loop":
            return user or walker
        elif kind != "other" and (user is None or kind != "library"):
            return None
        walker = walker.f_back
    return user or frame


def learn_loop(code: CodeType | None, frame: FrameType | None) -> None:
    """``code`` is the user's and makes an optimizer's step: it and the functions of the user's around ``frame`` are the
    training loop, at which a search for a module's call ends."""
    if _KINDS.get(id(code)) != "user":
        return
    while frame is not None:
        if (_KINDS.get(id(frame.f_code)) or _kind_of_code(frame.f_code)) == "user":
            _KINDS[id(frame.f_code)] = "loop"
        frame = frame.f_back


def caller_of(frame: FrameType) -> tuple[FrameType | None, FrameType | None, bool]:
    """The user's frame that calls a torch function, and the frame of the outermost module that runs around it.

    Both are ``None`` inside a custom autograd function. The third is true if a library's code is between the user's and
    torch. The search ends at a module's own level, around which no model runs.
    """
    root: FrameType | None = None
    user: FrameType | None = None
    has_library = False
    walker: FrameType | None = frame
    while walker is not None:
        kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind == "user":
            user = user or walker
        elif kind == "top" or kind == "loop":
            return user or walker, root, has_library
        elif kind == "library":
            has_library = has_library or user is None
        elif kind == "module":
            root = walker
        elif kind == "function":
            return None, None, False
        walker = walker.f_back
    return user or frame, root, has_library


def compiled_call(frame: FrameType | None) -> Call | None:
    """The call of a compiled function that runs, as an `OPAQUE` call without results; ``None`` if none does."""
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            function = frame.f_locals.get("fn")
            name = getattr(function, "__qualname__", type(function).__name__)
            return Call(OPAQUE, (), {"name": name, "source": "", "is_compiled": True}, site=current_site(frame.f_back))
        frame = frame.f_back
    return None


def _kind_of_code(code: CodeType) -> str:
    """``user`` (``top`` outside of functions; later ``loop``, see `learn_loop`), ``module`` for a module's call,
    ``function`` for a custom autograd function's, ``library``, or ``other``."""
    if code is _FUNCTION_APPLY:
        kind = "function"
    elif code is torch_private.call_impl_code:
        kind = "module"
    else:
        kind = kind_of_file(code.co_filename)
        if kind == "user":
            kind = "top" if code.co_name == "<module>" else "user"
        elif kind != "library" or is_standard(code.co_filename):
            kind = "other"
    _KINDS[id(code)] = kind
    _CODES.append(code)  # so that the id stays its own
    return kind


_USER = ("user", "loop", "top")
_KINDS: dict[int, str] = {}
_CODES: list[CodeType] = []


class RootCalls:
    """Notes calls of root modules in the running step, with the mode out of the way.

    The listener meets every module but those whose ids are in ``met``.
    """

    def __init__(self, mode: StackedMode, running: RunningStep) -> None:
        self.met: set[int] = set()
        self.attributes = AttributeWatch()
        self._mode = mode
        self._running = running
        self._listener: Listener
        self._patched: dict[type[torch.nn.Module], tuple[Any, Any]] = {}  # each class's own `__call__`, and ours
        self._original: Any = None
        self._watcher: Any = None
        self._known: list[type[torch.nn.Module]] = []
        self._has_settled = False

    # -- which modules are watched -------------------------------------------------------------------------------

    def install(self, listener: Listener) -> None:
        """Watch every module until `settle`, so that the first call of each root is seen from its beginning."""
        self._listener = listener
        if self._has_settled:
            for cls in self._known:
                self._meet(cls, torch.nn.Module.__call__)
            return
        roots, mode, original = self, self._mode, torch.nn.Module.__call__
        self._original = original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not roots.is_root_call():
                return original(self, *args, **kwargs)
            mode.guard(roots._meet, type(self), original)
            return roots.call(original, self, args, kwargs)

        self._watcher = __call__
        torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def settle(self) -> None:
        """The roots are known: stop watching every module."""
        self._has_settled = True
        self._stop_watching()

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; `install` finds the ones known so far again."""
        try:
            self._stop_watching()
        finally:
            for cls, (own, ours) in self._patched.items():
                if cls.__dict__.get("__call__") is not ours:
                    continue  # somebody has put something on top of it
                if own is None:
                    del cls.__call__
                else:
                    cls.__call__ = own  # type: ignore[method-assign]
        self._patched.clear()

    def _stop_watching(self) -> None:
        if self._original is not None and torch.nn.Module.__call__ is self._watcher:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
        self._original = None

    def _meet(self, cls: type[torch.nn.Module], original: Callable[..., Any]) -> None:
        if cls in self._patched:
            return
        roots, own = self, cls.__dict__.get("__call__")
        if cls not in self._known:
            self._known.append(cls)
        inner = own or original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not roots.is_root_call():
                return inner(self, *args, **kwargs)
            return roots.call(inner, self, args, kwargs)

        self._patched[cls] = own, __call__
        cls.__call__ = __call__  # type: ignore[method-assign]

    # -- calls ---------------------------------------------------------------------------------------------------

    def is_root_call(self) -> bool:
        """True if a module called now is called by the loop itself."""
        mode = self._mode
        try:
            if mode.depth or not mode.enabled or get_ident() != mode.thread:
                return False
            if _tracing_state() is not None or _peek_transforms() is not None:
                return False
            if mode.is_preparing:
                mode.begin()
        except Exception as error:
            mode.switch_off(error)
            return False
        return True

    def call(
        self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a root module, and note the call."""
        mode = self._mode
        popped = mode.step_aside()
        try:
            try:
                entry = self._begin(module, args, kwargs, sys._getframe(2))
            except BaseException as error:
                mode.switch_off(error)
                return original(module, *args, **kwargs)
            watching = mode.guard(self.lift_watch) if self._original is not None else None
            try:
                output = original(module, *args, **kwargs)
            except BaseException as error:
                self._running.fail(error, entry)
                raise
            finally:
                if watching is not None:
                    mode.guard(self.lower_watch, watching)
            try:
                self._running.finish_module(entry, output)
            except BaseException as error:
                mode.switch_off(error)
            return output
        finally:
            mode.step_back(popped)

    def lift_watch(self) -> Any:
        """Have modules called as if nobody watched, until `lower_watch` is given what this returns."""
        if self._original is None or torch.nn.Module.__call__ is not self._watcher:
            return None
        watching = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
        return watching

    def lower_watch(self, watching: Any) -> None:
        """The inverse of `lift_watch`."""
        if torch.nn.Module.__call__ is self._original:
            torch.nn.Module.__call__ = watching  # type: ignore[method-assign]

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Entry:
        running = self._running
        if running.is_hand_updated:
            self._listener.finish_hand_update()
        if id(module) not in self.met:
            self._listener.meet_module(module)
        drawn, running.generators = running.generators, None
        user = first_user_frame(frame)
        kind, target = kinds.MODULE, cast("Any", module)
        if frame.f_code is _FUNCTIONAL_CALL:  # the module has other parameters until this call is over
            kind, target = kinds.FUNCTION, torch.func.functional_call
            args, kwargs = (module, frame.f_locals["parameters_and_buffers"], args, kwargs), {}
        entry = Entry(kind, target, args, kwargs, current_mode(), None, "", user.f_code, user.f_lasti)
        entry.versions = versions = versions_of(args, kwargs)
        entry.rng, entry.generators = generator_states(versions), drawn
        entry.is_training = module.training
        entry.forward = vars(unwrapped(module)).get("forward")
        entry.settings = self.attributes.note(module)
        running.add(entry)
        return entry

    def meet(self, module: torch.nn.Module) -> None:
        """Make a module known to the listener, unless it is."""
        if id(module) not in self.met:
            self._listener.meet_module(module)

    def meet_late(self, frame: FrameType) -> None:
        """A root that was not known has just begun to run: note this call too, and wait for its end."""
        found = frame.f_locals
        module = found["self"]
        self._meet(type(module), type(module).__call__)
        if sys.getprofile() is not None or frame.f_back is None:
            return  # somebody else is profiling; what this one call returns is used by value
        mode = self._mode
        entry = self._begin(module, found.get("args", ()), found.get("kwargs", {}), frame.f_back)
        mode.depth += 1

        def wait(current: FrameType, event: str, value: Any) -> None:
            if event == "return" and current is frame:
                sys.setprofile(None)
                mode.depth -= 1
                mode.guard(self._running.finish_module, entry, value)

        sys.setprofile(wait)


_FUNCTIONAL_CALL = torch_private.functional_call_code
_peek_transforms = torch_private.peek_transforms
_tracing_state = torch_private.tracing_state  # of `torch.jit.trace`, which would trace our work as well
