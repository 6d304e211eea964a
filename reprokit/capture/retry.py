"""A captured step with the edited code: the state from before it, and its inputs in the place of the loop's own.

Steps of the loop's own are recorded as a capture would record them, so both are programs and their inputs stand in the
order of their calls. The step with the number of the captured one is given the captured inputs at the places where the
recorded ones read theirs. Only inputs are matched: the code may make other calls of them.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from reprokit import members, native, torch_private
from reprokit.capture.callers import first_user_frame
from reprokit.capture.calls import Function, Root, name_of
from reprokit.capture.data_code import lines_of_data
from reprokit.capture.failures import Failures
from reprokit.capture.mode import CaptureStop
from reprokit.capture.recorder import Recorder
from reprokit.capture.replay import TracedPlayer
from reprokit.capture.roots import RootCalls, unwrapped
from reprokit.capture.save import Describing, NotKept, Verdict
from reprokit.capture.session import Session
from reprokit.capture.step_inputs import (
    Given,
    OtherStep,
    given_to,
    hands_on,
    has_same_name,
    has_same_reader,
    num_before_backward,
    paired,
    reader_of,
)
from reprokit.capture.structure import iter_tensors
from reprokit.capture.tape import Op
from reprokit.capture.tensor_names import names_of
from reprokit.capture.traits import facts_of
from reprokit.compare.quantity import measured, number_of, observed
from reprokit.compare.reading import StepReading
from reprokit.errors import NotMatched, pass_on
from reprokit.locate.blame import locate
from reprokit.locate.failure import Predicate
from reprokit.native import clock
from reprokit.program.code_lines import files_of_run
from reprokit.program.edits import Edits, Spans
from reprokit.program.executed import ExecutedLines
from reprokit.program.functions import called_function
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Call, Program, Ref, map_leaves
from reprokit.program.sites import make_site
from reprokit.program.step import HasProgram, Step
from reprokit.series.story import StepNumbers, failing_series
from reprokit.series.timeline import parameters_of
from reprokit.series.usual import UsualLoss
from reprokit.snapshot.format import OptimizerGroup, Snapshot, StateBefore, load
from reprokit.snapshot.redact import redact_argv
from reprokit.snapshot.rng import set_rng_state
from reprokit.words import number_words

_MOST_WAITED = 100  # steps until that with the captured number; one step stands for all with a higher number
_STAND_IN = 2  # the step that does: the first may prepare what the others read
_MOST_STEPS = 32  # after these: trainings that take turns between models repeat themselves sooner
_MOST_RECORDED = 8  # of the steps before it, once one of them fits
_OTHERS = 2  # further updates after which a step with the captured number may end: those of other optimizers
_OF_DATA = "the captured batch was given to the step, so a change of the data cannot show here"
_OF_MODE = ("batch_norm", "dropout", "instance_norm")  # calls that `train()` and `eval()` decide about
_NO_COPIES = 10**6  # steps between copies: they are taken here


class Slot(NamedTuple):
    """Where the loop reads an input: at the ``order``-th call of its step, which is known again by ``where`` it is."""

    order: int
    where: tuple[object, ...]
    position: int  # among the tensors that the call is given
    own: Given
    captured: Given
    parameter: torch.Tensor | None = None  # of an optimizer, and of no model that the step calls


def _where_of(op: Op) -> tuple[object, ...]:
    """Where a call of the loop is, and how it is made, as `Slot` has it."""
    name = name_of(op) if op.kind is Function else ""
    return name, op.code, op.instruction, op.mode.grad, len(op.ins)


Hand = Callable[[FrameType, str, Any, bool], None]


class _HandingRoots(RootCalls):
    """Shows each call of a root to the recorder's ``hand`` before it is made."""

    def begin(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Any, ...]:
        hand: Hand | None = getattr(self._recorder, "hand", None)
        if hand is not None:
            hand(frame, "", (args, kwargs), True)
        return super().begin(module, args, kwargs, frame)


class _HandingRecorder(Recorder):
    """Shows each outermost call to ``hand`` before it is made."""

    hand: Hand | None = None

    def __init__(self, switch_off: Callable[[BaseException], None]) -> None:
        super().__init__(switch_off)
        self.roots = _HandingRoots(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = called_function(func, sys._getframe(1))
        name = facts_of(func).name if self.hand is not None and self.is_outermost else ""
        if self.hand is not None and name and not hands_on(name) and torch_private.peek_transforms() is None:
            self.guard(self.hand, sys._getframe(1), name, (args, kwargs), False)
        return super().__torch_function__(func, types, args, kwargs)

    def whole(self, begin: Any, known: Any, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        is_shown = begin in (self._begin_function, self.roots.begin)  # by `__torch_function__` and `_HandingRoots`
        if self.hand is not None and self.is_outermost and not is_shown:
            self.guard(self.hand, sys._getframe(1), "", (args, kwargs), False)
        return super().whole(begin, known, target, args, kwargs, *rest, **options)


class _Failures(Failures):
    def end_here(self) -> None:
        session: Any = self.session
        session.end_step()


class RetrySession(Session):
    """Watches a script until it has made the step of ``captured``."""

    recorder_type, failures_type = _HandingRecorder, _Failures

    def __init__(self, captured: Snapshot, folder: Path, command: Sequence[str], *, verbose: bool) -> None:
        super().__init__(
            command=command, name="retry",
            directory=folder, quiet=True, verbose=verbose, history=_NO_COPIES, watch="every-step",
            on=("nonfinite", "exception", "skipped"), budget=None, cause=False,
        )  # fmt: skip
        self.is_over = False
        self.refusal: NotMatched | None = None  # why the step could not be made
        self.why = ""  # the last step of the script's own could not stand for it
        self.other_shape = ""  # the first input that has another shape in the script
        self.notes: list[str] = []  # what else is not as the code has it
        self.loss: float | None = None  # of a step without a failure
        self.grad_norm: float | None = None
        self.still, self.is_unusual = "", False  # what is wrong in it all the same; if that is the captured event
        self._captured, self._before = captured, _state_of(captured)
        self._has_stand_in = captured.step > _MOST_WAITED
        is_too_early = captured.step < _STAND_IN
        self._target = _STAND_IN if is_too_early or self._has_stand_in else captured.step
        self._slots: list[Slot] = []
        self._modules: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, list[OptimizerGroup]]] = []
        self._own_numbers: dict[Line, Plain] = {}
        self._next, self._num_alike, self._is_due, self._lacks_generators = 0, 0, False, True
        # How often a step of the script's own reaches where the first slot is, and how often this one has.
        self._num_begins, self._num_begun = 0, 0
        self._words = list(captured.source.command or captured.command), redact_argv(command)
        self._data: Spans = {}  # the lines of the code of data sets
        self._edits: Edits | None = None
        self._executed = ExecutedLines(captured.code)
        # The running step may be the captured one by itself. So is the first: it has no state to be put back.
        self.is_own = captured.step == 0
        self._loop.matter, self._loop.last_step = self.is_own, -1
        recorder: Any = self._recorder
        recorder.hand = self._hand

    def __enter__(self) -> Session:
        self._executed.start()
        return super().__enter__()

    def leave(self) -> None:
        self._executed.stop()
        super().leave()

    @property
    def has_begun(self) -> bool:
        """True if the script's own steps are over."""
        return self._next > 0 or self.is_own

    def is_same(self) -> bool:
        """True if the step fails as it did when it was captured."""
        now, before, cause = load(self.snapshots[0]).failure, self._captured.failure, self._captured.cause
        is_same = (now.kind, now.call, now.phase) == (before.kind, before.call, before.phase)
        if is_same and cause is not None and cause.kind in ("setting", "state"):
            self.notes.append(f"the file says what led to it, perhaps before this step: {cause.text}")
        return is_same

    def refuse(self, message: str) -> NoReturn:
        """End the script: the captured step cannot be made with it."""
        self.refusal = NotMatched(message)
        self._stop()

    def switch_off(self, error: BaseException) -> None:
        """After an error of reprokit's own the script would run to its end."""
        pass_on(error)
        self.refuse(f"an error of reprokit's own ({type(error).__name__}: {error})")

    def _stop(self) -> NoReturn:
        self.is_over = True
        self.leave()
        raise CaptureStop(self)

    def end_step(self) -> None:
        """A step is over: the captured one, else one of the loop's own."""
        loop, num_own = self._loop, self._loop.iterations.completed
        self._note_data()
        if self.has_begun:
            self._finish()  # returns if it was not the captured one
        if num_own > self._target + _MOST_STEPS:
            why = self.why or "it does not read these inputs again"
            self.refuse(f"none of {num_own} steps of the script is like the captured one: {why}")
        if num_own > 1 and (not self._slots or num_own > self._target - _MOST_RECORDED):
            try:
                self._look_at(*self._recorded())
            except OtherStep as reason:
                self.why = str(reason)
        self._is_due = bool(self._slots) and num_own >= self._target
        first = self._captured.step
        if not self._is_due and first <= num_own < first + _OTHERS:
            self._begin_own()
        else:
            loop.copy_state(clock.perf_counter())
        living, carried = loop.tape.alive(), loop.tape.carried  # what data were made of does not matter any more
        loop.tape.carried = [op for op in carried if any(n not in living or living[n].requires_grad for n in op.outs)]

    def _begin_own(self) -> None:
        """The next step may be the captured one by itself: with the captured state, its own inputs have to be the same.

        So for a step that reads an input that no step before has read.
        """
        try:
            if self._captured.step > 0:
                self._modules, self._optimizers = self._paired_state()
        except OtherStep as reason:
            self.why = str(reason)
            self._loop.copy_state(clock.perf_counter())
        else:
            self._begin()
            self.is_own = self._lacks_generators = True

    @property
    def edits(self) -> Edits:
        """What was edited since the capture."""
        if self._edits is None:
            captured = self._captured
            sites = [call.site for call in captured.program.calls if call.site is not None]
            files = files_of_run(self._loop.began_at)
            self._edits = Edits(captured.code, sites, files, self._words, self._executed.by_name())
        return self._edits

    def _note_data(self) -> None:
        """Note the code of data sets as long as their iterators are there."""
        parts = [part for found in list(self._loop.samples.parts.values()) for part in found if part is not None]
        if parts and not self._data:
            self._data = lines_of_data(parts)

    @property
    def of_data(self) -> str:
        """Why a script in which nothing but the code of data sets was edited shows nothing; empty for another one."""
        is_so = self.edits.are_within(self._data)
        return f"{self.edits.first_place} is code of a data set: {_OF_DATA}" if is_so else ""

    def read_by(self, step: HasProgram) -> StepReading:
        """What a step has read, beside what the captured one has."""
        failure = self._captured.failure
        origin = None if failure.is_derivative else failure.call_index
        return StepReading(Step.of(self._captured), Step(step.program, step.tensors), self.edits, origin)

    def _why_other(self, step: HasProgram) -> str:
        """Why a step is not the captured one with edited code; empty if it is."""
        captured, edits, reading = self._captured, self.edits, self.read_by(step)
        found = [one for one in reading.differences if not one.is_explained or (one.is_bits and self._has_stand_in)]
        if found and all(one.is_number for one in found):  # the captured step may fail with these numbers as well
            others = _other_numbers(captured.program, step.program)
            found = [] if others and _fails(_with_numbers(captured.program, others)[0], captured) else found
        if found:
            return f"{found[0].words}, and {found[0].reason}"
        moved = [one for one in reading.differences if one.is_random]
        is_failure = captured.failure.kind.is_failure
        if is_failure and not (edits.is_any and reading.differences):
            return "nothing that the step reads or runs was edited since the capture"
        self.notes.extend(f"an edited line draws random numbers, so {one.words}" for one in moved[:1])
        return ""

    def _recorded(self) -> tuple[TracedPlayer, list[Op]]:
        try:
            with self.replaying(ends=False):
                return Describing(self._loop, Verdict.asked(sys._getframe()), []).recorded()
        except NotKept as reason:
            raise OtherStep(f"the script's own step cannot be played: {reason}") from None

    def _look_at(self, player: TracedPlayer, ops: list[Op]) -> None:
        """Find the places where the script's own step reads inputs like those of the captured one, unless an earlier
        step is more like it, such as the discriminator's for that of the generator. Raises `OtherStep`.

        What lines compute that are there and not edited is an input where the script's own step does not reach them,
        or computes with another number there: the number of the step decides about both.
        """
        captured, own, site = self._captured, player.program, self._captured.failure.site
        moved = set(map(reader_of, captured.program.calls)) - set(map(reader_of, own.calls))
        moved &= _text_of(own) - {site.code.strip() if site is not None else None}
        prepared, is_first = set[str | None](), True
        while is_first or not moved <= prepared:
            prepared, is_first = prepared | moved, False
            wanted = given_to(captured.program, captured.tensors, prepared)
            pairs = paired(wanted, given_to(own, player.tensors, prepared))
            calls = [(one.call, other.call) for one, other in pairs if has_same_reader(one, other)]
            moved = {reader_of(one) for one, other in calls if _constants(one) != _constants(other)}
        state = self._paired_state()
        if self._slots and self._goes_on_with(ops):
            return
        num_alike = sum(has_same_reader(*pair) or has_same_name(*pair) for pair in pairs)
        if num_alike < self._num_alike:
            return
        self._num_alike, self._own_numbers, self._slots = num_alike, _with_numbers(own, {})[1], []
        self._modules, self._optimizers = state
        waiting = {own.value: (own, captured) for captured, own in pairs}
        updated = {id(one) for optimizer in self._loop.world.optimizers for one in parameters_of(optimizer)}
        parameters = {number: one for number, one in self._loop.tape.alive().items() if id(one) in updated}
        for order, op in enumerate(ops):
            name = name_of(op) if op.kind is Function else ""
            for position, number in enumerate(op.ins if not hands_on(name) else ()):
                tensor = player.env.get(number)
                value = player.tracer.value_of(tensor) if tensor is not None else None
                if value in waiting:
                    slot = Slot(order, _where_of(op), position, *waiting.pop(value))
                    self._slots.append(slot._replace(parameter=parameters.get(number)))
        self._num_begins = [_where_of(op) for op in ops].count(self._slots[0].where) if self._slots else 0

    def _goes_on_with(self, ops: list[Op]) -> bool:
        """True if calls of the step before are among those of a step: a log behind the update prints their results.

        A running step makes them no more, so they are no places where it reads an input.
        """
        own = {op.outs for op in self._loop.tape.segments()[-1].ops}
        return any(op.outs not in own for op in ops)

    def _paired_state(self) -> tuple[list[Any], list[Any]]:
        """Models and optimizers of the script, each with the captured state for it. Raises `OtherStep`."""
        world, frame, before = self._loop.world, sys._getframe(), self._before
        modules, optimizers = [], []
        roots = [unwrapped(root) for root in world.modules if members.tensors(root)]
        names = names_of(roots, frame)
        for name, state in before.modules.items():
            named = [root for root in roots if names[id(root)] == name] or roots
            differences = [_difference(state, root) for root in named] or ["is not there"]
            if differences.count("") > 1:
                raise OtherStep(f"there are {differences.count('')} models like that in the script")
            if "" not in differences:
                raise OtherStep(f"the model of the script {differences[0]}")
            modules.append((named[differences.index("")], state))
        names = names_of(world.optimizers, frame)
        for optimizer in world.optimizers:
            groups = before.optimizers.get("" if "" in before.optimizers else names[id(optimizer)])
            if groups is None:
                continue
            if [len(one["params"]) for one in optimizer.param_groups] != [len(one.state) for one in groups]:
                name = names[id(optimizer)]
                raise OtherStep(f"`{name}` has other groups of parameters than the captured optimizer")
            optimizers.append((optimizer, groups))
        return modules, optimizers

    def _hand(self, frame: FrameType, name: str, given: Any, is_root: bool) -> None:
        """A call of the loop is about to be made: give it the captured inputs if it is the next that reads one."""
        if not self._is_due:
            return
        user, tensors, slots = first_user_frame(frame), list(iter_tensors(given)), self._slots[self._next :]
        where = name, user.f_code, user.f_lasti, native.is_grad_enabled(), len(tensors)
        if self._slots and where == self._slots[0].where:
            self._num_begun += 1
            if not slots:
                self._come_again()
        if slots and where == slots[0].where:
            if not self.has_begun:
                self._begin()
                set_rng_state(self._captured.rng)
            for slot in itertools.takewhile(lambda one: one.order == slots[0].order, slots):
                self._give(tensors[slot.position], slot)
                self._next += 1
        if is_root and self.has_begun and self._lacks_generators:  # kept as they were before the first one of the step
            self._lacks_generators = False
            set_rng_state(self._captured.rng)

    def _come_again(self) -> None:
        """The step is where it has read its first input, and has read all of them.

        A micro-step that follows and a loop inside of the forward pass come there as often as in the script's own
        steps. Else the loop begins anew without an update, as a mended clipping has it: the step is over.
        """
        loop = self._loop
        if self._num_begun <= self._num_begins or not loop.has_differentiated:
            return
        pending = loop.judge.pending
        if pending is not None:
            loop.act("failed", pending)
        else:
            loop.end_step(None)

    def _give(self, tensor: torch.Tensor, slot: Slot) -> None:
        if slot.parameter is not None:  # `_begin` has put it back
            return
        value = slot.captured.tensor
        if (tensor.dtype, native.dim(tensor)) != slot.captured.kind:
            self.refuse(f"what the script reads changes from step to step: {slot.own.words}")
        if tensor.shape != value.shape and not self.other_shape:
            self.other_shape = f"{slot.own.words}: the captured shape is {tuple(value.shape)}"
        tensor.data = native.to(value, tensor.device)  # its memory, of a file or the data set, is not written into
        self._loop.tape.values.pop(id(tensor), None)  # a replay is not to make it again

    def _begin(self) -> None:
        """Put the state into what it was before the captured step."""
        loop = self._loop
        if self._has_stand_in:
            own, step = loop.iterations.completed, self._captured.step
            self.notes.append(f"step {own} of the script stands for step {step}, with the captured state and inputs")
        with native.no_grad():
            for module, state in self._modules:
                live = module.state_dict()
                for key, value in state.items():
                    native.copy_(live[key], value)
            for slot in self._slots:
                if slot.parameter is not None:
                    native.copy_(slot.parameter, slot.captured.tensor)
            for optimizer, groups in self._optimizers:
                self._put_back(optimizer, groups)
        loop.tape.forget()
        loop.world.interrupt()  # what was before is no part of the step
        loop.copy_state(clock.perf_counter())
        loop.matter = True

    def _put_back(self, optimizer: torch.optim.Optimizer, groups: list[OptimizerGroup]) -> None:
        """The state of an optimizer as it was; its options are the script's, but for a learning rate that moved."""
        rates = {row.step: row.lr for row in failing_series(self._captured.timeline) if row.lr is not None}
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for parameter, state in zip(group["params"], before.state, strict=True):
                own = optimizer.state.get(parameter, {})
                is_same = own.keys() == state.keys()  # else it is of another optimizer
                optimizer.state[parameter] = {
                    key: native.to(value, own[key].device, copy=True) if isinstance(value, torch.Tensor) else value
                    for key, value in (state.items() if is_same else ())
                }
            now, rate = number_of(group["lr"]), rates.get(self._captured.step)
            is_scheduled = len(set(rates.values())) > 1 and rates.get(self._loop.iterations.completed, now) == now
            if is_scheduled and rate not in (None, now):
                group["lr"] = rate
                self.notes.append(f"the learning rate is {number_words(rate or 0.0)}, as a schedule had set it")

    def _finish(self) -> None:
        """The step is over and nothing in it was bad. Returns if it is one of the script's own after all."""
        if self._next < len(self._slots) and not self.is_own:
            self.refuse(f"the step has ended before the script has read {self._slots[self._next].own.words} again")
        try:
            player, ops = self._recorded()
            why = self._why_not(player, ops)
        except OtherStep as reason:
            if not self.is_own:
                self.refuse(str(reason))
            why = str(reason)
        if why and self.is_own:
            self.is_own = self._loop.matter = False
            self.why = why
            return
        if self.of_data:
            self.refuse(self.of_data)
        self._measure(player.program, player.tensors)
        if why and not self.is_unusual:  # what is as unusual as it was fails, whatever it reads
            self.refuse(f"the step is finite, but it is not the captured one: {why}")
        self._stop()

    def _why_not(self, player: TracedPlayer, ops: list[Op]) -> str:
        """Why the step is not the captured one; empty if it is."""
        failure, program = self._captured.failure, player.program
        called, given = {unwrapped(op.target) for op in ops if op.kind is Root}, {module for module, _ in self._modules}
        if given and called - given and given - called:  # such as the first step of the next model
            return "the step calls another model than the one that has the captured state"
        line = failure.site.code.strip() if failure.site is not None else ""  # empty with `--source none`
        if failure.site is not None and line and self._leaves_out(line, program, ops):
            what = f"the step does not reach {failure.site.place} ({line}), which failed"
            why = "its number, or something else of the script's own, decides about that"
            return f"{what}, or to an edited line: {why}"
        if other := self._other_number(program):
            return f"{other}: what decides about that lies before the step"
        return self._why_other(player)

    def _measure(self, program: Program, tensors: Tensors) -> None:
        """Note the numbers of the step, and whether something is wrong in it although it is finite."""
        row = self._loop.timeline.last({})
        self.loss = row.loss
        self.grad_norm = self._norm_of_gradients() if row.grad_norm is None else row.grad_norm
        ruined = self._ruined_part()
        if ruined:
            self.still = f"{ruined} is nan or infinite after it"
        elif self.loss is not None and not math.isfinite(self.loss):
            self.still = f"its loss is {number_words(self.loss)}"
        elif self._captured.failure.event is not None:
            self._measure_event(program, tensors, self._captured.failure.event)
        elif self.loss is not None:
            self._judge_loss(self.loss)

    def _norm_of_gradients(self) -> float:
        gradients = [parameter.grad for parameter in self._loop.world.parameters if parameter.grad is not None]
        return math.hypot(*(float(native.vector_norm(native.double(one))) for one in gradients))

    def _ruined_part(self) -> str:
        """What the step has left nan or infinite, in words."""
        world = self._loop.world
        if world.newly_bad() is not None:
            return "a parameter"
        buffers = world.newly_bad_buffers()
        return f"`{buffers[0][0]}`" if buffers else ""

    def _judge_loss(self, loss: float) -> None:
        """A loss above the usual ones is no cure, unless the captured step had it and something else failed."""
        rows, step = failing_series(self._captured.timeline), self._captured.step
        before = [(row.step, row.loss) for row in rows if row.loss is not None and row.step < step]
        usual = UsualLoss(before).high
        if loss > max(usual, self._loss_then(rows)):
            self.still = f"its loss is {number_words(loss)}, and usual are up to {number_words(usual)}"

    def _measure_event(self, program: Program, tensors: Tensors, event: Predicate) -> None:
        """Compare the quantity of an event with the threshold that it had."""
        captured = self._captured
        value_then = captured.failure.value
        name = next((one.name for one in captured.program.inputs if one.value == value_then), "")
        leaf = next((one.value for one in program.inputs if one.name == name), None)
        value = measured(program, tensors, replace(captured.failure, value=leaf))
        if value is None:
            self.refuse(f"the {event.quantity} of the step could not be measured")
        if value >= event.threshold:
            self.is_unusual = True
            limit = number_words(event.threshold)
            self.still = f"{event.quantity} {number_words(value)}, unusual from {limit} on"

    def _loss_then(self, rows: Sequence[StepNumbers]) -> float:
        """The loss of the captured step, if it was finite and something else failed: a mended clipping leaves it."""
        losses = (row.loss for row in rows if row.step == self._captured.step and row.loss is not None)
        return next((loss for loss in losses if math.isfinite(loss)), -math.inf)

    def _leaves_out(self, line: str, program: Program, ops: list[Op]) -> bool:
        """True if the line that failed has made no call in this step, and is still there or no other line is new.

        A norm behind the backward pass that makes the step leave its update out is none of its program: nothing that
        the step leaves behind depends on it. It is one of its ``ops``.
        """
        captured = self._captured.program
        is_update = self._captured.failure.in_update
        made = _lines_of(program.calls[: None if is_update else num_before_backward(program)])
        is_new = not made <= _lines_of(captured.calls)
        is_made = line in _lines_of(program.calls)
        if line not in _lines_of(captured.calls[: num_before_backward(captured)]):
            is_made = is_made or line in _lines_of_ops(ops)
        if is_made or self._stands_in(program, ops):
            return False
        return line in _text_of(program) or not is_new

    def _stands_in(self, program: Program, ops: list[Op]) -> bool:
        """True if the step reaches a branch that was edited in, in front of the line that failed or around it.

        It has the number of the captured one, or that may have decided instead.
        """
        failing = self._captured.failure.site
        if self._loop.iterations.completed != self._captured.step + 1:
            return False
        sites = [make_site(op.code, op.instruction) for op in ops if op.code is not None]
        sites += [call.site for call in program.calls if call.site is not None]
        return failing is not None and self.edits.stands_in(failing, sites)

    def _other_number(self, program: Program) -> str:
        """A flag, or a number that is another one in each step, in a line that is not edited and without which the
        captured step does not fail; empty if there is none. A note names any other number."""
        captured = self._captured
        before, own = _with_numbers(captured.program, {})[1], self._own_numbers
        changed = _other_numbers(captured.program, program)
        modes = {
            line for line, new in changed.items() if isinstance(new, bool) and any(word in line[1] for word in _OF_MODE)
        }
        moving = {line: new for line, new in changed.items() if line in modes or own.get(line, new) != new}
        for others in (moving, changed):
            if others and not _fails(_with_numbers(captured.program, others)[0], captured):
                line, new = next(iter(others.items()))
                words = f"the captured step has {before[line]} in `{line[1]}` ({line[0].strip()}), the script has {new}"
                if others is moving:
                    return words
                self.notes.append(f"it is finite because of a number: {words}")
        return ""


Plain = float | bool
Line = tuple[str, str, str, int]  # its code, the call there, the module, and which of the numbers there


def _fails(program: Program, captured: Snapshot) -> bool:
    """True if the captured step still fails with these calls."""
    tensors, failure = captured.tensors, captured.failure
    return (observed(program, tensors, failure)[0] if failure.event else locate(program, tensors)) is not None


def _other_numbers(captured: Program, program: Program) -> dict[Line, Plain]:
    """The flags and fractional numbers of a program that are others than those of the captured one."""
    before, now = _with_numbers(captured, {})[1], _with_numbers(program, {})[1]
    return {line: now[line] for line in before if line in now and now[line] != before[line]}


def _with_numbers(program: Program, others: Mapping[Line, Plain]) -> tuple[Program, dict[Line, Plain]]:
    """The program with other flags and fractional numbers in its forward pass, and all that it had there."""
    calls, had, place, count = list(program.calls), dict[Line, Plain](), ("", "", ""), Counter[tuple[str, str, str]]()

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, (bool, float)):
            return leaf
        line = (*place, count[place])
        count[place] += 1
        had[line] = leaf
        return others.get(line, leaf)

    for index, call in enumerate(calls[: num_before_backward(program)]):
        place = call.site.code if call.site is not None else "", call.name, call.scope[-1].path if call.scope else ""
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), changed)
        calls[index] = replace(call, args=args, kwargs=kwargs)
    return replace(program, calls=tuple(calls)), had


def _lines_of(calls: Collection[Call]) -> set[str]:
    return {call.site.code.strip() for call in calls if call.site is not None}


def _lines_of_ops(ops: Collection[Op]) -> set[str]:
    return {make_site(op.code, op.instruction).code.strip() for op in ops if op.code is not None}


def _text_of(program: Program) -> set[str | None]:
    """The lines of the files that a program's calls are written in."""
    names = {call.site.file for call in program.calls if call.site is not None}
    files = [Path(folder, name) for name in names for folder in (os.getcwd(), sys.path[0])]
    return {line.strip() for file in files if file.is_file() for line in file.read_text().splitlines()}


def _constants(call: Call) -> Any:
    """The arguments of a call but for tensors."""
    return map_leaves((call.args, dict(call.kwargs)), lambda leaf: None if isinstance(leaf, Ref) else leaf)


def _state_of(captured: Snapshot) -> StateBefore:
    """The state from before the step, of the models that it calls; raises `NotMatched` if it is not all there."""
    before = captured.before
    if before is None or before.left_out or not before.modules:
        why = f": {before.left_out[0]}" if before is not None and before.left_out else ""
        hint = "capture the failure again with this version of reprokit"
        raise NotMatched(f"the file does not hold the state from before the step{why}", hint=hint)
    used = {call.scope[0].root for call in captured.program.calls if call.scope}
    return replace(before, modules={name: s for name, s in before.modules.items() if name in used} or before.modules)


def _difference(state: Mapping[str, torch.Tensor], module: torch.nn.Module) -> str:
    """The first parameter or buffer that a module has not, or has in another shape; empty if there is none."""
    wanted, live = ({key: tuple(one.shape) for key, one in part.items()} for part in (state, module.state_dict()))
    key = next((key for key in {**wanted, **live} if wanted.get(key) != live.get(key)), None)
    if key is None or key not in live:
        return f"has no `{key}`" if key is not None else ""
    other = f" of {live[key]}, and the captured state of {wanted[key]}" if key in wanted else ", which it had not then"
    return f"has `{key}`{other}"
