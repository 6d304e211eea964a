"""The recorder: is asked for what the loop itself calls, and writes it on the tape.

Inside a root module it is not present: its mode is off the stack and nothing runs. What it cannot note (random
outcomes, values from NumPy) is used later by its value. Every kind of call goes the same way: ask whether the loop
itself calls, number what it is given, perform it, note it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit import members, native, torch_private
from reprokit.capture.callers import KINDS, caller_of
from reprokit.capture.calls import (
    Backward,
    BackwardNote,
    Clip,
    Function,
    FunctionNote,
    Root,
    Transform,
    Unscale,
    ZeroGrad,
)
from reprokit.capture.mode import StackedMode, is_tracing, unseen, without_functions
from reprokit.capture.root_call import LeftOut
from reprokit.capture.roots import RootCalls, generator_states
from reprokit.capture.stand_ins import OWN, STAND_INS, TORCH, StandIn, directly, has_frame, stand_in, with_callers
from reprokit.capture.structure import ATOMS, TENSORS, is_leaf, iter_tensors, repeatable, tensors_in, with_own_index
from reprokit.capture.tape import Number, Op, Tape
from reprokit.capture.tensor_names import note_unfollowed
from reprokit.capture.traits import FACTS, OPERATORS, UNKNOWN, Traits, facts_of
from reprokit.errors import drop_own_frames, has_arrived, ignored_errors
from reprokit.own_work import passed_over
from reprokit.program import functions
from reprokit.program.ir import Mode
from reprokit.program.sites import find_frames
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

Begun = tuple[Any, ...]  # kind, target, numbered arguments, code, instruction, mode and note of a call that is running


class Recorder(LeftOut, StackedMode):
    """Notes the loop's outermost calls on the ``tape``; ``roots`` notes those of modules.

    The ``loop`` is told of every event of the step. ``has_read_bad`` says whether the loop has read a number that is
    not finite, until somebody has taken notice of that. ``has_transform``: functions were called inside a transform
    such as `torch.func.grad`. ``raised`` is the last exception that came out of something the loop called in this step,
    with the call. ``gaps`` are calls that an exception has ended after they may have written something, ``None`` for
    work that is no call. ``is_hand_updated``: the loop has changed parameters itself.
    """

    def __init__(self, switch_off: Callable[[BaseException], None]) -> None:
        super().__init__(switch_off)
        self.tape = Tape()
        self.roots = RootCalls(self)
        self.loop: Loop
        self.has_read_bad = False
        self.has_transform = False
        self.is_hand_updated = False
        self.raised: tuple[BaseException, Op] | None = None
        self.gaps: list[Op | None] = []

    def install(self) -> None:
        """Meet root modules and go on top of torch's stack of function modes."""
        self.is_installed = True
        self.roots.install()
        if self._is_on:
            torch_private.push_mode(self)

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back and leave torch's stack."""
        self.enabled = self.is_installed = False
        try:
            self.roots.uninstall()
        finally:
            self.leave_when_over()

    # -- functions the loop calls --------------------------------------------------------------------------------

    @passed_over
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Perform a torch function of the loop and note it.

        Written out for a call of the usual kind, which changes nothing and makes one tensor of tensors: every call of
        the loop comes through here.
        """
        try:
            facts = FACTS.get(func)
            if facts is None:
                func = functions.called_function(func, sys._getframe(1))
                facts = FACTS.get(func) or self._facts(func)
            if facts.is_attribute:
                return func(*args)
            frame: Any = sys._getframe(1)
            walker, code = frame, frame.f_code
            if code is _HANDLE and frame.f_back.f_code is getattr(func, "__code__", None):
                frame = frame.f_back.f_back  # a function written in Python has asked the mode and is called again
                code = None if frame.f_code.co_filename.startswith(TORCH) else frame.f_code
            perform = STAND_INS.get((id(code), frame.f_lasti)) or stand_in(walker, func)
            if facts.is_silent:
                result = perform(func, args, kwargs)
                if facts.is_read and result.__class__ is float and not math.isfinite(result):
                    self.has_read_bad = True
                return result
            if self.depth or not self.enabled or get_ident() != self.thread:
                return perform(func, args, kwargs)
            if _peek_transforms() is not None:
                self.has_transform = True
                return perform(func, args, kwargs)
            user: FrameType | None = None
            while walker is not None and (kind := KINDS.get(id(walker.f_code))) in _PASSED:
                user = user or (walker if kind == "user" else None)
                walker = walker.f_back
            if facts.is_differentiation:
                perform = with_callers(frame, func)
                return self.differentiate(facts.function, args, dict(kwargs or {}), perform)
            if not facts.is_plain or self.is_hand_updated or walker is None or kind not in ("loop", "top"):
                return self._perform(facts, func, args, dict(kwargs or {}), perform)
            user = user or walker
            try:
                out = perform(func, args, kwargs)
            except BaseException as error:
                self.guard(self._note_failure, error, facts, args, dict(kwargs or {}), user)
                raise
            try:
                tape = self.tape
                if facts.is_indexing and args[1].__class__ not in ATOMS:
                    args = with_own_index(args)
                given = args[0] if args and args[0].__class__ is list else args
                is_usual = out.__class__ in TENSORS and not TENSORS.isdisjoint(map(type, given))
                if not is_usual or (kwargs and not ATOMS.issuperset(map(type, kwargs.values()))):
                    if _num_dispatch_modes() and is_tracing():  # by fake tensors, or those of `make_fx`
                        return out
                    with unseen():
                        self._note_plain(facts, args, dict(kwargs or {}), user, out)
                    return out
                given = tuple(tape.encode(args))
                number = tape.values.get(id(out))
                if number is None or number() is not out:
                    number = tape.values[id(out)] = Number(out)  # as `Tape.new_number`
                    number.step = tape.step
                mode = current_mode() if _is_any_autocast_enabled() or not is_grad_enabled() else _PLAIN_MODE
                code, place = user.f_code, user.f_lasti
                tape.log += (Function, facts.function, given, kwargs or None, number, code, place, mode, None)
                if out.requires_grad and not native.dim(out):
                    tape.scalars.append((number, code, place))
                    tape.recent.append(out)
                if len(tape.log) > tape.sweep_at or tape.num_bytes > tape.sweep_bytes:
                    tape.sweep()
            except BaseException as error:
                self.switch_off(error)
            return out
        except BaseException as error:
            drop_own_frames(error)
            raise

    def _facts(self, func: Callable[..., Any]) -> Traits:
        try:
            return facts_of(func)
        except BaseException as error:
            self.switch_off(error)
            return UNKNOWN

    def _begun(self, facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], user: FrameType) -> Begun:
        given, named = self.encode(with_own_index(args) if facts.is_indexing else args, kwargs)
        return Function, facts.function, given, named, user.f_code, user.f_lasti, current_mode(), None

    def _note_failure(self, error: BaseException, *call: Any) -> None:
        self.fail(error, self._begun(*call))

    def _note_plain(self, facts: Traits, args: Any, kwargs: dict[str, Any], user: FrameType, out: Any) -> None:
        if next(iter_tensors(out), None) is not None and next(iter_tensors((args, kwargs)), None) is not None:
            self.finish(self._begun(facts, args, kwargs, user), out)

    @passed_over
    def _perform(
        self, facts: Traits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], perform: StandIn
    ) -> Any:
        """Perform a call that needs more than the usual: one that may write, draws random numbers, or comes from
        elsewhere than the loop's own lines."""
        if func is torch.Tensor.__iter__ and native.dim(args[0]) > 0:
            return iter(self.__torch_function__(native.unbind, (), (args[0], 0)))

        def finish(begun: Begun, out: Any) -> None:
            self._finish_function(begun, out, facts, args, kwargs)

        return self.whole(self._begin_function, (facts, args, kwargs), func, args, kwargs, finish, perform=perform)

    def _begin_function(self, facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun | None:
        frame = sys._getframe(1)
        user, has_library = caller_of(frame, self.roots.meet_class)
        if user is None:  # what a custom autograd function returns is used by value
            return None
        note = FunctionNote(library=find_frames(frame)[1]) if has_library else None
        written = _written_by(facts, args, kwargs) if facts.may_write else None
        if facts.name in functions.GRAD_WRITES:
            self.loop.judge.correct()
            note = _as(note, is_write=True)
        elif written is not None:
            note = self._before_write(facts, args, kwargs, written, note)
            if note is None:
                return None
        else:
            if self.is_hand_updated and _begins_forward(facts.name, args, kwargs):
                self.loop.finish_hand_update()
            if facts.is_random:
                tensors = tensors_in((args, kwargs))
                if any(tensor.requires_grad for tensor in tensors):
                    note = _as(note, rng=generator_states(tensors))
        return *self._begun(facts, args, kwargs, user)[:-1], note

    def _before_write(
        self, facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], written: Any, note: FunctionNote | None
    ) -> FunctionNote | None:
        """Save what a call is about to overwrite, as far as a replay needs that; ``None`` if the write need not be
        noted."""
        world, owners = self.loop.world, []
        for item in written if isinstance(written, (list, tuple)) else [written]:
            owner = world.owner_of(item) if isinstance(item, torch.Tensor) else None
            if owner is not None:
                owners.append(owner)
                if world.untouched:
                    world.before_write(item)
        if not owners and not isinstance(written, torch.Tensor):
            return None
        if not owners and is_leaf(written):
            if self.loop.has_differentiated:
                world.train(written)
                owners = [written]
            elif all(item is written or self.tape.known(item) is None for item in iter_tensors((args, kwargs))):
                return None  # being made, for example a parameter of a module that no root holds yet
        if owners:
            if facts.writes_data and len({(item.dtype, item.shape, item.device) for item in args[:2]}) > 1:
                self.loop.before_conversion()
            self.loop.before_state_write(owners, (args, kwargs))
            return _as(note, is_write=True, writes_state=True)
        has_graph = is_leaf(written) or (
            native.is_grad_enabled() and any(t.requires_grad for t in iter_tensors((args, kwargs)))
        )
        if written.layout is torch.strided and not self.tape.before_write(written, has_graph=has_graph):
            return None
        return _as(note, is_write=True)

    def _finish_function(self, begun: Begun, out: Any, facts: Traits, args: Any, kwargs: Any) -> None:
        """A function was called: note it, if it has written or if a replay can make again what it has made."""
        note: FunctionNote | None = begun[-1]
        if note is not None and note.is_write:
            target, tape = _written_by(facts, args, kwargs) if facts.may_write else args[0], self.tape
            outs: tuple[Number, ...] = ()
            if note.rng is None and facts.is_random and isinstance(target, torch.Tensor):
                note.outcome = native.clone(native.detach(target))
            if note.writes_state and facts.writes_data:
                self.loop.world.moved(target)
            if not note.writes_state and isinstance(target, torch.Tensor) and facts.name not in functions.GRAD_WRITES:
                outs = (tape.new_number(target),)
            if isinstance(out, torch.Tensor) and out is not target:
                outs = (tape.result(out),)
            kind, function, given, named, code, instruction, mode, _ = begun
            tape.add(kind, function, given, named, outs, (code, instruction), mode, note)
            return
        outputs = tensors_in(out)
        if outputs and _can_repeat(facts, note, outputs, args, kwargs):
            self.finish(begun, out)
        elif isinstance(facts.function, OPERATORS):
            note_unfollowed(outputs)

    # -- backward passes -----------------------------------------------------------------------------------------

    @passed_over
    def differentiate(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        perform: StandIn | None = None,
    ) -> Any:
        """A backward call of the loop: it is checked before it runs, and noted after."""
        if len(args) != 1 or args[0].__class__ not in TENSORS or not ATOMS.issuperset(map(type, kwargs.values())):
            args, kwargs = self.guard(repeatable, args, kwargs) or (args, kwargs)
        known = function, args, kwargs
        finish = self.loop.after_backward
        return self.whole(self._begin_backward, known, function, args, kwargs, finish, perform=perform)

    def _begin_backward(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        user, _ = caller_of(sys._getframe(1), self.roots.meet_class)
        if user is None:
            return None
        if self.is_hand_updated:
            self.loop.finish_hand_update()
        given, named = self.encode(args, kwargs)
        where = (user.f_code, user.f_lasti)
        mode = current_mode() if _is_any_autocast_enabled() or not is_grad_enabled() else _PLAIN_MODE
        begun = Backward, function, given, named, *where, mode, BackwardNote()
        self.is_claimed = True
        self.loop.before_backward(begun, args, kwargs)
        return begun

    # -- every kind of call --------------------------------------------------------------------------------------

    @passed_over
    def whole(
        self,
        begin: Callable[..., Begun | None],
        known: tuple[Any, ...],
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Callable[[Begun, Any], None] | None = None,
        *,
        around: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
        perform: StandIn | None = None,
    ) -> Any:
        """Perform a call of the loop that is noted as one, with the mode out of the way.

        ``begin(*known)`` returns the data of the call, ``None`` if it is not to be noted; ``finish`` notes
        it when it is over. The call is made in the context ``around``, if there is one, by ``perform``: the stand-in
        for whoever calls.
        """
        if perform is None and has_frame(target):
            perform = directly
        if perform is None:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename.startswith(OWN):
                frame = frame.f_back
            perform = STAND_INS.get((id(frame.f_code), frame.f_lasti)) or stand_in(frame, target)
        if _num_dispatch_modes() and is_tracing():
            return perform(target, args, kwargs)
        # `unseen` is a Python call, `without_functions` is none: the calls of every step come here.
        own_work = unseen if _num_dispatch_modes() else without_functions
        popped = self.step_aside()
        try:
            try:
                with own_work():
                    begun = begin(*known)
            except BaseException as error:
                self.switch_off(error)
                begun = None
            try:
                if around is None:
                    output = perform(target, args, kwargs)
                else:
                    with around():
                        output = perform(target, args, kwargs)
            except BaseException as error:
                if begun is not None:
                    with unseen():
                        self.fail(error, begun)
                raise
            if begun is not None and self.enabled:
                try:
                    with own_work():
                        (finish or self.finish)(begun, output)
                except BaseException as error:
                    self.switch_off(error)
            return output
        finally:
            self.step_back(popped)

    def encode(self, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
        """Arguments with numbers in the place of tensors."""
        encode = self.tape.encode
        return tuple(encode(args)), dict(zip(kwargs, encode(kwargs.values()), strict=True)) if kwargs else None

    def finish(self, begun: Begun, out: Any) -> None:
        """A call is over: note it with its results."""
        kind, target, given, named, code, instruction, mode, note = begun
        tape = self.tape
        tensors = () if out is None else (out,) if out.__class__ is torch.Tensor else tensors_in(out)
        if kind is Transform:  # perhaps gradients, which are looked at where the loop says that its step is over
            tape.held.update(zip(map(tape.result, tensors), tensors, strict=True))
        outs = []
        for tensor in tensors:
            number = tape.values.get(id(tensor))
            if number is None or number() is not tensor:
                number = tape.new_number(tensor)
            outs.append(number)
            if kind is not Backward and tensor.requires_grad and not native.dim(tensor):
                tape.scalars.append((number, code, instruction))
                tape.recent.append(tensor)
        tape.log += (kind, target, given, named, tuple(outs), code, instruction, mode, note)
        if len(tape.log) > tape.sweep_at or tape.num_bytes > tape.sweep_bytes:
            tape.sweep()

    def fail(self, error: BaseException, begun: Begun) -> None:
        """An exception came out of a call that is running."""
        with ignored_errors():
            op = op_of(begun)
            self.raised = (error, op)
            if _may_have_written(op, error):
                self.gaps.append(op)


def op_of(begun: Begun) -> Op:
    """The call as it is before it has results."""
    kind, target, given, named, code, instruction, mode, note = begun
    return Op(kind, target, given, named or {}, (), code, instruction, mode, note)


def _as(note: FunctionNote | None, **fields: Any) -> FunctionNote:
    note = note or FunctionNote()
    for name, value in fields.items():
        setattr(note, name, value)
    return note


def _written_by(facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function writes into, ``None`` if it was not asked to write."""
    if facts.is_in_place:
        return args[0] if args else next(iter(kwargs.values()), None)
    return next((item for item in functions.all_written(facts.name, args, kwargs) if item is not None), None)


def _begins_forward(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function after a hand-made update is no more part of it: it builds a graph."""
    if not native.is_grad_enabled() or name.endswith(("__get__", "__set__")) or functions.is_in_place(name):
        return False
    return any(tensor.requires_grad for tensor in iter_tensors((args, kwargs)))


def _can_repeat(facts: Traits, note: FunctionNote | None, outputs: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """True if replaying the function gives the same; otherwise its outcome is used by value."""
    if not facts.name:
        return any(tensor.requires_grad for tensor in outputs)
    if facts.is_random:
        return note is not None and note.rng is not None
    if next(iter_tensors((args, kwargs)), None) is not None:
        return True
    is_trained = any(tensor.requires_grad for tensor in outputs)  # then it is an input, with a gradient of its own
    return functions.is_factory(facts.name) and not is_trained


def _may_have_written(op: Op, error: BaseException) -> bool:
    if op.kind is Function:
        return op.note is not None and bool(op.note.is_write)
    if op.kind is Root:
        return bool(op.note.is_training and members.buffers(op.target))
    if op.kind is Clip:  # torch raises before it clips
        return has_arrived(error)
    if op.kind is ZeroGrad or op.kind is Unscale:
        return True
    return op.kind is Backward and op.target is not torch.autograd.grad  # some gradients


_HANDLE = torch_private.handle_code
_PLAIN_MODE = Mode()
_PASSED = ("user", "other")  # kinds of frames that may be between a function and the loop
is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch_private.is_any_autocast_enabled
_num_dispatch_modes = torch_private.num_dispatch_modes
_peek_transforms = torch_private.peek_transforms  # vmap and the like, inside which values are not ours
