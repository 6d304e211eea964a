"""Meets the modules that the loop calls itself, and only those, and notes their calls.

For the first steps ``nn.Module.__call__`` is watched, and put back while a root runs, so that nothing inside one sees
it. Every class met at the outermost level gets a ``__call__`` of its own, which calls what Python finds without it;
then the global watch goes. A root of a class that appears later, or whose base has a ``__call__`` of its own, is noted
as plain calls once, and watched from its next call on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reprokit import native, torch_private
from reprokit.capture.attributes import AttributeWatch
from reprokit.capture.callers import KINDS, first_user_frame
from reprokit.capture.calls import Function, FunctionNote, Root, RootNote
from reprokit.capture.mode import unseen, without_functions
from reprokit.capture.root_call import LeftOut, behind, noting_call, noting_own_call
from reprokit.capture.structure import iter_tensors
from reprokit.errors import drop_own_frames
from reprokit.program.ir import Mode
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.recorder import Recorder


class OpenRoot(NamedTuple):
    """A call of a root that runs: whether the mode was on the stack (``None``: it still is), the data of the call, and
    whether the watch of all modules was taken away for it."""

    popped: bool | None
    begun: tuple[Any, ...] | None
    is_unwatched: bool


class RootCalls(LeftOut):
    """Notes calls of root modules, with the mode out of the way.

    The loop is told of every module but those whose ids are in ``met``.
    """

    drop_own_frames, behind = staticmethod(drop_own_frames), staticmethod(behind)

    def __init__(self, recorder: Recorder) -> None:
        self.met: set[int] = set()
        self.attributes = AttributeWatch()
        self._recorder = recorder
        self._patched: dict[type[torch.nn.Module], tuple[Any, Any]] = {}  # each class's own `__call__`, and ours
        self.original: Any = None
        self.watcher: Any = None
        self._known: list[type[torch.nn.Module]] = []
        self._has_settled = False
        self._last: tuple[tuple[torch.Tensor, None], bytes] | None = None  # the state of the generator

    # -- which modules are watched -------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch every module until `settle`, so that the first call of each root is seen from its beginning."""
        if self._has_settled:
            for cls in self._known:
                self.meet_class(cls)
            return
        self.original = torch.nn.Module.__call__
        self.watcher = noting_call(None, self.original, self, self._recorder)
        functools.update_wrapper(self.watcher, self.original)
        torch.nn.Module.__call__ = self.watcher  # type: ignore[method-assign]

    def settle(self) -> None:
        """The roots are known: stop watching every module."""
        self._has_settled = True
        self._stop_watching()

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; `install` finds the ones known so far again."""
        try:
            self._stop_watching()
        finally:
            self._take_off()
        self._patched.clear()

    def _take_off(self) -> list[type[torch.nn.Module]]:
        """Give every class its own ``__call__``; the classes, without those on which somebody has put something."""
        found = [cls for cls, (_, ours) in self._patched.items() if _is_ours(vars(cls).get("__call__"), ours)]
        for cls in found:
            own = self._patched[cls][0]
            if own is None:
                type.__delattr__(cls, "__call__")
            else:
                type.__setattr__(cls, "__call__", own)
        return found

    def forget(self) -> None:
        """Let go of the user's modules and classes."""
        self.met.clear()
        self._known.clear()
        self.attributes.forget()

    def _stop_watching(self) -> None:
        if self.original is not None and torch.nn.Module.__call__ is self.watcher:
            torch.nn.Module.__call__ = self.original  # type: ignore[method-assign]
        self.original = None

    def meet_class(self, cls: type[torch.nn.Module]) -> None:
        """Watch the calls of a class of modules."""
        if cls in self._patched:
            return
        own = vars(cls).get("__call__")
        if cls not in self._known:
            self._known.append(cls)
        if own is None:
            ours = noting_call(cls, None, self, self._recorder)
        else:
            function: Any = own if isinstance(own, FunctionType) else _bound_anew(own)
            ours = noting_own_call(function, self, self._recorder)
        found = own if own is not None else cls.__call__
        functools.update_wrapper(ours, self.original if found is self.watcher else found)  # names and signature
        self._patched[cls] = own, ours
        type.__setattr__(cls, "__call__", ours)  # a metaclass may have a `__setattr__` of its own

    def is_first_called(self, module: torch.nn.Module) -> bool:
        """True if a call of a module comes to the watch first, not through a `__call__` of a class between."""
        for cls in type(module).__mro__:
            is_only_ours = cls in self._patched and self._patched[cls][0] is None
            if "__call__" in vars(cls) and not is_only_ours:
                return cls is torch.nn.Module
        return False

    # -- calls ---------------------------------------------------------------------------------------------------

    def is_root_call(self) -> bool:
        """True if a module called now is called by the loop itself."""
        recorder = self._recorder
        if recorder.depth and not (recorder.is_stepping and recorder.is_outermost):
            return False
        if not recorder.enabled or get_ident() != recorder.thread:
            return False
        return _peek_transforms() is None and not (_num_dispatch_modes() and is_tracing())

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """In this context modules are called as if nobody watched."""
        is_watched = self._stop_for_now()
        try:
            yield
        finally:
            if is_watched:
                self._go_on()

    def _stop_for_now(self) -> bool:
        """Take the watch of all modules away until `_go_on`; false if it is not there."""
        if self.original is None or torch.nn.Module.__call__ is not self.watcher:
            return False
        torch.nn.Module.__call__ = self.original  # type: ignore[method-assign]
        return True

    def _go_on(self) -> None:
        if self.original is not None and torch.nn.Module.__call__ is self.original:
            torch.nn.Module.__call__ = self.watcher  # type: ignore[method-assign]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In this context every class of modules has its own ``__call__``."""
        found, is_watched = self._take_off(), self._stop_for_now()
        try:
            yield
        finally:
            for cls in found:
                if cls in self._patched and vars(cls).get("__call__") is self._patched[cls][0]:
                    type.__setattr__(cls, "__call__", self._patched[cls][1])
            if is_watched:
                self._go_on()

    def open(self, cls: type | None, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> OpenRoot | None:
        """A module is called, which the watch of its class or that of all modules meets: what `close` needs, ``None``
        if there is nothing to note or to put back."""
        recorder = self._recorder
        try:
            if not self.is_root_call():
                return None
            if cls is None:
                recorder.guard(self.meet_class, type(module))
                if not self.is_first_called(module):
                    # A class between has a `__call__` of its own, which is running and has called this one: what it
                    # has done so far is noted as plain calls, so the rest is as well (`test_inherited_calls.py`).
                    recorder.guard(recorder.loop.meet_module, module)
                    return OpenRoot(None, None, self._stop_for_now())
        except Exception as error:
            recorder.switch_off(error)
            return None
        popped, begun = recorder.step_aside(), None
        try:
            # `unseen` is a Python call, `without_functions` is none: the calls of every step come here.
            with unseen() if _num_dispatch_modes() else without_functions():
                begun = self.begin(module, args, kwargs, sys._getframe(2))
        except RecursionError:  # the call itself may still fit
            pass
        except BaseException as error:
            try:
                recorder.switch_off(error)
            except BaseException:
                recorder.step_back(popped)
                raise
        return OpenRoot(popped, begun, self.original is not None and self._stop_for_now())

    def close(self, opened: OpenRoot, output: Any) -> None:
        """The call is over."""
        recorder, begun = self._recorder, opened.begun
        if opened.is_unwatched:
            self._go_on()
        try:
            if begun is not None and recorder.enabled:
                looks = recorder.loop.generators.looks_left or not recorder.is_claimed
                with unseen() if _num_dispatch_modes() else without_functions():
                    (self.finish if looks else recorder.finish)(begun, output)
        except BaseException as error:
            recorder.switch_off(error)
        finally:
            if opened.popped is not None:
                recorder.step_back(opened.popped)

    def fail(self, opened: OpenRoot, error: BaseException) -> None:
        """An exception has ended the call."""
        if opened.is_unwatched:
            self._go_on()
        try:
            if opened.begun is not None:
                with unseen():
                    self._recorder.fail(error, opened.begun)
        finally:
            if opened.popped is not None:
                self._recorder.step_back(opened.popped)

    def begin(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Any, ...]:
        """The call of a root module, for the recorder."""
        recorder = self._recorder
        drawn = recorder.loop.before_root(module)
        user = frame if KINDS.get(id(frame.f_code)) == "loop" else first_user_frame(frame)
        mode = current_mode() if _is_any_autocast_enabled() or not native.is_grad_enabled() else _PLAIN_MODE
        rng = self.states(args, kwargs)
        attributes = self.attributes.note(module)
        if frame.f_code is _FUNCTIONAL_CALL:  # the module has other parameters until this call is over
            given = tuple(recorder.tape.encode((frame.f_locals["parameters_and_buffers"], args, kwargs)))
            note = FunctionNote(rng=rng, generators=drawn, attributes=attributes)
            return Function, torch.func.functional_call, (module, *given), None, user.f_code, user.f_lasti, mode, note
        given, named = recorder.encode(args, kwargs)
        inner: Any = module.module if issubclass(type(module), torch.nn.parallel.DistributedDataParallel) else module
        is_training = _space_of_module(module).get("training")
        if is_training is None:  # a scripted module has it elsewhere
            is_training = module.training
        root_note = RootNote(is_training, rng, drawn, _space_of_module(inner).get("forward"), attributes)
        return Root, module, given, named, user.f_code, user.f_lasti, mode, root_note

    def finish(self, begun: tuple[Any, ...], output: Any) -> None:
        """Note it."""
        self._recorder.finish(begun, output)
        self._recorder.loop.generators.after_module()
        if not self._recorder.is_claimed:
            self._recorder.loop.after_forward(begun[1], output)

    def states(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`generator_states` of now; the last ones again if they are the same, since each takes five kilobytes."""
        if native.cuda_is_initialized():  # type: ignore[no-untyped-call]
            return generator_states(*given)
        state = native.get_rng_state()
        # A call of torch would be seen by modes of the user's, and `len` calls `Tensor.dim`, which may be patched.
        content = ctypes.string_at(native.data_ptr(state), native.numel(state))
        if self._last is None or content != self._last[1]:
            self._last = (state, None), content
        return self._last[0]


def _is_ours(found: Any, ours: FunctionType) -> bool:
    """True for our function and for a copy: cloudpickle loads a class of this process by setting its attributes."""
    return found is ours or (isinstance(found, FunctionType) and found.__code__ == ours.__code__)


def _bound_anew(own: Any) -> Callable[..., Any]:
    """A `__call__` that is no function, such as a static method or a callable object, as a function of the module."""

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = own.__get__(self, type(self)) if hasattr(type(own), "__get__") else own
        return bound(*args, **kwargs)

    return call


def generator_states(*given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the CPU generator and, when a CUDA tensor is among the arguments, of its device's generator."""
    state = native.get_rng_state()
    if native.cuda_is_initialized():  # type: ignore[no-untyped-call]
        for tensor in iter_tensors(given):
            if tensor.is_cuda:
                return state, native.cuda_get_rng_state(tensor.device)
    return state, None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The target of a replay: the module itself, without a wrapper that would wait for other processes."""
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module


_FUNCTIONAL_CALL = torch_private.functional_call_code
_PLAIN_MODE = Mode()
_is_any_autocast_enabled = torch_private.is_any_autocast_enabled
_space_of_module = torch_private.space_of_module
_num_dispatch_modes = torch_private.num_dispatch_modes
_peek_transforms = torch_private.peek_transforms
is_tracing = torch_private.is_tracing
