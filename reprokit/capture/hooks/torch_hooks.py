"""Hooks into the parts of torch that end or shape a step: optimizers, grad scalers, clipping, ``autograd.backward``.

Everything is put in place by `Hooks.install` and taken away by `Hooks.removals`; nothing is left on the user's objects.
What is done when a hook is reached is not decided here.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.overrides
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls
from torch.optim import optimizer as optimizers

from reprokit import torch_private
from reprokit.capture.hooks.compiled_calls import CompiledCalls
from reprokit.capture.hooks.composite_calls import WholeCalls
from reprokit.capture.hooks.stepping import Stepping
from reprokit.capture.record.roots import HAS_FRAME_OF_APPLY, applying
from reprokit.capture.record.tape import Tape
from reprokit.capture.record.transformed import MAKES, PULLS, RUNS, TransformCalls
from reprokit.locate.compiled import DEFAULT
from reprokit.program.functions import name_of
from reprokit.program.transforms import SCRIPTED


class Hooks:
    """Installs and removes all hooks of one capture: they lead to its tape, its stepping and its whole calls."""

    def __init__(self, tape: Tape, stepping: Stepping, calls: WholeCalls, compiled: CompiledCalls) -> None:
        self._tape = tape
        self._stepping = stepping
        self._calls = calls
        self._compiled = compiled
        self._before_compiled: list[Callable[..., Any]] = []
        self._undo: list[Callable[[], None]] = []
        self.lacking: list[str] = []  # functions that this torch does not have, so that their calls are not seen

    def install(self) -> None:
        """Put the hooks in place."""
        stepping, calls = self._stepping, self._calls
        name_of(torch.Tensor.backward)  # the names of torch's functions are read while they are torch's own
        before = optimizers.register_optimizer_step_pre_hook(stepping.before_step)
        after = optimizers.register_optimizer_step_post_hook(stepping.after_step)
        self._undo += [before.remove, after.remove]
        self._wrap(torch.optim.Optimizer, "zero_grad", calls.zero_grad)
        self._wrap(torch.nn.Module, "zero_grad", calls.zero_grad)
        self._wrap(torch.optim.Optimizer, "add_param_group", calls.add_parameters)
        self._wrap(torch.amp.GradScaler, "scale", calls.scale)
        self._wrap(torch.amp.GradScaler, "_unscale_grads_", calls.unscale)
        self._wrap(torch.amp.GradScaler, "step", stepping.scaler_step)
        self._wrap(torch.amp.GradScaler, "unscale_", calls.quietly)
        self._wrap(torch.amp.GradScaler, "update", calls.quietly)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._wrap(torch.nn.utils, name, calls.clip)
        if torch.distributed.is_available():
            self._wrap(torch.distributed, "destroy_process_group", stepping.before_parting)
            for name in ("all_reduce", "broadcast"):
                self._wrap(torch.distributed, name, calls.collective)
        transforms = TransformCalls(self._tape)
        if torch_private.HAS_TRANSFORMS:
            self._wrap_transforms(transforms)
        for compiled in SCRIPTED:
            self._wrap(compiled, "__call__", transforms.run_scripted)
        if not HAS_FRAME_OF_APPLY:
            self._wrap_apply()
        self._wrap_backward()
        self._wrap_records()
        self._watch_compiler()
        self._watch_registrations()

    def _wrap_transforms(self, transforms: TransformCalls) -> None:
        for owner, name in RUNS:
            self._wrap(owner, name, transforms.run)
        for name in MAKES:
            self._wrap(torch_private.eager_transforms, name, transforms.make)
        self._wrap(torch_private.eager_transforms, PULLS, transforms.pull)
        self._wrap(torch.func, "linearize", transforms.derive)

    def removals(self) -> list[Callable[[], None]]:
        """The functions that remove the hooks, even if another one fails; they may be called twice."""
        return [*reversed(self._undo), self._undo.clear]

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(wrapper, original)
        self._undo.append(functools.partial(_put_back, owner, name, wrapper, original))
        setattr(owner, name, wrapper)

    def _wrap(self, owner: Any, name: str, perform: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        """Have a function performed by ``perform(function, args, kwargs)``."""
        original = getattr(owner, name, None)
        if original is None:
            self.lacking.append(name)
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return perform(original, args, kwargs)

        home = sys.modules.get(original.__module__)  # where pickle looks a function up
        for place in {owner, home} if getattr(home, name, None) is original else {owner}:
            self._replace(place, name, wrapper)

    def _wrap_apply(self) -> None:
        """Custom autograd functions get a frame by which calls in their forward pass are known not to be the loop's."""
        owner, original = torch.autograd.Function, torch.autograd.Function.__dict__["apply"]
        wrapper = classmethod(applying(original))
        self._undo.append(functools.partial(_put_back, owner, "apply", wrapper, original))
        owner.apply = wrapper  # type: ignore[assignment, method-assign]

    def _watch_compiler(self) -> None:
        """Note calls of functions that are compiled from now on; of those that are compiled already, that they run."""
        original, tape = torch.compile, self._tape

        def compile(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if not tape.enabled:
                return made
            self._watch_compiled()
            tape.guard(self._compiled.note_compiler, kwargs.get("backend", DEFAULT))
            return self._compiled.watched(made)

        self._replace(torch, "compile", compile)
        self._watch_compiled()

    def _watch_compiled(self) -> None:
        """Have `Stepping` called before a compiled function runs that the loop calls and that is not noted.

        Nothing happens while the compiler is not loaded, or if it is watched.
        """
        home: Any = sys.modules.get("torch._dynamo.eval_frame")
        original = getattr(home, _BEFORE_COMPILED, None)
        if original is None or original in self._before_compiled:
            if home is not None and original is None:
                self.lacking.append(_BEFORE_COMPILED)
            return
        tape, stepping = self._tape, self._stepping

        def before_compiled() -> Any:
            if tape.is_outermost:
                frame = sys._getframe(1)
                # Torch 2.6 comes here also where nothing is compiled: `torch.compiler.disable` has no callback.
                if getattr(frame.f_locals.get("self"), "callback", frame) is not None:
                    stepping.before_compiled(frame)
            return original()

        self._replace(home, _BEFORE_COMPILED, before_compiled)
        self._before_compiled.append(before_compiled)
        _keep_from_compiling()

    def _watch_registrations(self) -> None:
        """Call `Stepping` before a part of a module is replaced or added."""
        modules, callback = torch.nn.modules.module, self._guarded(self._stepping.before_registration)
        handles = (
            modules.register_module_parameter_registration_hook(callback),
            modules.register_module_module_registration_hook(callback),
            modules.register_module_buffer_registration_hook(self._guarded(self._stepping.before_buffer)),
        )
        self._undo += [handle.remove for handle in handles]

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            try:
                hook(*args)
            except BaseException as error:
                self._tape.switch_off(error)

        return guarded

    def _wrap_backward(self) -> None:
        original, tape = torch.autograd.backward, self._tape

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tape.is_outermost:  # such as the one that `Tensor.backward` calls
                if threading.get_ident() != tape.thread:
                    tape.miss_backward()
                return original(*args, **kwargs)
            return tape.differentiate(original, args, kwargs)

        self._replace(torch.autograd, "backward", backward)

    def _wrap_records(self) -> None:
        """Optimizers mark their steps for torch's profiler; the marks are made with the tape out of the way."""
        owner: Any = torch.autograd.profiler.record_function
        enter, leave, tape, stepping = owner.__enter__, owner.__exit__, self._tape, self._stepping

        def __enter__(self: Any) -> Any:
            if not tape.depth and self.name[:_MARK_LENGTH] == _STEP_MARK and tape.enabled:
                tape.lift()
            return enter(self)

        def __exit__(self: Any, exc_type: Any, exc: Any, traceback: Any) -> None:
            leave(self, exc_type, exc, traceback)
            if (not tape.depth or exc_type is not None) and self.name[:_MARK_LENGTH] == _STEP_MARK:
                tape.lower()
                if exc_type is not None:
                    stepping.abandon()

        self._replace(owner, "__enter__", __enter__)
        self._replace(owner, "__exit__", __exit__)


_STEP_MARK = "Optimizer.step#"
_MARK_LENGTH = len(_STEP_MARK)


def _put_back(owner: Any, name: str, wrapper: Any, original: Any) -> None:
    """Undo a replacement, unless somebody else has put something on top of it: then it passes calls on for good."""
    if vars(owner).get(name) is wrapper:
        setattr(owner, name, original)


@functools.cache
def _keep_from_compiling() -> None:
    """Tell the compiler to run our functions as they are: after a graph break it would compile those of the hooks."""
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    owners: list[Any] = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_ROOMS)]
    owners += [vars(value) for names in list(owners) for value in names.values() if isinstance(value, type)]
    functions = [_function_of(value) for names in owners for value in list(names.values())]
    waiting = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    while waiting and skip is not None:
        code = waiting.pop()
        if code.co_filename.startswith(_OWN):
            skip(code)
            waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _function_of(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


# Called by every compiled function right before it runs, and not by those that are not to be compiled, which
# `fully_shard` calls a hundred times a step.
_BEFORE_COMPILED = "_is_skip_guard_eval_unsafe_stance"
_ROOMS = ("reprokit.capture.hooks.", "reprokit.capture.record.")
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
