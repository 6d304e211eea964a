"""Calls that are recorded as one operation: clearing and clipping gradients, scaling losses.

What runs inside is not noted: the tape is out of the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from reprokit.capture.hooks.policy import Policy
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry, versions_of
from reprokit.capture.record.kinds import EntryKind
from reprokit.capture.record.state import owned_by
from reprokit.capture.record.structure import repeatable
from reprokit.capture.run.run_state import RunState
from reprokit.errors import has_arrived
from reprokit.program.ir import Mode

_PLAIN_MODE = Mode()
MOST_KEPT = 65_536  # elements that a collective may have written for them to be kept
_OF_CALL = ("tensor", "async_op")  # are not given again


class WholeCalls:
    """Performs calls of the loop, each given as a function of torch with its arguments, and notes them.

    A grad scaler that is not enabled does nothing, so it is not noted.
    """

    def __init__(self, run_state: RunState, policy: Policy) -> None:
        self._run_state = run_state
        self._tape = run_state.tape
        self._policy = policy

    def zero_grad(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forget gradients."""
        tape = self._tape
        if tape.is_resting:
            tape.wake()
        if not tape.is_outermost:
            return target(*args, **kwargs)
        entry = Entry(kinds.ZERO_GRAD, target, args, kwargs, _PLAIN_MODE)
        popped = tape.step_aside()
        try:
            output = target(*args, **kwargs)
        except BaseException:
            tape.running.gaps.append(None)
            raise
        finally:
            tape.step_back(popped)
        if not (args[1] if len(args) > 1 else kwargs.get("set_to_none", True)):
            entry.settings = tape.guard(_with_gradient, args[0])
        tape.running.entries.append(entry)
        if tape.running.gaps:
            tape.guard(self._settle_gaps)
        return output

    def _settle_gaps(self) -> None:
        """Forget what interrupted backward calls have written, if no gradient is left."""
        history = self._run_state.history
        known = [*map(owned_by, history.modules), *map(owned_by, history.optimizers)]
        if all(parameter.grad is None for parameters in known for parameter in parameters):
            self._run_state.running.forget_gradients()

    def add_parameters(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer gets parameters, so a training may begin."""
        self._tape.wake()
        return target(*args, **kwargs)

    def clip(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip gradients; the norm, if there is one, is checked with the gradients."""
        if not self._tape.enabled:
            return target(*args, **kwargs)
        output, _ = self._perform(kinds.CLIP, target, args, kwargs, sys._getframe(2))
        is_spread = hasattr(output, "to_local")  # then all ranks are needed to read it
        if isinstance(output, torch.Tensor) and not is_spread:
            with torch._C.DisableTorchFunction():
                self._policy.clipped = self._run_state.timeline.grad_norm = output.detach()
        return output

    def scale(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply a loss by a grad scaler's scale."""
        scaler = args[0]
        if not self._tape.enabled or not scaler.is_enabled():
            return target(*args, **kwargs)
        output, entry = self._perform(kinds.SCALE, target, args, kwargs, sys._getframe(2))
        if entry is not None:
            entry.settings = self._tape.guard(self._run_state.scalers.scaled, scaler)
        return output

    def unscale(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Divide gradients by a grad scaler's scale; ``target`` is given its inverse."""
        tape = self._tape
        if not tape.enabled or not args[0].is_enabled():
            return target(*args, **kwargs)
        try:
            with tape.paused():
                output = target(*args, **kwargs)
        except BaseException:
            tape.running.gaps.append(None)
            raise
        frame = sys._getframe(2)
        tape.guard(lambda: tape.note(kinds.UNSCALE, target, frame, (None, args[1], args[2].detach().clone())))
        return output

    def quietly(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do something of a grad scaler in which only its own calls of `unscale` are noted."""
        if not self._tape.enabled or not args[0].is_enabled():
            return target(*args, **kwargs)
        with self._tape.paused():
            return target(*args, **kwargs)

    def collective(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write what all processes have into a tensor: averaged gradients, or a number that is kept as it is then."""
        tape = self._tape
        is_noted = tape.enabled and tape.is_outermost
        with tape.paused():
            output = target(*args, **kwargs)
        if is_noted:
            tape.guard(self._note_collective, target, args, kwargs, sys._getframe(2))
        return output

    def _note_collective(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, torch.Tensor):
            return
        is_gradient = self._run_state.is_gradient(tensor)
        if is_gradient:
            self._run_state.meet_averaging(kwargs.get("group", args[2] if len(args) > 2 else None))
        elif tensor.numel() > MOST_KEPT or kwargs.get("async_op"):
            return
        with torch._C.DisableTorchFunction():
            entry = self._tape.note(kinds.COLLECTIVE, target, frame, (tensor,))
            entry.settings = (args[1:], {name: value for name, value in kwargs.items() if name not in _OF_CALL})
            entry.versions = versions_of(entry.args, {})
            entry.outcome = None if is_gradient else tensor.detach().clone()

    def _perform(
        self,
        kind: EntryKind,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> tuple[Any, Entry | None]:
        tape = self._tape
        try:
            args, kwargs = repeatable(args, kwargs)
        except Exception as error:
            tape.switch_off(error)
        is_outermost = tape.is_outermost
        popped = tape.step_aside()
        try:
            try:
                output = target(*args, **kwargs)
            finally:
                tape.step_back(popped)
        except BaseException as error:  # such as `error_if_nonfinite` asks for
            entry = tape.guard(tape.note, kind, target, frame, args) if is_outermost else None
            if entry is not None:
                entry.kwargs = kwargs
                tape.running.raised = error, tape.running.entries.pop()
                if kind is kinds.CLIP and tape.guard(has_arrived, error):
                    tape.running.gaps.append(None)
            raise
        entry = tape.guard(tape.note, kind, target, frame, args) if is_outermost else None
        if entry is not None:
            entry.kwargs, entry.output = kwargs, output
        return output, entry


def _with_gradient(owner: torch.nn.Module | torch.optim.Optimizer) -> frozenset[int]:
    """The ids of the parameters of a module or an optimizer that have a gradient."""
    return frozenset(id(parameter) for parameter in owned_by(owner) if parameter.grad is not None)
