"""Calls of `torch.func` transforms, scripted and compiled functions by the loop, each noted as one call of the step.

What runs inside is not noted: its tensors are transformed ones, or a compiler's. A replay calls the function again,
with the variables that it reads (of enclosing functions, modules of Python and the object it is a method of) as they
were.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from reprokit import native, torch_private
from reprokit.capture.callers import first_user_frame
from reprokit.capture.calls import Transform, TransformNote
from reprokit.capture.roots import generator_states
from reprokit.capture.stand_ins import as_called
from reprokit.capture.tensor_names import note_unfollowed
from reprokit.capture.variables import owners_in, read_by
from reprokit.errors import drop_own_frames
from reprokit.own_work import passed_over
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.recorder import Begun, Recorder

_peek_transforms = torch_private.peek_transforms
RUNS = (
    (torch_private.apis, "vmap_impl"),
    (torch_private.eager_transforms, "grad_impl"),
    (torch_private.eager_transforms, "grad_and_value_impl"),
    (torch_private.eager_transforms, torch_private.JVP),
)
DIFFERENTIATES = ("grad_impl", "grad_and_value_impl", torch_private.JVP)
MAKES = ("jacrev", "jacfwd")  # functions that make a function, which is then called
OPENS = ((torch_private.eager_transforms, torch_private.VJP), (torch.func, "linearize"))  # return a function as well


class TransformCalls:
    """Performs calls of transforms and notes those of the loop itself."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @passed_over
    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what runs a transform: torch's ``target``, given a function and its arguments."""
        recorder, name, is_noted = self._recorder, target.__name__, self._is_noted
        recorder.has_transform = True
        transforms = torch_private.eager_transforms
        owner = transforms if hasattr(transforms, name) else torch_private.apis
        output = self._perform(functools.partial(_latest, owner, name), target, args, kwargs)
        if name in DIFFERENTIATES and not recorder.loop.has_optimizer and get_ident() == recorder.thread:
            recorder.loop.has_differentiated = True  # a write into parameters is an update from here on
        if is_noted and name == "grad_and_value_impl":
            value = output[1][0] if isinstance(output[1], tuple) else output[1]
            if isinstance(value, torch.Tensor) and native.numel(value) == 1:  # the loop may write into it for its log
                recorder.loop.timeline.loss = recorder.guard(lambda: native.clone(native.detach(value)))
        return output

    @passed_over
    def make(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a transformed function whose calls are noted."""
        made = as_called(target, args, kwargs)

        @functools.wraps(made)
        @passed_over
        def transformed(*args: Any, **kwargs: Any) -> Any:
            try:
                self._recorder.has_transform = True
                return self._perform(made, made, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise

        return transformed

    @passed_over
    def open(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what returns a function, whose calls a replay could not make: what comes out of them is no data."""
        is_noted, recorder = self._is_noted, self._recorder
        with recorder.paused():
            result, function, *rest = as_called(target, args, kwargs)
        if not is_noted:
            return result, function, *rest
        recorder.guard(note_unfollowed, result)

        @functools.wraps(function)
        @passed_over
        def derivative(*args: Any, **kwargs: Any) -> Any:
            is_outermost = recorder.is_outermost
            try:
                with recorder.paused():
                    found = as_called(function, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise
            if is_outermost:
                recorder.guard(note_unfollowed, found)
            return found

        return result, derivative, *rest

    @passed_over
    def run_scripted(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what `torch.jit` has compiled: torch's ``target``, given a function or method and its arguments."""
        function, *given = args
        again = functools.partial(_latest, type(function), "__call__", function)
        return self._perform(again, functools.partial(target, function), tuple(given), kwargs)

    @property
    def _is_noted(self) -> bool:
        return self._recorder.is_outermost and _peek_transforms() is None

    @passed_over
    def _perform(self, again: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``target`` and note it; a replay calls ``again``."""
        if not self._is_noted:
            return as_called(target, args, kwargs)
        known = self._recorder, again, target, args, kwargs
        return self._recorder.whole(begin_call, known, target, args, kwargs)


def begin_call(recorder: Recorder, again: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun:
    """The call of ``target`` that is about to run, for the recorder; ``again`` is called by a replay."""
    if recorder.is_hand_updated:
        recorder.loop.finish_hand_update()
    user = first_user_frame(sys._getframe(1))
    found = list(read_by((target, args, kwargs)))
    values = [value for _, value in found]
    for owner in owners_in((args, kwargs, values)):
        if isinstance(owner, torch.nn.Module) and id(owner) not in recorder.roots.met:
            recorder.loop.meet_module(owner)
    given = tuple(recorder.tape.encode((args, kwargs, values)))
    note = TransformNote([place for place, _ in found], generator_states(args, kwargs, values))
    return Transform, again, given, None, user.f_code, user.f_lasti, current_mode(), note


@passed_over
def _latest(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)
