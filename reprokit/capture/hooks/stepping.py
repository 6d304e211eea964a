"""A step from its loss to its update: checks the tensor that starts a backward pass, then the gradients, then ends.

Optimizers are distinguished from what else the loop does by torch's own hooks, grad scalers by a hook of ours. While an
optimizer or a scaler steps, the tape is out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit import torch_private
from reprokit.capture.hooks.early_warning import EarlyWarning
from reprokit.capture.hooks.on_failure import Failures
from reprokit.capture.hooks.policy import Policy
from reprokit.capture.hooks.suspects import OwnGradient
from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import Noted, is_of_torch
from reprokit.capture.record.entry import Entry, versions_of
from reprokit.capture.record.roots import compiled_call, learn_loop
from reprokit.capture.record.screens import Verdict, bad_tensor, is_handed_to_kernel
from reprokit.capture.record.state import options_of
from reprokit.capture.record.structure import iter_tensors, repeatable
from reprokit.capture.rewind.meeting import GOOD
from reprokit.capture.run.run_state import SETTLED_AFTER, RunState

_NO_SCALER: dict[str, Any] = {}
_GIVE_GRADIENTS = (kinds.TRANSFORM, kinds.BACKWARD)


class Stepping:
    """Follows every step, and calls for a snapshot at the first bad one.

    ``_optimizer`` is the one that steps or stepped last; while it steps ``_popped`` is not ``None`` (see
    `StackedMode.step_aside`). ``_in_kernel`` is the scale that a fused kernel of it got, ``_attributes`` are
    those that it began its step with. ``_scaler`` is the grad scaler that steps. ``_inside`` is an optimizer that has
    stepped inside the backward call that runs. ``early`` is called when a step is over.
    """

    def __init__(self, run_state: RunState, policy: Policy, failures: Failures) -> None:
        self._run_state = run_state
        self._tape = run_state.tape
        self._running = run_state.running
        self._policy = policy
        self._failures = failures
        self._popped: bool | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._met: torch.optim.Optimizer | None = None
        self._in_kernel: dict[str, Any] = _NO_SCALER
        self._attributes: Noted | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._inside: torch.optim.Optimizer | None = None
        self.early: EarlyWarning | None = None
        self._own_gradient = OwnGradient(run_state)
        run_state.running.memory.on_rebound_write = self._before_rebound_write
        run_state.before_interrupt = self.before_conversion

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._optimizer = self._met = self._inside = self._scaler = self._attributes = None
        self._in_kernel = _NO_SCALER
        self._own_gradient.forget()

    # -- what the tape reports ----------------------------------------------------------------------------------

    def meet_module(self, module: torch.nn.Module) -> None:
        self._run_state.meet_module(module)

    def judge_start(self, entry: Entry) -> None:
        """Check the loss."""
        if not self._tape.enabled:
            return
        suspects, ranks = self._failures.suspects, self._run_state.ranks
        try:
            verdict = self._policy.start(entry)
            suspect = self._running.suspect
            settled = suspects.at_backward(suspect, verdict is not None) if suspect is not None else None
            can_wait = verdict != "now" or not ranks.is_alone or suspects.can_wait()
        except BaseException as error:
            self._tape.switch_off(error)
            return
        if suspect is not None and settled is not None:
            self._failures.settle(suspect, settled)
        if verdict == "now" and self._tape.enabled:
            if not can_wait:
                self._failures.fail("loss", pending=entry)
            self._tape.guard(suspects.begin, entry)
            self._tape.guard(self._run_state.report_bad)  # the other processes wait for this backward
        elif verdict == "before" and settled != "skipped" and self._tape.enabled:
            self._failures.fail("loss", is_late=True)
        if ranks.is_sharded and self._tape.enabled and self._policy.matter:
            self._tape.guard(self._own_gradient.before_backward)

    def finish_differentiation(self, entry: Entry) -> None:
        """Optimizers may have stepped inside it, as soon as a gradient was complete."""
        suspect = self._running.suspect
        if entry.target is not torch.autograd.grad:
            if suspect is None or suspect.pending is None:
                self._run_state.iterations.micro_step += 1
            else:
                suspect.num_later += 1
        if self._run_state.iterations.total < SETTLED_AFTER:
            self._tape.guard(self._failures.suspects.learn, self._running.entries)
        optimizer, self._inside = self._inside, None
        if optimizer is not None and self._tape.enabled:
            self._running.entries[-1].has_stepped = True
            self._tape.guard(self.end_step, optimizer)

    def read_bad(self, tensor: torch.Tensor) -> None:
        """The loop may be about to skip its step, or to end."""
        suspect, suspects = self._running.suspect, self._failures.suspects
        if suspect is not None and suspects.is_passed(suspect):
            self._failures.settle(suspect, "skipped")
        if self._policy.matter and self._tape.enabled:
            suspects.read(tensor)

    def is_update(self, written: Any) -> bool:
        """A moving average, for example, goes on in a step that is skipped."""
        suspect, suspects = self._running.suspect, self._failures.suspects
        if suspect is not None and self._running.memory.is_differentiated(written):
            self._failures.settle(suspect, "harmless")  # the loop's update uses it; its parameters are checked later
            return True
        if suspect is None or not self._tape.guard(suspects.is_of_suspect, suspect, written):
            return False
        self._settle_update()
        return True

    def finish_hand_update(self) -> None:
        """This ends the step as an optimizer would have."""
        self._running.is_hand_updated = False
        if self._tape.enabled:
            with self._tape.paused():
                self.end_step(None)

    def note_loss(self, loss: torch.Tensor) -> None:
        """The loop may write into it for its log."""
        self._run_state.timeline.loss = loss.detach().clone()

    def finish_marked_step(self) -> None:
        """The loop says that its step is over, whose update has written into no tensor; there is no going back."""
        self._settle_update()
        bad = self._bad_derivative() if self._tape.enabled and self._policy.matter else None
        if bad is not None:
            self._failures.fail("parameter", keep=bad)
        elif self._tape.enabled:
            self._run_state.end_marked_step()
            if self.early is not None:
                self.early.act()

    def _bad_derivative(self) -> Entry | None:
        """The first call of the loop that gave bad gradients, of those that it has not made again since."""
        calls = [entry for entry in self._running.entries if entry.kind in _GIVE_GRADIENTS]
        latest = {(entry.code, entry.instruction): entry for entry in calls}
        return next((entry for entry in latest.values() if bad_tensor(iter_tensors(entry.output)) is not None), None)

    def before_conversion(self) -> None:
        """Check what has not been checked, as one cannot go back behind it later."""
        run_state = self._run_state
        if self._tape.enabled and (run_state.history.is_complete or not run_state.is_converted):
            with self._tape.paused():
                bad = self._policy.state()
                if bad is not None:
                    self._failures.fail(bad, is_late=True)
                elif self.early is not None:
                    self.early.act_now()

    def _before_rebound_write(self) -> None:
        """The loop writes a buffer that a forward has replaced since the last copy: check, and begin a new past."""
        if self._run_state.history.is_complete:
            self.before_conversion()
            self._run_state.history.interrupt()

    def before_registration(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """A parameter or module is about to be replaced or added; ``module.weight -= 1`` does neither."""
        run_state, tape = self._run_state, self._tape
        if any(owned.get(name) is value for owned in (module._parameters, module._buffers, module._modules)):
            return
        if tape.is_resting:
            tape.wake()
        if tape.enabled and not is_compiling() and run_state.history.is_part(module):
            if tape.is_outermost:
                self.before_conversion()
            with tape.paused():
                run_state.convert()

    def before_buffer(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """A buffer is about to be replaced or added; inside a forward, playing that does the same again."""
        if self._tape.enabled and not is_compiling() and not self._tape.is_outermost:
            with self._tape.paused():
                self._run_state.buffers.rebind(module, name)
                self._running.memory.rebind(module._buffers.get(name), value)
        else:
            self.before_registration(module, name, value)

    def before_compiled(self, frame: FrameType) -> None:
        """A function that was compiled before the capture began cannot be noted, so the tape gets out of its way."""
        self._tape.leave_stack()
        self._run_state.meet_compiled(compiled_call(frame))

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins: check the gradients and get out of the way; may return other arguments for it."""
        if is_compiling() or not self._tape.enabled:
            return None
        if self._tape.depth and self._popped is None and self._tape.thread == get_ident():
            try:  # an exception of the user's may have left the tape out of the way
                if self._tape.recover(sys._getframe(1)):
                    self._run_state.begin_over()
            except BaseException as error:
                self._tape.switch_off(error)
        if not self._tape.is_outermost and (self._scaler is None or self._popped is not None):
            if self._popped is None and torch_private.graph_task_id() != -1:
                self._inside = optimizer
                self._tape.guard(self._run_state.meet_optimizer, optimizer)
            return None
        if self._tape.is_preparing:
            self._tape.begin()
        closure = _closure_in(args, kwargs) if kwargs or len(args) > 1 else None
        try:
            self.enter(optimizer)
            if self._met is not optimizer:
                self._run_state.meet_optimizer(optimizer)
                self._met = optimizer
            self._attributes = self._tape.roots.attributes.note(optimizer)
        except BaseException as error:
            self._tape.switch_off(error)
            return None
        if closure is None:
            self._tape.guard(self._begin_update, optimizer)
        if closure is None or not self._tape.enabled:
            return None
        wrapped = self._watched_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        if self._popped is not None:
            self.leave()
        self._optimizer = optimizer
        self._in_kernel = _NO_SCALER
        if self._run_state.scalers.is_used and is_handed_to_kernel(optimizer):
            self._in_kernel = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
        self._popped = self._tape.step_aside()

    def leave(self) -> None:
        """No optimizer steps any more; nothing happens when none does."""
        if self._popped is not None:
            popped, self._popped = self._popped, None
            self._tape.step_back(popped)

    def abandon(self) -> None:
        """An exception ends an optimizer's step, which may have changed some of its parameters."""
        if self._popped is not None:
            self.leave()
            self._running.gaps.append(None)

    def _watched_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The loop's closure with the tape on; from the second call in one step on, the tape starts over with it.

        A step that calls it several times cannot be played again, so every call is checked at once.
        """
        tape, calls, is_search = self._tape, 0, _needs_closure(type(optimizer).step)

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if not tape.enabled:
                return closure(*args, **kwargs)
            self.leave()
            if calls > 1:
                tape.guard(self._run_state.interrupt)
            self._policy.is_urgent = is_search or calls > 1
            try:
                loss = closure(*args, **kwargs)
                tape.guard(self._check_update, optimizer)
            finally:
                self._policy.is_urgent = False
                if tape.enabled:
                    self.enter(optimizer)
            return loss

        return watched

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_update(optimizer)
        if self._tape.enabled:
            self._run_state.begin_update(optimizer)

    def _check_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use its gradients: act on a bad loss or gradient, with the other processes if there
        are any."""
        suspect, suspects, ranks = self._running.suspect, self._failures.suspects, self._run_state.ranks
        is_bad = self._policy.gradients(optimizer, are_scaled=bool(self._in_kernel))
        verdict = suspects.at_update(suspect, optimizer) if suspect is not None else None
        if ranks.is_parallel:
            ranks.num_checks += 1
        is_bad_elsewhere = ranks.is_sharded and ranks.is_bad_elsewhere(self._run_state.iterations.completed)
        if is_bad or is_bad_elsewhere or verdict is not None:
            self._act_on_update(verdict, is_bad=is_bad, is_bad_elsewhere=is_bad_elsewhere)

    def _act_on_update(self, verdict: Verdict | None, *, is_bad: bool, is_bad_elsewhere: bool) -> None:
        suspect, ranks = self._running.suspect, self._run_state.ranks
        is_passed = verdict is not None and verdict != "failed"
        is_bad_here = is_bad or (is_bad_elsewhere and not is_passed)
        is_waiting = is_bad_here and not ranks.is_alone
        with self._failures.until_saved() if is_waiting else contextlib.nullcontext():  # another rank may end meanwhile
            is_alone = ranks.is_alone or (is_bad_here and self._failures.is_bad_only_here())
            if suspect is not None and verdict is not None and (is_alone or verdict != "failed"):
                self._failures.settle(suspect, verdict)
            if (is_bad or is_bad_elsewhere or verdict == "failed") and not is_alone:
                self._failures.fail_together(is_bad_elsewhere or (is_bad and ranks.is_parallel))
            elif is_bad_here and self._tape.enabled:
                self._failures.fail("gradient")

    def _settle_update(self) -> None:
        """An update is about to be made by hand, or by a grad scaler, which shows its gradients only then."""
        suspect = self._running.suspect
        verdict = self._tape.guard(self._failures.suspects.at_update, suspect) if suspect is not None else None
        if suspect is not None and verdict is not None:
            self._failures.settle(suspect, verdict)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step ended: when it is time to, check the state; a good step becomes the past."""
        tape = self._tape
        if is_compiling() or not tape.enabled or self._popped is None or optimizer is not self._optimizer:
            return
        try:
            if _needs_closure(type(optimizer).step):
                self._run_state.history.interrupt()
            else:
                frame = sys._getframe(2)
                entry = tape.note(kinds.OPTIMIZER, optimizer, frame)
                learn_loop(entry.code, frame)
                noted, self._attributes = self._attributes, None
                entry.settings = {"options": options_of(optimizer), "scaler": self._in_kernel, "attributes": noted}
                if (kwargs or len(args) > 1) and not is_of_torch(optimizer):
                    _note_arguments(entry, args, kwargs)
                self._run_state.updates.end(optimizer, entry)
            if self._in_kernel and self._is_collapsing():
                self._running.entries.pop()  # the kernel has left the parameters alone
                self._failures.fail("gradient")
            self.end_step(optimizer)
        except BaseException as error:
            tape.switch_off(error)
        finally:
            if self._popped is not None:
                popped, self._popped = self._popped, None
                tape.step_back_lifted(popped)

    def _is_collapsing(self) -> bool:
        """True if a fused kernel was told to leave this step out once too often; a GPU is not waited for."""
        found, scaler = self._in_kernel["found_inf"], self._scaler
        if not self._policy.matter or scaler is None or not isinstance(found, torch.Tensor) or found.is_cuda:
            return False
        if not found.item():
            self._run_state.scalers.stepped()
            return False
        return self._run_state.scalers.skipped(scaler)

    def end_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """When it is time to, check everything; then begin a new step. ``None`` stands for an update made by hand."""
        run_state = self._run_state
        started = time.perf_counter()
        is_due = run_state.is_due(started)
        if is_due and run_state.ranks.meeting is not None:
            started = self._check_together(started)
            is_due = not run_state.ranks.has_missed
        elif (is_due or self._policy.watch == "every-step") and run_state.ranks.is_alone:
            bad = self._policy.state()
            if bad is not None:
                self._failures.fail(bad, is_late=True)
            elif self._tape.enabled:
                self._failures.keep_bad_buffer()
        if self._tape.enabled:
            run_state.end_step(optimizer, started, was_checked=is_due)
            if self.early is not None and self._tape.enabled:
                self.early.act()

    def _check_together(self, started: float, *, is_end: bool = False) -> float:
        """All ranks check their state before they copy it, and go back if one is bad; the start, less the wait.

        ``is_end``: the last step is over, and no other one will be.
        """
        bad = self._policy.state()
        if bad == "loss" and self._run_state.history.newly_bad() is None:
            bad = None  # no update was made of it
            self._failures.count_skipped("loss", self._run_state.iterations.completed)
        digest = self._run_state.digest()
        checked = time.perf_counter()
        answers = self._run_state.meet_for_copy(bad, digest, started, is_end=is_end)
        waited = time.perf_counter() - checked
        if answers is None:
            self._failures.say_parted(self._run_state.ranks.parted, is_compared=bool(digest))
        elif answers is not None and any(answer.bad != GOOD for answer in answers):
            self._failures.fail_together(True, bad or "parameter")
        elif answers is not None and self._run_state.differ(answers, is_end=is_end):
            self._failures.fail_by_difference()
        return started + waited

    def before_parting(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The process group is about to be destroyed: the last moment for going back together."""
        group = args[0] if args else kwargs.get("group")
        if self._tape.enabled and self._tape.is_outermost and (group is None or group is torch.distributed.group.WORLD):
            self._tape.guard(functools.partial(self.check_at_end, has_failed=sys.exc_info()[0] is not None))
        return target(*args, **kwargs)

    def check_at_end(self, *, has_failed: bool) -> None:
        """All ranks have come to the end of their loops, unless this one ``has_failed``: check what was not checked.

        Raises `CaptureStop` if a step was bad and the loop is to stop.
        """
        if self._run_state.ranks.meeting is not None:
            if not has_failed and self._tape.enabled:
                self._check_together(time.perf_counter(), is_end=True)
            self._tape.guard(self._run_state.part)

    # -- grad scalers' steps -------------------------------------------------------------------------------------

    def scaler_step(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A grad scaler's step: when it leaves the optimizer's step out, that is an attempt all the same."""
        tape, run_state, scaler = self._tape, self._run_state, args[0]
        if not tape.enabled or not scaler.is_enabled():
            return target(*args, **kwargs)
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        before = tape.guard(run_state.iterations.attempts, optimizer)
        is_outermost = tape.is_outermost
        if run_state.ranks.is_alone and is_outermost:
            self._settle_update()
        with tape.paused():
            self._scaler = scaler if is_outermost else None
            try:
                output = target(*args, **kwargs)
            finally:
                self._scaler = None
        if not tape.enabled:
            return output
        if tape.guard(run_state.iterations.attempts, optimizer) != before:
            if not self._in_kernel:
                tape.guard(run_state.scalers.stepped)
        else:
            if self._failures.is_held:  # the others take this rank's gradients for an overflow like any other
                self._failures.fail_together(False)
            elif tape.guard(run_state.scalers.skipped, scaler) and self._policy.matter:
                self._failures.fail("gradient")
            tape.guard(run_state.end_step, optimizer, time.perf_counter())
            if self.early is not None and tape.enabled:
                tape.guard(self.early.act)
        return output


def _closure_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of an optimizer's step; a step of the user's own may take other things."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) and not isinstance(given, torch.nn.Module) else None


def _note_arguments(entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note what an optimizer of the user's own was given for its step, without a closure, which has run."""
    closure = _closure_in(args, kwargs)
    given = tuple(None if value is closure else value for value in args[1:])
    named = {name: None if value is closure else value for name, value in kwargs.items()}
    entry.args, entry.kwargs = repeatable(given, named)
    entry.versions = versions_of(entry.args, entry.kwargs)


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        closure = inspect.signature(step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty
    return False
