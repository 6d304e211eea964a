"""A captured step with the edited code: the state from before it, and its inputs in the place of the loop's own.

The loop makes steps of its own until one is given inputs like those of the captured step. It is recorded as a capture
would record it, so that both are programs and their inputs stand in the same order. The next step that reads inputs at
the same places is given the captured ones. Only inputs are matched: the code may make other calls of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from reprokit import torch_private
from reprokit.capture.callers import first_user_frame
from reprokit.capture.calls import Function, name_of
from reprokit.capture.failures import Failures
from reprokit.capture.mode import CaptureStop
from reprokit.capture.recorder import Recorder
from reprokit.capture.replay import TracedPlayer
from reprokit.capture.roots import unwrapped
from reprokit.capture.save import Describing, NotKept, Verdict
from reprokit.capture.session import Session
from reprokit.capture.structure import iter_tensors
from reprokit.capture.tape import Op
from reprokit.capture.tensor_names import names_of
from reprokit.capture.traits import facts_of
from reprokit.capture.world import set_python_generators
from reprokit.compare.quantity import number_of, observed, update_of
from reprokit.errors import NotMatched, ignored_errors, pass_on
from reprokit.locate.blame import locate
from reprokit.locate.failure import HEALTHY, Failure
from reprokit.program.functions import is_factory
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Phase, Program, Ref, Site, map_leaves
from reprokit.series.cause import usual_limits
from reprokit.series.story import failing_series
from reprokit.snapshot.format import OptimizerGroup, Snapshot, StateBefore, load
from reprokit.words import number_words

_MOST_STEPS = 32  # of the loop's own: trainings that take turns between models repeat themselves sooner
_MOST_WAITED = 8  # steps in which the place where the first input is read is not reached again
_ABSURD = 1000.0  # times the highest usual loss: a finite one that mends nothing
_OF_MODE = ("batch_norm", "dropout", "instance_norm")  # calls that `train()` and `eval()` decide about
_NO_COPIES = 10**6  # steps between copies: they are taken here
_MEASURED = ("loss", "gradient norm", "update")  # quantities of an event that one step has
# Calls of the loop that hand data on: their results are inputs, such as the minibatch `x[32:48]` of all samples.
_HANDING_ON = frozenset(
    ["__getitem__", "__setitem__", "cat", "chunk", "clone", "concat", "contiguous", "copy_", "detach", "expand",
     "flatten", "gather", "index_select", "movedim", "narrow", "permute", "repeat", "reshape", "select", "split",
     "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view"]
)  # fmt: skip


def hands_on(target: str) -> bool:
    """True for a call that makes inputs of inputs."""
    return target.rpartition(".")[2] in _HANDING_ON or is_factory(target)


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a step is given, with the first call that computes something of it."""

    value: int
    tensor: torch.Tensor
    call: Call

    @property
    def words(self) -> str:
        """``float32 (8, 4) in `linear`, train.py:12: loss = ...``"""
        site = self.call.site
        place = f", {site.place}: {site.code.strip()}" if site is not None else ""
        kind = f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"
        return f"{kind} in `{self.call.name}`{place}"


def line_of(call: Call) -> str | None:
    """The text of the line of the loop that makes a call, which edits may move; ``None`` inside of a module."""
    return call.site.code.strip() if call.site is not None and not call.scope else None


def given_to(program: Program, tensors: Mapping[int, torch.Tensor], prepared: Collection[str | None]) -> list[Given]:
    """The inputs of a step that are no state, in the order in which its calls up to the last backward call read them;
    what the loop only hands on, or computes in lines that are ``prepared``, is followed to the first other call."""
    last = max((n for n, call in enumerate(program.calls) if call.is_differentiation), default=len(program.calls))
    given = {item.value for item in program.inputs if item.role in ("batch", "random")}
    readers: dict[int, Call] = {}
    handing = []
    for index, call in enumerate(program.calls[: last + 1]):
        read = call.input_refs()
        is_handed = not call.scope and (hands_on(call.target) or line_of(call) in prepared)
        if is_handed and given.issuperset(read):
            given.update(call.output_refs())
            handing.append(index)
        else:
            readers.update({value: call for value in read if value in given and value not in readers})
    values = run(program, tensors, keep=frozenset(readers), only=handing).values
    return [Given(value, values[value], call) for value, call in readers.items()]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place where the loop reads an input: its call, and the position among the tensors there.

    ``order`` is that of the calls; ``own`` is the input of the loop's own step, ``captured`` the one to give.
    """

    order: int
    name: str  # of a function
    code: CodeType | None
    instruction: int
    grad: bool
    num_tensors: int
    position: int
    own: Given
    captured: Given


class _HandingRecorder(Recorder):
    """Shows each outermost call to ``hand`` before it is made."""

    hand: Callable[[FrameType, str, Any], None] | None = None
    begin_root: Callable[[], None] = staticmethod(lambda: None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        hand, name = self.hand, facts_of(func).name
        is_own = bool(name) and self.is_outermost and torch_private.peek_transforms() is None
        if hand is None or not is_own or hands_on(name):
            return super().__torch_function__(func, types, args, kwargs)
        self.guard(hand, sys._getframe(1), name, (args, kwargs))
        self.hand = None  # `whole` would show it again
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.hand = hand

    def whole(self, begin: Any, known: Any, target: Any, args: Any, kwargs: Any, finish: Any = None) -> Any:
        if self.hand is not None and self.is_outermost:
            self.guard(self.hand, sys._getframe(1), "", (args, kwargs))
            if begin == self.roots.begin:
                self.guard(self.begin_root)
        return super().whole(begin, known, target, args, kwargs, finish)


class _Failures(Failures):
    """Hears of the end of every step of the loop's own."""

    def end_here(self) -> None:
        session = self.session
        if isinstance(session, RetrySession):
            session.end_step()


class RetrySession(Session):
    """Watches a script until it has made the step of ``captured``.

    ``failure`` is the summary of the failure then; ``loss`` and ``grad_norm`` are those of a step without one, which is
    ``unusual`` (in words) if an event was captured and it still shows it, ``not_mended`` if it is finite and
    something else is wrong. ``refusal`` says why the step could not be
    made, ``why`` the last step of the script's own could not stand for it. ``other_shape`` names the
    first input that has another shape in the script, ``notes`` what else is not as the code has it.
    """

    recorder_type, failures_type = _HandingRecorder, _Failures

    def __init__(self, captured: Snapshot, folder: Path, *, verbose: bool) -> None:
        super().__init__(
            name="retry", directory=folder, quiet=True, verbose=verbose, history=_NO_COPIES, watch="every-step",
            on=("nonfinite", "exception", "skipped"), budget=None, cause=False,
        )  # fmt: skip
        self.refusal: NotMatched | None = None
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.is_over = False
        self.not_mended = self.unusual = self.why = self.other_shape = ""
        self.notes: list[str] = []
        self._captured, self._before = captured, _state_of(captured)
        self._prepared: set[str | None] = set()
        self._slots: list[Slot] = []
        self._reached: set[int] = set()  # orders of slots that the loop has come to again
        self._next = self._num_own = self._waits_until = 0
        self._lacks_generators, self._was_first = True, False
        self._modules: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, list[OptimizerGroup]]] = []
        self._weights: list[torch.Tensor] = []
        self._loop.matter, self._loop.last_step = False, -1

    @property
    def failure(self) -> dict[str, Any] | None:
        return self.results[0] if self.results else None

    @property
    def led_to(self) -> str:
        """What an experiment has shown to have led to the failure."""
        cause = self._captured.cause
        return cause.text if cause is not None and cause.kind in ("setting", "state") else ""

    @property
    def has_begun(self) -> bool:
        """True if the script's own steps are over."""
        return self._next > 0

    def is_same(self) -> bool:
        """True if the step fails as it did when it was captured."""
        now, before = load(self.snapshots[0]).failure, self._captured.failure
        return (now.kind, now.call, now.phase) == (before.kind, before.call, before.phase)

    def refuse(self, message: str, hint: str | None = None) -> None:
        """End the script: the captured step cannot be made with it."""
        self.refusal = NotMatched(message, hint=hint)
        self._stop()

    def switch_off(self, error: BaseException) -> None:
        """After an error of reprokit's own the script would run to its end."""
        pass_on(error)
        self.refuse(f"an error of reprokit's own ({type(error).__name__}: {error})")

    def _stop(self) -> None:
        self.is_over = True
        self.leave()
        raise CaptureStop(self)

    # -- the loop's own steps ------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """A step is over: the captured one, else one of the loop's own."""
        loop = self._loop
        if self.has_begun:
            self._finish()
        self._num_own += 1
        is_other = not (self._reached and self._was_first)  # the next step may be that of another model
        if self._slots and is_other and self._num_own < self._waits_until:
            return
        if self._slots:  # what is not read again was read when the training began, or a part of the data
            unseen = [slot for slot in self._slots if slot.order not in self._reached] or self._slots
            self._prepared.update(line_of(one.call) for slot in unseen for one in (slot.own, slot.captured))
            self._slots, self._reached = [], set()
        if self._num_own > _MOST_STEPS:
            why = self.why or "it does not read these inputs again"
            self.refuse(f"none of {_MOST_STEPS} steps of the script is like the captured one: {why}")
        try:
            with self._recorded() as (player, ops):
                self._own_numbers = _numbers_of(player.program)
                own = self._own_inputs(player)
                self.why = own if isinstance(own, str) else self._pair_state()
                if not self.why and not isinstance(own, str):
                    self._slots = list(self._places(player, ops, own))
        except NotKept as reason:
            self.why = f"the script's own step cannot be played: {reason}"
        loop.copy_state(time.perf_counter())
        living = loop.tape.alive()  # what data were made of does not matter any more
        has_graph = [any(n not in living or living[n].requires_grad for n in op.outs) for op in loop.tape.carried]
        loop.tape.carried = list(itertools.compress(loop.tape.carried, has_graph))
        recorder: Any = self._recorder
        recorder.hand, recorder.begin_root = (self._hand if self._slots else None), self._begin_root
        self._waits_until, self._was_first = self._num_own + _MOST_WAITED, self._num_own == 1

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[tuple[TracedPlayer, list[Op]]]:
        """The step that is over as a program, and its calls. Raises `NotKept`."""
        describing = Describing(self._loop, Verdict("", sys._getframe(3)), [])
        with self.replaying(ends=False), describing.kept():
            segments = describing.segments()
            if not segments:
                raise NotKept("it was not kept")
            with describing.begun(segments, len(segments) - 1) as case:
                case.explain, case.mark.micro_step = lambda *_: Failure(Phase.FORWARD, HEALTHY), 0
                yield describing.replayed(case), case.ops

    def _own_inputs(self, player: TracedPlayer) -> list[tuple[Given, Given]] | str:
        """The inputs of the captured step with those of the script's own that stand for them; why there are none.

        A line that is not edited, and computes with another number than in the captured step, depends on the step.
        """
        captured = self._captured
        while True:
            wanted = given_to(captured.program, captured.tensors, self._prepared)
            own = given_to(player.program, player.tensors, self._prepared)
            kept = {line_of(one.call) for one in own} - {None}  # lines that still read an input
            for before, now in zip(wanted, own, strict=False):
                is_moved = line_of(before.call) != line_of(now.call) and line_of(before.call) in kept
                if is_moved or (before.tensor.dtype, before.tensor.dim()) != (now.tensor.dtype, now.tensor.dim()):
                    return f"the captured step reads {before.words}, where the script reads {now.words}"
            if not wanted or len(own) < len(wanted):
                return f"the captured step reads {wanted[len(own)].words if wanted else 'nothing'}; the script does not"
            pairs = list(zip(wanted, own, strict=False))
            lines = [(line_of(a.call), _constants(a.call), _constants(b.call), line_of(b.call)) for a, b in pairs]
            moved = {line for line, before, now, other in lines if line == other and before != now} - {None}
            if moved <= self._prepared:
                return pairs
            self._prepared |= moved

    def _places(self, player: TracedPlayer, ops: list[Op], pairs: list[tuple[Given, Given]]) -> Iterator[Slot]:
        waiting = {own.value: (own, captured) for captured, own in pairs}
        for order, op in enumerate(ops):
            name = name_of(op) if op.kind is Function else ""
            if name and hands_on(name):
                continue
            for position, number in enumerate(op.ins):
                tensor = player.env.get(number)
                value = player.tracer.value_of(tensor) if tensor is not None else None
                if value in waiting:
                    where = op.code, op.instruction, op.mode.grad
                    yield Slot(order, name, *where, len(op.ins), position, *waiting.pop(value))

    def _pair_state(self) -> str:
        """Pair the captured models and optimizers with the script's own; what does not fit, else an empty string."""
        world, frame, before = self._loop.world, sys._getframe(2), self._before
        modules = [unwrapped(module) for module in world.modules if [*module.parameters(), *module.buffers()]]
        names, self._modules, self._optimizers = names_of(modules, frame), [], []
        for name, state in before.modules.items():
            fitting = [one for one in modules if names[id(one)] == name or not name or len(before.modules) == 1]
            differences = [_difference(state, one) for one in fitting] or [f"has no counterpart `{name}`"]
            if all(differences):
                return f"the model of the script {differences[0]}"
            self._modules.append((fitting[differences.index("")], state))
        names = names_of(world.optimizers, frame)
        for optimizer in world.optimizers:
            name = "" if "" in before.optimizers else names[id(optimizer)]
            groups = before.optimizers.get(name)
            if groups is not None:
                sizes = [len(group["params"]) for group in optimizer.param_groups]
                if sizes != [len(group.state) for group in groups]:
                    return f"`{names[id(optimizer)]}` has other groups of parameters than the captured optimizer"
                self._optimizers.append((optimizer, groups))
        return ""

    # -- the captured step ---------------------------------------------------------------------------------------

    def _hand(self, frame: FrameType, name: str, given: Any) -> None:
        """A call of the loop is about to be made: give it the captured inputs if it is the next that reads one."""
        user = first_user_frame(frame)
        where = name, user.f_code, user.f_lasti, torch.is_grad_enabled()
        here = [one for one in self._slots[self._next :] if where == (one.name, one.code, one.instruction, one.grad)]
        tensors = list(iter_tensors(given)) if here else []
        here = [one for one in here if one.num_tensors == len(tensors)]
        self._reached.update(one.order for one in here)
        if here and here[0] is self._slots[self._next]:
            if not self._next:
                self._begin()
            for slot in [one for one in here if one.order == here[0].order]:
                self._give(tensors[slot.position], slot)
                self._next += 1

    def _begin_root(self) -> None:
        """A module is about to be called: the generators are kept as they were before the first one of the step."""
        if self.has_begun and self._lacks_generators:
            self._lacks_generators = False
            self._set_generators()

    def _give(self, tensor: torch.Tensor, slot: Slot) -> None:
        value = slot.captured.tensor
        if (tensor.dtype, tensor.dim()) != (value.dtype, value.dim()):
            self.refuse(f"what the script reads changes from step to step: {slot.own.words}")
        if tensor.shape != value.shape and not self.other_shape:
            self.other_shape = f"{slot.own.words}: the captured shape is {tuple(value.shape)}"
        tensor.data = value.to(tensor.device)  # its memory, of a file or the data set, is not written into
        self._loop.tape.values.pop(id(tensor), None)  # a replay is not to make it again

    def _begin(self) -> None:
        """Put the state into what it was before the captured step."""
        loop = self._loop
        with torch.no_grad():
            for module, state in self._modules:
                live = module.state_dict()
                for key, value in state.items():
                    live[key].copy_(value)
            for optimizer, groups in self._optimizers:
                self._put_back(optimizer, groups)
        self._weights = [parameter.detach().clone() for parameter in loop.world.parameters]
        self._set_generators()
        loop.tape.forget()
        loop.world.interrupt()  # what was before is no part of the step
        loop.copy_state(time.perf_counter())
        loop.matter = True

    def _put_back(self, optimizer: torch.optim.Optimizer, groups: list[OptimizerGroup]) -> None:
        """The state of an optimizer as it was; its options are the script's, but for a learning rate that moved."""
        rates = {row.step: row.lr for row in failing_series(self._captured.timeline) if row.lr is not None}
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for parameter, state in zip(group["params"], before.state, strict=True):
                own = optimizer.state.get(parameter, {})
                placed = {key: _placed(value, own.get(key), parameter) for key, value in state.items()}
                optimizer.state[parameter] = placed if set(own) == set(state) else {}  # of another optimizer
            now, rate = number_of(group["lr"]), rates.get(self._captured.step)
            is_scheduled = len(set(rates.values())) > 1 and rates.get(self._num_own, now) == now
            if is_scheduled and rate not in (None, now):
                group["lr"] = rate
                self.notes.append(f"the learning rate is {number_words(rate or 0.0)}, as a schedule had set it")

    def _set_generators(self) -> None:
        rng, numpy = self._captured.rng, sys.modules.get("numpy")
        states: dict[str, Any] = {"python": random.getstate()}
        if rng.python is not None:
            states["python"] = rng.python.version, rng.python.words, rng.python.gauss
        if rng.numpy is not None and numpy is not None:
            name, words, *rest = (getattr(rng.numpy, field.name) for field in fields(rng.numpy))
            states["numpy"] = name, numpy.array(words, dtype="uint32"), *rest
        set_python_generators(states)
        if rng.torch is not None:
            torch.set_rng_state(rng.torch)
        for device, state in enumerate(rng.cuda or ()):
            if torch.cuda.is_initialized() and device < torch.cuda.device_count():  # type: ignore[no-untyped-call]
                torch.cuda.set_rng_state(state, device)

    def _finish(self) -> None:
        """The step is over and nothing in it was bad."""
        if self._next < len(self._slots):
            self.refuse(f"the step has ended before the script has read {self._slots[self._next].own.words} again")
        failure, row, parameters = self._captured.failure, self._loop.timeline.last({}), self._loop.world.parameters
        program = self._program()
        if program is None:
            self.notes.append("it could not be looked at whether the step comes to the line that failed")
        elif failure.site is not None and self._leaves_out(failure.site, program):
            what = f"the step does not come to {failure.site.place} ({failure.site.code.strip()}), which failed"
            why = "its number, or something else of the script's own, decides about that"
            self.refuse(f"{what}, or to an edited line: {why}")
        if program is not None and (other := self._other_number(program)):
            self.refuse(f"{other}: what decides about that lies before the step")
        self.loss, self.grad_norm = row.loss, row.grad_norm
        world, high = self._loop.world, usual_limits(_losses(self._captured))[1]
        if world.newly_bad() is not None or (bad := world.newly_bad_buffers()):
            self.not_mended = "a parameter" if world.newly_bad() is not None else f"`{bad[0][0]}`"
            self.not_mended += " is nan or infinite after it"
        elif failure.event is None and self.loss is not None and self.loss > _ABSURD * high:
            usual = f"of usual steps it was at most {number_words(high)}"
            self.not_mended = f"its loss is {number_words(self.loss)}, and {usual}"
        if self.grad_norm is None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self.grad_norm = math.hypot(*(float(torch.linalg.vector_norm(one.float())) for one in gradients))
        if (event := failure.event) is not None:
            update = update_of(self._weights, [parameter.detach() for parameter in parameters])
            value = (self.loss, self.grad_norm, update)[_MEASURED.index(event.quantity)]
            if value is not None and value >= event.threshold:
                usual = f"unusual from {number_words(event.threshold)} on"
                self.unusual = f"{event.quantity} {number_words(value)}, {usual}"
        self._stop()

    def _program(self) -> Program | None:
        """The step as a program, ``None`` if it cannot be recorded."""
        with ignored_errors(), self._recorded() as (player, _):
            return player.program
        return None

    def _leaves_out(self, site: Site, program: Program) -> bool:
        """True if the line that failed has made no call in this step, and is still there or no other line is new."""
        line, sites = site.code.strip(), [call.site for call in program.calls if call.site is not None]
        files = {Path(folder, one.file) for one in sites for folder in (os.getcwd(), sys.path[0])}
        texts = [file.read_text().splitlines() for file in files if file.is_file()]
        is_there = any(line in map(str.strip, text) for text in texts)
        before = {call.site.code.strip() for call in self._captured.program.calls if call.site is not None}
        is_update = self._captured.failure.phase == Phase.OPTIMIZER
        calls = program.calls if is_update else _before_backward(program)
        made = {call.site.code.strip() for call in calls if call.site is not None}
        return line not in {one.code.strip() for one in sites} and (is_there or made <= before)

    def _other_number(self, program: Program) -> str:
        """A flag, or a number that is another one in each step, in a line that is not edited and without which the
        captured step does not fail; empty if there is none. Of any other number that is said."""
        captured = self._captured
        before, now = _numbers_of(captured.program), _numbers_of(program)
        lines = [line for line in before if line in now and before[line] != now[line]]
        lines = [line for line in lines if len(before[line]) == len(now[line])]
        for is_told in (False, True):
            others: dict[Line, list[Plain]] = {}
            for line in lines:
                own = self._own_numbers.get(line, [])
                trio = zip(before[line], now[line], own if len(own) == len(now[line]) else now[line], strict=True)
                has_mode = any(word in line[1] for word in _OF_MODE)
                others[line] = [
                    new if is_told or new != mine or (has_mode and isinstance(new, bool)) else old
                    for old, new, mine in trio
                ]
            changed = [line for line in lines if others[line] != before[line]]
            edited = replace(captured.program, calls=tuple(_with_numbers(captured.program, others)))
            if changed and not _fails(edited, captured):
                code, name, _ = changed[0]
                both = zip(before[changed[0]], others[changed[0]], strict=True)
                old, new = next((old, new) for old, new in both if old != new)
                words = f"has {old} in `{name}` ({code.strip()}), the script has {new}"
                if not is_told:
                    return f"the captured step {words}"
                self.notes.append(f"it is finite because of a number: the captured step {words}")
        return ""


Plain = float | bool
Line = tuple[str, str, str]  # its code, the call there, and the module


def _fails(program: Program, captured: Snapshot) -> bool:
    """True if the captured step still fails with these calls."""
    if captured.failure.event is not None:
        return observed(program, captured.tensors, captured.failure)[0] is not None
    return locate(program, captured.tensors) is not None


def _line_of_numbers(call: Call) -> Line:
    return call.site.code if call.site is not None else "", call.name, call.scope[-1].path if call.scope else ""


def _numbers_of(program: Program) -> dict[Line, list[Plain]]:
    """Flags and fractional numbers that the calls of the forward pass are given."""
    found: dict[Line, list[Plain]] = {}
    for call in _before_backward(program):
        leaves: list[Any] = []
        map_leaves((call.args, dict(call.kwargs)), leaves.append)
        found.setdefault(_line_of_numbers(call), []).extend(leaf for leaf in leaves if isinstance(leaf, (bool, float)))
    return found


def _with_numbers(program: Program, others: Mapping[Line, Sequence[Plain]]) -> Iterator[Call]:
    """The calls of a program with other numbers on some lines."""
    numbers, num_before = {line: iter(values) for line, values in others.items()}, len(_before_backward(program))
    for index, call in enumerate(program.calls):
        own = numbers.get(_line_of_numbers(call)) if index < num_before else None
        if own is not None:
            args, kwargs = map_leaves(
                (call.args, dict(call.kwargs)),
                lambda leaf, own=own: next(own) if isinstance(leaf, (bool, float)) else leaf,  # type: ignore[misc]
            )
            call = replace(call, args=args, kwargs=kwargs)
        yield call


def _losses(captured: Snapshot) -> list[tuple[int, float]]:
    rows = failing_series(captured.timeline)
    return [(row.step, row.loss) for row in rows if row.loss is not None and row.step < captured.step]


def _before_backward(program: Program) -> list[Call]:
    last = max((n for n, call in enumerate(program.calls) if call.is_differentiation), default=len(program.calls))
    return list(program.calls[:last])


def _state_of(captured: Snapshot) -> StateBefore:
    """The state from before the step, of the models that it calls; raises `NotMatched` if it is not all there."""
    before, event = captured.before, captured.failure.event
    if event is not None and event.quantity not in _MEASURED:
        raise NotMatched(f"one step does not show that the {event.quantity} of a layer is unusual")
    if before is None or before.left_out or not before.modules:
        why = f": {before.left_out[0]}" if before is not None and before.left_out else ""
        hint = "capture the failure again with this version of reprokit"
        raise NotMatched(f"the file does not hold the state from before the step{why}", hint=hint)
    used = {call.scope[0].root for call in captured.program.calls if call.scope}
    return replace(before, modules={name: s for name, s in before.modules.items() if name in used} or before.modules)


def _difference(state: Mapping[str, torch.Tensor], module: torch.nn.Module) -> str:
    """The first parameter or buffer that a module has not, or has in another shape; empty if there is none."""
    live = module.state_dict()
    for key in dict.fromkeys((*state, *live)):
        if key not in live or key not in state:
            return f"has no `{key}`" if key in state else f"has `{key}`, which the captured state has not"
        if live[key].shape != state[key].shape:
            return f"has `{key}` of {tuple(live[key].shape)}, and the captured state of {tuple(state[key].shape)}"
    return ""


def _constants(call: Call) -> Any:
    """The arguments of a call but for tensors."""
    return map_leaves((call.args, dict(call.kwargs)), lambda leaf: None if isinstance(leaf, Ref) else leaf)


def _placed(value: Any, own: Any, parameter: torch.Tensor) -> Any:
    """A value of an optimizer's state, on the device that the script has it on."""
    if not isinstance(value, torch.Tensor):
        return value
    device = own.device if isinstance(own, torch.Tensor) else parameter.device if value.dim() else value.device
    return value.to(device, copy=True)
