"""The loop that is watched: its steps from the first forward pass to the update, and what is known of the run.

Receives every event of the recorder and of the hooks, asks the judge, and ends steps with marks on the tape. When the
judge says that a step failed, the verdict goes to `failures`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit import members, native, torch_private
from reprokit.capture.attributes import Noted, is_of_torch
from reprokit.capture.budget import Budget
from reprokit.capture.callers import KINDS, first_user_frame, learn_loop
from reprokit.capture.calls import Backward, OptimizerStep, Root, StepNote, gives_gradients, starts_of, unscaled
from reprokit.capture.failure_text import COMPILED
from reprokit.capture.judge import Flags, Judge, Outcome, Pending, Sentinel, is_bad_start
from reprokit.capture.meters import NormMeter
from reprokit.capture.mode import unseen, without_functions
from reprokit.capture.options import Watch
from reprokit.capture.ranks import Ranks
from reprokit.capture.recorder import Begun, Recorder, op_of
from reprokit.capture.replay import Forward, Forwards
from reprokit.capture.samples import SampleWatch
from reprokit.capture.stand_ins import as_called
from reprokit.capture.stand_ins import forget as forget_stand_ins
from reprokit.capture.structure import TENSORS, is_leaf, iter_tensors, repeatable
from reprokit.capture.tape import MOST_BYTES, SLOTS, Mark, Number, Op
from reprokit.capture.tensor_names import names_of
from reprokit.capture.world import GeneratorWatch, World, options_of
from reprokit.compare.compiled import Compiled
from reprokit.errors import drop_own_frames, pass_on, tb_entries
from reprokit.locate.ways import NAN, PLUS, bad_tensor, is_bad, is_finite_sum, ways_of
from reprokit.native import clock
from reprokit.own_work import passed_over
from reprokit.program.ir import OPAQUE, Call, Mode
from reprokit.program.sites import current_site, kind_of_file
from reprokit.program.trace import current_mode
from reprokit.series.timeline import Iterations, ScalerWatch, Seat, Timeline, parameters_of

if TYPE_CHECKING:
    from reprokit.capture.early_warning import EarlyWarning
    from reprokit.capture.failures import Failures
    from reprokit.capture.silent import Silent

SETTLED_AFTER = 2  # optimizer steps after which every root module is taken to be known
_NO_SCALER: dict[str, Any] = {}
_PLAIN_MODE = Mode()


class Loop:
    """Follows every step, and calls for a snapshot at the first bad one, if values ``matter``.

    ``unseen`` says in words what else the run does that is not known; ``compilers`` are those that the script has used,
    ``compiled`` is the first compiled function that the loop called itself. ``clipped`` is the norm that the loop
    clipped its gradients by, since the last look at them. While ``is_urgent`` everything is checked at once.
    ``has_differentiated``: backward was called in the running step. ``early`` is called when a step is over.
    ``forwards`` are for a run that ``is_forward_only``.
    """

    def __init__(self, recorder: Recorder, world: World, budget: Budget, watch: Watch, *, matter: bool) -> None:
        recorder.loop = self
        self.recorder, self.tape, self.world, self.budget = recorder, recorder.tape, world, budget
        self.watch, self.matter = watch, matter
        self.began_at = clock.time()  # code that was written later is not the code that runs
        self.judge = Judge(self.leaves, lambda: self.world.parameters)
        self.flags = Flags()
        self.timeline = Timeline()
        self.iterations = Iterations()
        self.scalers = ScalerWatch()
        self.generators = GeneratorWatch()
        self.ranks = Ranks(self)
        self.samples = SampleWatch(self.tape, recorder.switch_off)
        self.norms: NormMeter | None = None
        self.early: EarlyWarning | None = None
        self.silent: Silent | None = None
        self.failures: Failures
        self.unseen: list[str] = []
        self.compilers: dict[str, Compiled] = {}
        self.compiled: Call | None = None
        self.clipped: torch.Tensor | None = None
        self.is_urgent = self.is_noted = self.has_differentiated = False
        self.has_alarm: Callable[[], bool] = lambda: False  # asked before a copy
        self.asked: set[int] = set()  # steps to save although they are healthy
        self.last_step: int | None = None  # after which the loop is stopped
        self.forwards = Forwards()
        self.copied_at = -1  # the step of the last copy; the first ones begin before any step
        self.loss_sites: set[tuple[Any, int]] = set()  # where the first steps computed losses
        self._sentinel, self._last_layer = Sentinel(), Sentinel(is_last=True)
        self._is_stale = True  # buffers may be others than their copies
        self._has_forward = self._is_converted = self.has_optimizer = False
        self.stateless: set[int] = set()  # the ``id``s of optimizers that began without a state
        self._num_states: dict[int, int] = {}  # parameters with a state that the loop may write, by optimizer
        self._finished: set[int] = set()  # optimizers that have stepped since the last backward call
        self._popped: bool | None = None
        self._frame: FrameType | None = None  # in which an optimizer steps
        self._optimizer: torch.optim.Optimizer | None = None
        self._met: torch.optim.Optimizer | None = None  # the last one that was about to step
        self._is_of_torch = True
        self._in_kernel: dict[str, Any] = _NO_SCALER
        self._attributes: Noted | None = None
        self._stepped_from: tuple[CodeType, CodeType | None] | None = None  # the code around the last step, as learned
        self._scaler: torch.amp.GradScaler | None = None
        self._inside: torch.optim.Optimizer | None = None
        self.tape.on_lost = self._lose
        recorder.end_step_left = self.end_step_left
        self.choose()

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._optimizer = self._met = self._inside = self._scaler = self._attributes = self.clipped = None
        self._in_kernel = _NO_SCALER
        self.judge.pending = None
        for part in (self.flags, self._sentinel, self._last_layer, self.world, self.tape, self.samples):
            if part is not None:
                part.forget()
        self.compilers.clear()
        self.forwards.clear()
        self.recorder.roots.forget()
        forget_stand_ins()
        self.recorder.raised, self.recorder.gaps = None, []

    # -- what belongs to the training ----------------------------------------------------------------------------

    def before_root(self, module: torch.nn.Module) -> dict[str, Any] | None:
        """A root module is about to be called; the states of Python's generators if they matter."""
        recorder = self.recorder
        if recorder.is_hand_updated:
            self.finish_hand_update()
        if self._is_converted:
            self._begin_anew()
        if id(module) not in recorder.roots.met:
            self.meet_module(module)
        drawn = self.generators.before_module() if self.generators.looks_left else None
        if self._is_stale:
            self._is_stale = False
            if self.world.buffers.rows:
                self.world.buffers.refresh()
        if native.is_grad_enabled():
            self._has_forward = True
            self.tape.recent.clear()  # `bad_value` takes those before for passed
        return drawn

    @property
    def is_forward_only(self) -> bool:
        """True if the run, one process, has made neither a backward call nor an update so far."""
        has_trained = self.recorder.is_claimed or self.recorder.has_transform or self.iterations.total
        return self.ranks.is_alone and not has_trained

    def after_forward(self, target: Any, output: Any) -> None:
        """A root module was called, and the run has made no backward call so far. An output of -inf may be a mask."""
        forwards = self.forwards
        number = forwards.nums[id(target)]
        forwards.nums[id(target)] += 1
        kept = []
        if self.matter and forwards.bad is None and _is_bad(output):
            kept.append(forwards.begin_bad(number))
        if number in self.asked:
            kept.append(forwards.asked.setdefault(number, Forward(number)))
        for one in kept:
            (op,), alive = self.tape.ops(len(self.tape.log) // SLOTS - 1), self.tape.alive()
            one.ops.append(op)
            one.given |= {
                n: native.requires_grad_(native.clone(native.detach(alive[n])), alive[n].requires_grad)
                for n in op.ins
                if n in alive
            }

    def meet_module(self, module: torch.nn.Module) -> None:
        """A root module is known from here on."""
        if self.world.meet_module(module):
            self.iterations.meet(module)
            self.ranks.meet()
            self.recorder.roots.attributes.meet(module)
            self.recorder.roots.met.add(id(module))
        elif any(known is module for known in self.world.modules):
            self.recorder.roots.met.add(id(module))

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self.has_optimizer = True
        if self.world.meet_optimizer(optimizer):
            self.stateless.update([] if optimizer.state else [id(optimizer)])
            self._num_states[id(optimizer)] = len(optimizer.state)
            self.ranks.meet()
            self.recorder.roots.attributes.meet(optimizer)

    def leaves(self) -> list[torch.Tensor]:
        """Everything known that backward may leave gradients in."""
        found = {id(p): p for p in self.world.parameters}
        given = (*self.tape.inputs.values(), *self.tape.held.values())
        found.update((id(t), t) for t in given if t.requires_grad and is_leaf(t))
        return list(found.values())

    def meet_compiled(self, frame: FrameType) -> None:
        """The loop calls something that was compiled before the capture began: neither that nor what follows is noted,
        in any later step."""
        self.recorder.leave_stack()
        self.world.give_up()
        if self.compiled is not None:
            return
        function, site = frame.f_locals.get("fn"), current_site(frame.f_back)
        name = getattr(function, "__qualname__", type(function).__name__)
        self.compiled = Call(OPAQUE, (), {"name": name, "source": "", "is_compiled": True}, site=site)
        place = f" at {site.file}:{site.line}" if site is not None else ""
        self.unseen.append(f"the loop itself calls `{name}`{place}, {COMPILED} (`TORCH_COMPILE_DISABLE=1` helps)")

    # -- backward passes -----------------------------------------------------------------------------------------

    def before_backward(self, call: Begun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the loss."""
        self.has_differentiated = True
        start: Any = args[0] if args else None
        is_single = (
            start.__class__ in TENSORS and start.is_cpu and native.numel(start) == 1 and not native.is_complex(start)
        )
        is_asked, before = call[1] is torch.autograd.grad, self.judge.pending
        if is_single and before is None and not self.scalers.is_used and not is_asked:
            call[-1].losses = [seen] = [native.item(start)]
            if not self.matter or math.isfinite(seen):  # as nearly always
                self.timeline.loss = seen
                return
        starts = [start for start in starts_of(args, kwargs) if isinstance(start, torch.Tensor)]
        gives = (len(args) > 1 or bool(kwargs)) and gives_gradients(op_of(call))
        bad = self._start(call, starts, gives_gradients=gives)
        outcome: Outcome | None = None
        if before is not None or bad == "now":
            counts = bad == "now" and not (is_asked and (gives or sum(map(native.numel, starts)) != 1))
            behind = self.judge.behind(starts) if counts else set()
            step = self.running(behind)[0] if counts else self.iterations.completed
            loss, micro_step = self.timeline.loss, self.iterations.micro_step
            pending = Pending(call[-1], (call[4], call[5]), is_asked, behind, step, loss, micro_step)
            outcome = self.judge.begin(pending, counts, is_first=not self.iterations.total)
        self.act(outcome, before)
        if self.recorder.enabled and bad == "now" and self.ranks.is_alone and not self._can_wait():
            self.failures.fail("loss", op=op_of(call))
        elif self.recorder.enabled and bad == "before" and outcome != "skipped":
            self.failures.fail("loss", is_late=True)
        if self.recorder.enabled and not self.ranks.is_alone and self.matter:
            self.ranks.before_backward(bad == "now")

    def _start(
        self, call: Begun, starts: list[torch.Tensor], *, gives_gradients: bool
    ) -> Literal["now", "before"] | None:
        """``now`` if what a backward call starts from is bad, ``before`` if something was bad some steps ago."""
        if not starts:
            return None
        tensors = [self._unscaled(start) for start in starts] if self.scalers.is_used else starts
        if sum(map(native.numel, starts)) == 1:  # the loop may write into it for its log
            call[-1].losses = [native.item(start) if _is_near(start) else native.detach(start) for start in starts]
            loss = native.detach(tensors[0])
            value = native.item(loss) if _is_near(loss) else loss
            if call[1] is torch.autograd.grad:
                self.timeline.start_grad(value)
            else:
                self.timeline.loss = value
        if not self.matter:
            return None
        if self._waits_for(starts):
            return self._look_later(() if gives_gradients else tensors)
        return "now" if is_bad_start(tensors, gives_gradients=gives_gradients) else None

    def _unscaled(self, start: torch.Tensor) -> torch.Tensor:
        """The tensor to check: what the grad scaler was given, if ``start`` is its product."""
        number = self.tape.known(start)
        found = unscaled(self.tape.running(), number)() if number is not None else None
        return start if found is None else found

    def _waits_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(tensors) and tensors[0].is_cuda and self.watch != "every-step" and not self.is_urgent

    def _look_later(self, tensors: Sequence[torch.Tensor]) -> Literal["now", "before"] | None:
        """Have flags of tensors read when they have arrived; ``before`` if one that has says that a value was bad.

        One of several processes cannot go back by itself. Where ranks meet, flags wait until then. Elsewhere the loss
        of the running step is checked at once: it is bad too, unless the loop skipped the step of the earlier one.
        """
        self.flags.add(tensors, self.iterations.total)
        recorder = self.recorder
        suspicious, recorder.has_read_bad = recorder.has_read_bad, False  # the device has caught up
        if self.ranks.meeting is not None:
            return None
        bad = self.flags.read() if suspicious else self.flags.poll()
        if not bad or self.ranks.is_alone:
            return "before" if bad else None
        return "now" if any(map(is_bad, tensors)) else None

    def results(self, losses: Sequence[torch.Tensor]) -> bool:
        """True if a loss that a compiled step has returned is bad."""
        if losses:
            self.timeline.loss = losses[0]
        if not self.matter:
            return False
        if self._waits_for(losses):
            return self._look_later(losses) is not None
        return bad_tensor(losses) is not None

    def _can_wait(self) -> bool:
        """True if every update that may follow a backward call is seen before it is made."""
        hooked = any(map(torch_private.hooks_of_leaf, self.leaves()))
        return not (hooked or self.unseen or native.is_anomaly_enabled())

    def after_backward(self, call: Begun, output: Any) -> None:
        """Note it; optimizers may have stepped inside it, as soon as a gradient was complete."""
        self.recorder.finish(call, output)
        if self.judge.pending is not None:
            self.judge.end(call[-1], list(iter_tensors(output)))
        if call[1] is not torch.autograd.grad:
            self.iterations.micro_step += 1
        if self.iterations.total < SETTLED_AFTER:
            self.loss_sites.update((code, instruction) for _, code, instruction in self.tape.scalars)
        optimizer, self._inside = self._inside, None
        if optimizer is not None:
            call[-1].has_stepped = True
            self.end_step(optimizer)

    # -- what the loop does with its gradients by itself ---------------------------------------------------------

    def cleared(self, owner: Any) -> None:
        """The loop has called `zero_grad`."""
        if self.judge.pending is not None:
            found = parameters_of(owner) if isinstance(owner, torch.optim.Optimizer) else members.parameters(owner)
            self.judge.clear(found)
        if self.recorder.gaps and all(p.grad is None for p in self.world.parameters):
            self.recorder.gaps = [gap for gap in self.recorder.gaps if gap is None or gap.kind is not Backward]

    def before_state_write(self, owners: Iterable[torch.Tensor], given: Any) -> None:
        """The loop is about to write into its state: a moving average, for example, or its update."""
        if not self._has_forward:
            self._is_stale = True
        trained = list(filter(self._is_trained, owners))
        if not trained:
            return
        if self.judge.pending is not None:
            pending = self.judge.pending
            self.act(self.judge.update(trained, list(iter_tensors(given))), pending)
        self.recorder.is_hand_updated = True

    def _is_trained(self, owner: torch.Tensor) -> bool:
        """True if the loop differentiates for a part of the state, so that writing it is an update.

        A teacher gets no gradient. Where there is no optimizer, any state that could get one counts.
        """
        if not self.has_differentiated or not (owner.requires_grad or self.world.is_trained(owner)):
            return False
        return owner.grad is not None or not self.has_optimizer or self._is_asked_for(owner)

    def _is_asked_for(self, owner: torch.Tensor) -> bool:
        number = self.tape.known(owner)
        ops = (op for op in self.tape.running() if op.kind is Backward and op.target is torch.autograd.grad)
        return number is not None and any(number in op.ins for op in ops)

    def finish_hand_update(self) -> None:
        """The first thing after the loop changed parameters by itself is about to run: this ends the step as an
        optimizer would have."""
        self.recorder.is_hand_updated = False
        if self.recorder.enabled:
            with self.recorder.paused():
                self.end_step(None)

    def finish_marked_step(self) -> None:
        """The loop says that its step is over, whose update has written into no tensor; there is no going back."""
        pending = self.judge.pending
        if pending is not None:
            self.act(self.judge.update(self.leaves()), pending)
        bad = self._bad_derivative() if self.recorder.enabled and self.matter else None
        if bad is not None:
            self.failures.fail("parameter", keep=bad)
        elif self.recorder.enabled:
            self._note_numbers(None, *self.iterations.of(None), clock.perf_counter())
            self.iterations.attempted(None)
            self.interrupt()
            self._act_after_step()

    def _bad_derivative(self) -> Op | None:
        """The first call of the loop that gave bad gradients, of those that it has not made again since."""
        alive = self.tape.alive()
        calls = [op for op in self.tape.running() if op.kind.differentiates or op.kind.__name__ == "Transform"]
        latest = {(op.code, op.instruction): op for op in calls}
        for op in latest.values():
            if bad_tensor(alive[n] for n in op.outs if n in alive) is not None:
                return op
        return None

    def before_conversion(self) -> None:
        """State is about to get another type, shape or place: check what has not been checked, as one cannot go back
        behind it later."""
        if self.recorder.enabled and self.world.is_complete:
            with self.recorder.paused():
                bad = self.check_state()
                if bad is not None:
                    self.failures.fail(bad, is_late=True)
                elif self.early is not None:
                    self.early.act_now()
        if self.recorder.enabled:
            self._is_converted = True
            self.world.interrupt()
            self.recorder.roots.met.clear()

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins: check the gradients and get out of the way; may return other arguments for it."""
        if is_compiling() or not self.recorder.enabled:
            return None
        try:
            with unseen() if torch_private.num_dispatch_modes() else without_functions():
                return self._begin_step(optimizer, args, kwargs, sys._getframe(1))
        except BaseException as error:
            self.leave()
            self.recorder.switch_off(error)
            return None

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, frame: FrameType) -> Any:
        recorder = self.recorder
        if recorder.depth and self._popped is None and recorder.thread == get_ident() and recorder.recover(frame):
            self.begin_over()  # an exception of the user's had left the recorder out of the way
        if self._popped is not None and not _is_inside(self._frame, frame):
            self.abandon()  # an exception has ended the step before
        if not recorder.is_outermost and (self._scaler is None or self._popped is not None):
            if self._popped is None and torch_private.graph_task_id() != -1:
                self._inside = optimizer
                recorder.guard(self.meet_optimizer, optimizer)
            return None
        self.enter(optimizer, frame)
        if self._met is not optimizer:
            self.meet_optimizer(optimizer)
            self._met, self._is_of_torch = optimizer, is_of_torch(optimizer)
        self._attributes = None if self._is_of_torch else recorder.roots.attributes.note(optimizer)
        if self.norms is not None:
            recorder.guard(self.norms.before_step, self.iterations.of(optimizer)[0], optimizer)
        closure = _closure_in(args, kwargs) if kwargs or len(args) > 1 else None
        if closure is None:
            self._check_update(optimizer)
            return None
        wrapped = self._watched_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def enter(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        """An optimizer steps, in a frame."""
        if self._popped is not None:
            self.leave()
        self._optimizer = optimizer
        self._in_kernel = _NO_SCALER
        if self.scalers.is_used:  # which may leave the look at the gradients to the optimizer's fused kernel
            given = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
            self._in_kernel = given if any(value is not None for value in given.values()) else _NO_SCALER
        self._popped = self.recorder.step_aside()
        self._frame, self.recorder.is_stepping = frame, True

    def leave(self) -> None:
        """No optimizer steps any more; nothing happens when none does."""
        if self._popped is not None:
            popped, self._popped, self._frame = self._popped, None, None
            self.recorder.is_stepping = False
            self.recorder.step_back(popped)

    def end_step_left(self) -> None:
        """The loop may go on although an optimizer's step has not ended: an exception has ended it."""
        if self._scaler is None and not _is_inside(self._frame, sys._getframe(1)):
            self.abandon()

    def raising_step(self, error: BaseException) -> Op | None:
        """The step of an optimizer that an exception came out of, ``None`` if it came out of none."""
        optimizer, entries = self._optimizer, list(tb_entries(error.__traceback__))
        place = next((n for n, entry in enumerate(entries) if entry.tb_frame is self._frame), None)
        if self._popped is None or optimizer is None or place is None or _needs_closure(type(optimizer).step):
            return None
        user = next((e for e in entries[place::-1] if kind_of_file(e.tb_frame.f_code.co_filename) == "user"), None)
        code, instruction = (user.tb_frame.f_code, user.tb_lasti) if user is not None else (None, 0)
        note = StepNote(options_of(optimizer), self._in_kernel, self._attributes)
        return Op(OptimizerStep, optimizer, (), {}, (), code, instruction, current_mode(), note)

    def abandon(self) -> None:
        """An exception has ended an optimizer's step, which may have changed some of its parameters."""
        self.leave()
        self.recorder.gaps.append(None)

    def _watched_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The loop's closure with the recorder on; from the second call in one step on, the tape starts over with it.

        A step that calls it several times cannot be played again, so every call is checked at once.
        """
        recorder, calls, is_search = self.recorder, 0, _needs_closure(type(optimizer).step)

        @passed_over
        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            try:
                if not recorder.enabled:
                    return as_called(closure, args, kwargs)
                self.leave()
                if calls > 1:
                    recorder.guard(self.interrupt)
                self.is_urgent = is_search or calls > 1
                loss = as_called(closure, args, kwargs)
                recorder.guard(self._check_update, optimizer)
            except BaseException as error:
                drop_own_frames(error)
                raise
            finally:
                self.is_urgent = False
                try:
                    if recorder.enabled:
                        self.enter(optimizer, sys._getframe(1))
                except BaseException as error:
                    recorder.switch_off(error)
            return loss

        return watched

    def _check_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use its gradients: decide about a bad loss or gradient."""
        pending = self.judge.pending
        is_bad = self.has_bad_gradients(optimizer, are_scaled=bool(self._in_kernel))
        outcome = self.judge.update(list(parameters_of(optimizer))) if pending is not None else None
        if not self.ranks.is_alone:
            self.ranks.at_update(pending, outcome, is_bad=is_bad)
        elif is_bad or outcome is not None:
            self.act(outcome, pending, optimizer)
            if is_bad and outcome is None and self.recorder.enabled:
                self.failures.fail("gradient")

    def act(
        self, outcome: Outcome | None, pending: Pending | None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Act on what has become of a bad start, of which an ``optimizer`` is about to make an update; raises
        `CaptureStop` if the step failed and the loop is to stop."""
        if outcome is None or pending is None or not self.recorder.enabled:
            return
        if outcome == "failed" or self.failures.takes_skipped:
            if optimizer is not None and any(op.note is pending.note for op in self.tape.running()):
                pending.step = self.iterations.of(optimizer)[0]  # only now it is known whose turn it is
            self.timeline.loss = pending.loss
            self.failures.fail("loss", pending=pending)
        else:
            self.tape.drop_gradients()
            self.ranks.withdraw()
            self.flags.forget()
            self.failures.count_skipped(pending.step)

    def has_bad_gradients(self, optimizer: torch.optim.Optimizer, *, are_scaled: bool) -> bool:
        """The quick look at the gradients of a step; a hit is confirmed tensor by tensor.

        Gradients that ``are_scaled`` are left to the grad scaler.
        """
        world, clipped, ranks = self.world, self.clipped, self.ranks
        is_thorough = self.watch == "every-step" or self.is_urgent
        if clipped is None and world.is_short and world.is_complete and ranks.is_alone and not is_thorough:
            return False  # cheaper to go back a few short steps than to look at every one
        self.clipped = None
        if not self.matter or are_scaled:
            return False
        suspicious = self._sentinel.is_suspicious(optimizer, clipped)
        has_past = world.is_complete if ranks.is_alone else ranks.goes_back  # all ranks have to look at the same
        may_be_all = self.is_noted or not ranks.is_alone  # each rank chooses which steps it notes
        if is_thorough or (may_be_all and not has_past and not self._is_far(optimizer)):
            return bad_tensor(_gradients_of(optimizer)) is not None
        if suspicious is None:
            self.flags.add([clipped] if clipped is not None else [], self.iterations.total)
            return False
        if ranks.is_parallel and not suspicious:  # the loss of another rank may be bad, which reaches the last layer
            gradient = self._last_layer.gradient(optimizer)
            suspicious = gradient is not None and not is_finite_sum(gradient)
        return suspicious and bad_tensor(_gradients_of(optimizer)) is not None

    def _is_far(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(gradient.is_cuda for gradient in _gradients_of(optimizer))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step ended: when it is time to, check the state; a good step becomes the past."""
        recorder = self.recorder
        if is_compiling() or not recorder.enabled or self._popped is None or optimizer is not self._optimizer:
            return
        try:
            with unseen() if torch_private.num_dispatch_modes() else without_functions():
                self._finish_step(optimizer, args, kwargs, sys._getframe(2))
        except BaseException as error:
            recorder.switch_off(error)
        finally:
            self.leave()

    def _finish_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, frame: FrameType) -> None:
        if _needs_closure(type(optimizer).step):
            self.world.interrupt()
        else:
            self._note_step(optimizer, args, kwargs, frame)
        if self._in_kernel and self._is_collapsing():
            self.tape.pop()  # the kernel has left the parameters alone
            self.failures.fail("gradient")
        self.end_step(optimizer)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, frame: FrameType) -> None:
        user = frame if KINDS.get(id(frame.f_code)) == "loop" else first_user_frame(frame)
        place = user.f_code, user.f_back.f_code if user.f_back is not None else None
        if place != self._stepped_from:
            self._stepped_from = place
            learn_loop(user.f_code, frame)
        noted, self._attributes = self._attributes, None
        note = StepNote(options_of(optimizer), self._in_kernel, noted)
        given: tuple[Any, ...] = ()
        named: dict[str, Any] | None = None
        if (kwargs or len(args) > 1) and not self._is_of_torch:
            closure = _closure_in(args, kwargs)
            plain = tuple(None if value is closure else value for value in args[1:])
            options = {name: None if value is closure else value for name, value in kwargs.items()}
            given, named = self.recorder.encode(*repeatable(plain, options))
        mode = _PLAIN_MODE if self._is_of_torch else current_mode()  # torch's own set theirs
        self.tape.log += (OptimizerStep, optimizer, given, named, (), user.f_code, user.f_lasti, mode, note)

    def _is_collapsing(self) -> bool:
        """True if a fused kernel was told to leave this step out once too often; a GPU is not waited for."""
        found, scaler = self._in_kernel["found_inf"], self._scaler
        if not self.matter or scaler is None or not isinstance(found, torch.Tensor) or found.is_cuda:
            return False
        if not native.item(found):
            self.scalers.stepped()
            return False
        return self.scalers.skipped(scaler)

    # -- grad scalers' steps -------------------------------------------------------------------------------------

    @passed_over
    def scaler_step(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A grad scaler's step: when it leaves the optimizer's step out, that is an attempt all the same."""
        recorder, scaler = self.recorder, args[0]
        if not recorder.enabled or not scaler.is_enabled():
            return as_called(target, args, kwargs)
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        before, is_outermost = self.iterations.total, recorder.is_outermost
        pending = self.judge.pending
        if pending is not None and self.ranks.is_alone and is_outermost:
            outcome = recorder.guard(self.judge.update, list(parameters_of(optimizer)))
            recorder.guard(self.act, outcome, pending, optimizer)
        with recorder.paused():
            self._scaler = scaler if is_outermost else None
            try:
                output = as_called(target, args, kwargs)
            finally:
                self._scaler = None
        if not recorder.enabled:
            return output
        if self.iterations.total != before:
            if not self._in_kernel:
                recorder.guard(self.scalers.stepped)
        else:
            if self.judge.pending is not None and not self.ranks.is_alone:
                self.ranks.at_skip(self.judge.pending)
            elif recorder.guard(self.scalers.skipped, scaler) and self.matter:
                self.failures.fail("gradient")
            recorder.guard(self._end_step, optimizer, clock.perf_counter())
            recorder.guard(self._act_after_step)
        return output

    # -- the end of a step ---------------------------------------------------------------------------------------

    def check_state(self) -> Literal["loss", "parameter"] | None:
        """Where the training has gone bad since the last copy, looking at everything but buffers."""
        if not self.matter:
            return None
        if self.flags.read():
            return "loss"
        return "parameter" if self.world.newly_bad() is not None else None

    def has_bad_loss_before(self) -> bool:
        """True if a loss of an earlier step was bad, one can go back to it, and nobody has looked at it yet."""
        return self.matter and self.world.is_complete and self.flags.is_bad_before(self.iterations.total)

    def bad_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that have gone bad since the last copy, with their names."""
        return self.world.newly_bad_buffers() if self.matter else []

    def end_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """When it is time to, check everything; then begin a new step. ``None`` stands for an update made by hand."""
        started = clock.perf_counter()
        is_due = self._is_due(started, optimizer)
        if is_due and self.ranks.meeting is not None:
            started = self.ranks.check_together(started)
        elif (is_due or self.watch == "every-step") and self.ranks.is_alone:
            bad = self.check_state()
            if bad is not None:
                self.failures.fail(bad, is_late=True)
            else:
                self.failures.keep_bad_buffer()
        if self.recorder.enabled:
            self._end_step(optimizer, started, was_checked=is_due)
            if is_due and optimizer is not None and self.silent is not None:
                self.silent.look_first(optimizer, sys._getframe(1))
            if self.early is not None or self.last_step is not None:
                self._act_after_step()

    def _act_after_step(self) -> None:
        """Report what was seen, and stop the loop if it is to; raises `CaptureStop` then."""
        if self.early is not None and self.recorder.enabled:
            self.early.act()
        if self.last_step is not None and self.iterations.completed > self.last_step and self.recorder.enabled:
            self.failures.end_here()

    @property
    def num_steps(self) -> int:
        """The steps since the last copy that are over."""
        return len(self.tape.marks) - (self.world.copies[-1].num_marks if self.world.copies else 0)

    @property
    def num_kept(self) -> int:
        """The steps that can be played."""
        return len(self.tape.marks) if self.world.is_complete else 0

    def _is_due(self, now: float, optimizer: torch.optim.Optimizer | None) -> bool:
        """True if the running step, which is over, is followed by a copy; all ranks copy after the same step."""
        if self.budget.from_step == self.iterations.completed + 1:  # the last step that is not noted
            return True
        if self.asked:  # a step that was asked for is played from a copy right before it
            until = min(self.asked) - self.iterations.of(optimizer)[0]
            if until <= 1:
                return until == 1
        if self.ranks.meeting is not None:
            return self.iterations.total + 1 >= self.ranks.due_at
        if self.budget.is_sparing and not self.budget.notes(self.iterations.completed + 1):
            return False  # there is no going back behind a step that is not noted
        tape, copies = self.tape, self.world.copies
        num_steps = len(tape.marks) - (copies[-1].num_marks if copies else 0)
        return self.world.is_due(now, num_steps, tape.num_bytes, MOST_BYTES)

    def mark(self, step: int | None = None) -> Mark:
        """The mark of the running step, which belongs to iteration ``step``."""
        iterations, loss = self.iterations, self.timeline.loss
        step = self.running()[0] if step is None else step
        place = len(self.tape.log) // SLOTS
        return Mark(place, step, iterations.total, iterations.micro_step, loss, self.generators.states)

    def running(self, leaves: Iterable[int] | None = None) -> tuple[int, Seat]:
        """The iteration of the running step, and the seat of its optimizer: the one that steps now, else one of those
        that have the parameters behind it, which ``leaves`` are the ``id``s of if that is known."""
        optimizer, iterations = self._optimizer, self.iterations
        if self._popped is not None and optimizer is not None:
            return iterations.of(optimizer)
        if not leaves:
            roots = [op.target for op in self.tape.running() if op.kind is Root and op.mode.grad]
            leaves = {id(parameter) for root in roots for parameter in members.parameters(root)}
        return iterations.running(leaves)

    def _end_step(self, optimizer: torch.optim.Optimizer | None, ended: float, was_checked: bool = False) -> None:
        """The running step is over: mark it and, when everything ``was_checked``, take a new copy of the state.

        No copy is taken after an alarm, which leads back to the old one. ``optimizer`` is ``None`` after an update made
        by hand; the step ``ended`` before the checks.
        """
        world, iterations, tape = self.world, self.iterations, self.tape
        if world.num_optimizers > 1:
            if self.has_differentiated:
                self._finished.clear()
            self._finished.add(id(optimizer))
        elif optimizer is not None:
            self._finished = {id(optimizer)}
        if self.recorder.gaps:
            world.interrupt()
        step, seat = iterations.of(optimizer)
        if self.asked and min(self.asked) < step:
            self.failures.save_asked(step)
        self._note_numbers(optimizer, step, seat, ended)
        num_calls = len(tape.log) // SLOTS - tape.begin + len(tape.held) // 2  # a tensor from before costs half a call
        is_copied = was_checked and not (self.ranks.is_alone and world.is_complete and self.has_alarm())
        if not self.is_noted and world.is_complete:
            world.interrupt()
        if world.is_complete or is_copied:
            end, states = len(tape.log) // SLOTS, self.generators.states
            tape.mark(Mark(end, step, iterations.total, iterations.micro_step, generators=states))
        if is_copied:
            self.copy_state(ended)
            self.generators.looks_left = max(self.generators.looks_left, 1)  # look again in the next step
        elif not world.is_complete:
            tape.forget()
        if optimizer is not None and len(optimizer.state) != self._num_states.get(id(optimizer)):
            self._num_states[id(optimizer)] = len(optimizer.state)
            world.know_addresses()
        iterations.attempted(optimizer)
        if self.ranks.meeting is not None:
            self.ranks.end_update()
        if iterations.total == SETTLED_AFTER:
            self.recorder.roots.settle()
            self.forwards.clear()
        if optimizer is not None and self.budget.limit is not None:  # one by hand is seen only in a step that is noted
            self.budget.end_step(ended, num_calls, is_noted=self.is_noted)
        self.restart()

    def _note_numbers(self, optimizer: torch.optim.Optimizer | None, step: int, seat: Seat, ended: float) -> None:
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        if isinstance(rate, torch.Tensor):
            rate = native.clone(native.detach(rate))
        iterations, timeline, norms = self.iterations, self.timeline, self.norms
        row = norms.measure(step, optimizer) if norms is not None and optimizer is not None else None
        if row is not None and timeline.grad_norm is None:  # the loop has not computed it
            timeline.grad_norm = row.total
        timeline.end_step(iterations.total, step, rate, self.scalers.scale, ended, seat)
        if norms is not None and row is not None:
            names = names_of(self.world.optimizers, sys._getframe(1)) if iterations.has_several else {}
            norms.keep(row, timeline.last(iterations.names(names)))

    def restart(self) -> None:
        """A new step begins."""
        recorder = self.recorder
        recorder.raised, recorder.gaps, recorder.is_hand_updated = None, [], False
        if self.judge.pending is not None:
            self.judge.end_step()
        self.has_differentiated = self._has_forward = False
        self._is_stale = True
        if not self.is_noted or self.budget.is_sparing:
            self.choose()
        if self.generators.states is not None:
            self.generators.restart()

    def choose(self) -> None:
        """Note the functions of the running step, or not."""
        step = self.iterations.completed
        is_noted = self.is_noted = step in self.asked or self.budget.notes(step)
        self.recorder.turn(is_on=is_noted)

    def interrupt(self) -> None:
        """Something happened that is not on the tape; the step starts anew."""
        self.world.interrupt()
        self.tape.forget()
        self.restart()

    def begin_over(self) -> None:
        """An exception has interrupted work of reprokit's own: nothing that is known is sure to be whole."""
        self.world.interrupt()
        self.world.copies.clear()
        self.world.buffers.clear()
        self.tape.forget()
        self._is_converted = True
        self.recorder.roots.met.clear()
        self.restart()
        self.recorder.gaps.append(None)

    def copy_state(self, started: float) -> None:
        """Copy the state of now, behind which one cannot go back; the checks before it began at ``started``."""
        tape, world = self.tape, self.world
        self.copied_at = self.iterations.total
        unfinished = [o for o in world.optimizers if id(o) not in self._finished]
        try:
            kept = world.take(started, self.num_steps, unfinished, may_keep=self.is_noted)
            if kept:
                first, last = world.copies
                num_marks, first.num_marks = first.num_marks, 0
                last.num_marks = len(tape.marks) - num_marks
                tape.cut(num_marks)
            else:
                tape.cut(len(tape.marks))
                if world.copies:
                    world.copies[-1].num_marks = 0
        except Exception as error:  # an argument that cannot be copied
            pass_on(error)
            world.interrupt()
            tape.forget()
        world.know_addresses()
        self.recorder.roots.met.clear()
        self.recorder.roots.attributes.begin_anew([*world.modules, *world.optimizers])
        self._is_converted, self._met = False, None  # the next ones are met again, and held
        world.rest(started)

    def _begin_anew(self) -> None:
        """A converted model is used for the first time: what it is now is where its past begins."""
        self._is_converted = False
        for module in self.world.modules:
            self.world.buffers.add_module(module)
        if not self.has_differentiated and not any(op.kind is Root and op.mode.grad for op in self.tape.running()):
            self.tape.forget()
            self.copy_state(clock.perf_counter())

    def _lose(self) -> None:
        """Calls were taken off the tape that may have changed something: there is no going back behind them."""
        if self.world.is_complete:
            with self.recorder.paused():
                bad = self.check_state()
            if bad is None:
                self.world.interrupt()
                self.tape.drop_past()
            else:
                self.failures.fail(bad, is_late=True)
        if not self.has_differentiated:
            self._is_stale, self._has_forward = True, False

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched: it counts neither for the pace of copies nor as part of a step."""
        self.world.skip(seconds)
        self.budget.interrupt()
        self.timeline.skip(seconds)
        if self.norms is not None:
            self.norms.skip(seconds)

    def is_gradient(self, number: Number | None) -> bool:
        """True if a tensor is a gradient that the loop has read in the running step, or was computed from some."""
        wanted = {number}
        for op in reversed(self.tape.running()) if number is not None else ():
            if op.kind is Backward:
                return False
            if not wanted.isdisjoint(op.outs):
                if op.kind.reads_gradients(op):
                    return True
                wanted.update(op.ins)
        return False


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def _is_near(tensor: torch.Tensor) -> bool:
    """True for a single real number on the host, which costs nothing to read."""
    return tensor.is_cpu and native.numel(tensor) == 1 and not native.is_complex(tensor)


def _is_inside(outer: FrameType | None, frame: FrameType | None) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None and outer is not None


def _closure_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of an optimizer's step; a step of the user's own may take other things."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) and not isinstance(given, torch.nn.Module) else None


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        closure = inspect.signature(step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty
    return False


def _is_bad(output: Any) -> bool:
    """True if a tensor of an output is NaN or +inf."""
    return any(not {NAN, PLUS}.isdisjoint(ways_of(native.detach(tensor))) for tensor in iter_tensors(output))
