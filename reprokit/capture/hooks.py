"""Hooks into the parts of torch that end or shape a step: optimizers, grad scalers, clipping, ``autograd.backward``.

Everything is put in place by `Hooks.install` and taken away by `Hooks.removals`; nothing is left on the user's objects.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls
from torch.optim import optimizer as optimizers

from reprokit.capture.tape import Tape
from reprokit.capture.warned import redirect_warnings
from reprokit.program.functions import name_of


class Listener(Protocol):
    """Who is told."""

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins; may return other arguments for it."""

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step ended."""

    def around(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``target`` as one thing (``clip``, ``scale``, ``unscale``, ``scaler_step``, ``quietly``)."""

    @property
    def tape(self) -> Tape:
        """The mode that notes what the loop calls."""

    def before_mark(self) -> None:
        """An optimizer is about to mark the beginning of its step for the profiler."""

    def after_mark(self) -> None:
        """It has marked the end."""

    def backward(self, target: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Perform ``target(tensor, **kwargs)``, the backward method of tensors."""

    def zero_grad(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``target``, which forgets gradients."""

    def run_in_thread(self, run: Callable[[], None]) -> None:
        """Run the body of a new thread."""

    def before_compiling(self, arguments: Any) -> None:
        """The compiler is about to look at a function."""

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``torch.autograd.backward`` called by the loop itself."""


class Hooks:
    """Installs and removes all hooks of one capture."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put the hooks in place."""
        listener = self._listener
        name_of(torch.Tensor.backward)  # the names of torch's functions are read while they are torch's own
        before = optimizers.register_optimizer_step_pre_hook(listener.before_step)
        after = optimizers.register_optimizer_step_post_hook(listener.after_step)
        self._undo += [before.remove, after.remove]
        self._wrap_zero_grad(torch.optim.Optimizer)
        self._wrap_zero_grad(torch.nn.Module)
        self._wrap(torch.amp.GradScaler, "scale", "scale")
        self._wrap(torch.amp.GradScaler, "_unscale_grads_", "unscale")
        self._wrap(torch.amp.GradScaler, "step", "scaler_step")
        self._wrap(torch.amp.GradScaler, "unscale_", "quietly")
        self._wrap(torch.amp.GradScaler, "update", "quietly")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._wrap(torch.nn.utils, name, "clip")
        self._wrap_backward()
        self._wrap_handing_over()
        self._wrap_records()
        self._wrap_threads()
        self._watch_compiler()
        self._undo.append(redirect_warnings())

    def removals(self) -> list[Callable[[], None]]:
        """What takes the hooks away: each to be called once, whether or not another one fails."""
        undo, self._undo = self._undo[::-1], []
        return undo

    def _wrap_zero_grad(self, owner: Any) -> None:
        original, listener = owner.zero_grad, self._listener

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return listener.zero_grad(original, args, kwargs)

        functools.update_wrapper(zero_grad, original)
        owner.zero_grad = zero_grad
        self._undo.append(lambda: setattr(owner, "zero_grad", original))

    def _wrap(self, owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)
        listener = self._listener

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return listener.around(kind, original, args, kwargs)

        functools.update_wrapper(wrapper, original)
        home = sys.modules.get(original.__module__)  # where pickle looks a function up
        for place in {owner, home} if getattr(home, name, None) is original else {owner}:
            setattr(place, name, wrapper)
            self._undo.append(functools.partial(setattr, place, name, original))

    def _wrap_threads(self) -> None:
        """Threads that are started while the capture is on may be the ones that train."""
        original, listener = threading.Thread.start, self._listener

        def start(self: threading.Thread) -> None:
            run = self.run

            def watched() -> None:
                self.__dict__.pop("run", None)
                listener.run_in_thread(run)

            self.run = watched  # type: ignore[method-assign]
            original(self)

        functools.update_wrapper(start, original)
        threading.Thread.start = start  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(threading.Thread, "start", original))

    def _watch_compiler(self) -> None:
        """Be told when the loop calls something that is compiled just then, as soon as the compiler is loaded."""
        told, original = self._listener.before_compiling, torch.compile

        def register() -> None:
            handler = _callback_handler()
            if handler is not None and told not in handler.start_callbacks:
                handler.register_start_callback(told)

        def remove() -> None:
            handler = _callback_handler()
            if handler is not None and told in handler.start_callbacks:
                handler.remove_start_callback(told)

        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            register()
            return compiled

        functools.update_wrapper(compile, original)
        torch.compile = compile
        register()
        self._undo += [remove, lambda: setattr(torch, "compile", original)]

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward
        listener, tape = self._listener, self._listener.tape

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tape.is_outermost:  # such as the one that `Tensor.backward` calls
                return original(*args, **kwargs)
            return listener.differentiate(original, args, kwargs)

        functools.update_wrapper(backward, original)
        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))
        self._wrap_tensor_backward()

    def _wrap_tensor_backward(self) -> None:
        """``loss.backward()`` without torch's way of asking its function modes first, which takes long."""
        original: Any = torch.Tensor.backward
        listener, tape = self._listener, self._listener.tape

        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or (kwargs and not kwargs.keys() <= _PLAIN_OPTIONS) or type(self) is not torch.Tensor:
                return original(self, *args, **kwargs)
            if is_compiling() or not tape.is_outermost or torch._C._len_torch_function_stack() > 1:
                return original(self, **kwargs)
            return listener.backward(original, self, kwargs)

        functools.update_wrapper(backward, original)
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(torch.Tensor, "backward", original))

    def _wrap_handing_over(self) -> None:
        """How functions that torch has written in Python are handed to modes, without the detours."""
        original: Any = torch.overrides.handle_torch_function
        tape = self._listener.tape

        def handle_torch_function(public_api: Any, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
            for value in relevant_args:
                if type(value) not in _PLAIN_TYPES:
                    return original(public_api, relevant_args, *args, **kwargs)
            top = torch._C._pop_torch_function_stack() if torch._C._len_torch_function_stack() else None
            if top is tape:
                try:
                    return tape.__torch_function__(public_api, (), args, kwargs)
                finally:
                    torch._C._push_on_torch_function_stack(tape)
            if top is not None:
                torch._C._push_on_torch_function_stack(top)
            return original(public_api, relevant_args, *args, **kwargs)

        functools.update_wrapper(handle_torch_function, original)
        for place in (torch.nn.functional, torch.functional, torch._tensor):
            if getattr(place, "handle_torch_function", None) is original:
                place.handle_torch_function = handle_torch_function  # type: ignore[attr-defined]
                self._undo.append(functools.partial(setattr, place, "handle_torch_function", original))

    def _wrap_records(self) -> None:
        """Optimizers mark their steps for torch's profiler; the marks are made with the tape out of the way."""
        owner: Any = torch.autograd.profiler.record_function
        enter, leave, listener = owner.__enter__, owner.__exit__, self._listener

        def __enter__(self: Any) -> Any:
            if self.name[:_MARK_LENGTH] == _STEP_MARK:
                listener.before_mark()
            return enter(self)

        def __exit__(self: Any, exc_type: Any, exc: Any, traceback: Any) -> None:
            leave(self, exc_type, exc, traceback)
            if self.name[:_MARK_LENGTH] == _STEP_MARK:
                listener.after_mark()

        owner.__enter__, owner.__exit__ = __enter__, __exit__
        self._undo += [lambda: setattr(owner, "__enter__", enter), lambda: setattr(owner, "__exit__", leave)]


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})  # which bring no function of their own
_PLAIN_OPTIONS = frozenset({"retain_graph", "create_graph"})
_STEP_MARK = "Optimizer.step#"
_MARK_LENGTH = len(_STEP_MARK)


def _callback_handler() -> Any:
    """Where the compiler tells what it does; ``None`` while it is not loaded."""
    module = sys.modules.get("torch._dynamo.callback")
    return getattr(module, "callback_handler", None)
