"""The recorder: is asked for what the loop itself calls, and writes it on the tape.

Inside a root module it is not present: its mode is off the stack and nothing runs. What it cannot note (random
outcomes, values from NumPy) is used later by its value. Every kind of call goes the same way: ask whether the loop
itself calls, number what it is given, perform it, note it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit import torch_private
from reprokit.capture.callers import KINDS, caller_of
from reprokit.capture.calls import Backward, BackwardNote, Function, FunctionNote, Root, Transform
from reprokit.capture.mode import StackedMode
from reprokit.capture.roots import RootCalls, generator_states
from reprokit.capture.structure import ATOMS, TENSORS, is_leaf, iter_tensors, repeatable, tensors_in, with_own_index
from reprokit.capture.tape import Known, Number, Op, Tape
from reprokit.capture.tensor_names import note_unfollowed
from reprokit.capture.traits import FACTS, OPERATORS, UNKNOWN, Traits, facts_of
from reprokit.errors import ignored_errors
from reprokit.program import functions
from reprokit.program.ir import Mode
from reprokit.program.sites import find_frames
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

Begun = tuple[Any, ...]  # kind, target, numbered arguments, code, instruction, mode and note of a call that is running


class Recorder(StackedMode):
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
        self._returns = True
        self.roots.install()
        self.enter_stack()

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; the mode stays on the stack if it is there, else away from it."""
        self.enabled = self._returns = False
        self.roots.uninstall()

    # -- functions the loop calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Perform a torch function of the loop and note it.

        Written out for a call of the usual kind, which changes nothing and makes one tensor of tensors: every call of
        the loop comes through here.
        """
        facts = FACTS.get(func) or self._facts(func)
        if facts.is_silent:
            result = func(*args, **(kwargs or {}))
            if facts.is_read and result.__class__ is float and not math.isfinite(result):
                self.has_read_bad = True
            return result
        if (
            not facts.is_plain
            or self.depth
            or not self.enabled
            or get_ident() != self.thread
            or _peek_transforms() is not None
            or _tracing_state() is not None
        ):
            return self._perform_unusual(facts, func, args, dict(kwargs or {}))
        user: FrameType | None = None
        walker: FrameType | None = sys._getframe(1)
        while walker is not None:
            kind = KINDS.get(id(walker.f_code))
            if kind == "loop" or kind == "top":
                user = user or walker
                break
            if kind == "user":
                user = user or walker
            elif kind != "other":
                user = None
                break
            walker = walker.f_back
        if user is None or walker is None or facts.may_write or self.is_hand_updated:
            return self._perform(facts, func, args, dict(kwargs or {}), sys._getframe(1))
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            self.note_failure(error, facts, args, kwargs or {}, user)
            raise
        try:
            tape = self.tape
            values, first, held = tape.values, tape.first, tape.held
            given: list[Any] = []
            is_usual, num_tensors = not kwargs or ATOMS.issuperset(map(type, kwargs.values())), 0
            is_usual = is_usual and out.__class__ in TENSORS
            for value in args if is_usual else _NOTHING:
                kind_of_value = value.__class__
                if kind_of_value in TENSORS:
                    num_tensors += 1
                    known = values.get(id(value))
                    if known is None or known() is not value:
                        given.append(tape.add_input(value))
                    elif (number := known.number) >= first or number in held:
                        given.append(number)
                    else:
                        given.append(tape.hold(number, value))  # type: ignore[arg-type]
                elif kind_of_value in _SINGLE or (kind_of_value is tuple and _SINGLE.issuperset(map(type, value))):
                    given.append(value)
                else:
                    is_usual = False
                    break
            if not is_usual or not num_tensors:
                self._note_unusual(facts, args, dict(kwargs or {}), (user.f_code, user.f_lasti), None, out)
                return out
            known = values.get(id(out))
            if known is None or known() is not out:
                tape.count = count = tape.count + 1
                known = values[id(out)] = Known(out)
                known.number = Number(count)
            mode = current_mode() if _is_any_autocast_enabled() or not is_grad_enabled() else _PLAIN_MODE
            code, place = user.f_code, user.f_lasti
            tape.log += (Function, facts.function, tuple(given), kwargs, known.number, code, place, mode, None)
            if out.requires_grad and not out.dim():
                tape.scalars.append((out, code, place))
            if len(tape.log) > tape.sweep_at or tape.num_bytes > tape.sweep_bytes:
                tape.sweep()
        except BaseException as error:
            self.switch_off(error)
        return out

    def _facts(self, func: Callable[..., Any]) -> Traits:
        try:
            return facts_of(func)
        except BaseException as error:
            self.switch_off(error)
            return UNKNOWN

    def _note_unusual(
        self,
        facts: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: tuple[Any, int],
        note: FunctionNote | None,
        out: Any,
    ) -> None:
        """Note a call that changes nothing, if a replay can make again what it has made."""
        outputs = tensors_in(out)
        has_tensors = not TENSORS.isdisjoint(map(type, args)) or next(iter_tensors((args, kwargs)), None) is not None
        if not outputs or not _can_repeat(facts, note, outputs, has_tensors=has_tensors):
            if isinstance(facts.function, OPERATORS):
                note_unfollowed(outputs)
            return
        if facts.is_indexing:
            args = with_own_index(args)
        given, named = self.encode(args, kwargs)
        self.finish((Function, facts.function, given, named, *where, current_mode(), note), out)

    def note_failure(
        self,
        error: BaseException,
        facts: Traits,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType,
        note: FunctionNote | None = None,
    ) -> None:
        """An exception came out of the call of a function."""
        try:
            user, _, _ = caller_of(frame)
            if user is not None:
                given, named = self.encode(args, dict(kwargs))
                where = (user.f_code, user.f_lasti)
                self.fail(error, (Function, facts.function, given, named, *where, current_mode(), note))
        except BaseException as own:
            self.switch_off(own)

    def _perform_unusual(
        self, facts: Traits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Perform a function that is not plain, or that the loop itself does not call; note it if need be."""
        if self.depth:
            return func(*args, **kwargs)
        if _peek_transforms() is not None:
            self.has_transform = True
            return func(*args, **kwargs)
        if not self.enabled or get_ident() != self.thread or _tracing_state() is not None:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__ and args[0].dim() > 0:
            return iter(self.__torch_function__(torch.Tensor.unbind, (), (args[0], 0)))
        if facts.is_differentiation:
            return self.differentiate(facts.function, args, kwargs, sys._getframe(2))
        return self._perform(facts, func, args, kwargs, sys._getframe(2))

    def _perform(
        self, facts: Traits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Perform a call that needs more than the usual: one that may write, draws random numbers, or comes from
        elsewhere than the loop's own lines."""
        try:
            begun = self._prepare(facts, args, kwargs, frame)
        except BaseException as error:
            self.switch_off(error)
            begun = None
        if begun is None:
            return func(*args, **kwargs)
        where, note, written = begun
        try:
            out = func(*args, **kwargs)
        except BaseException as error:
            self.note_failure(error, facts, args, kwargs, frame, note)
            raise
        try:
            if note is not None and note.is_write:
                self._note_write(facts, written, note, where, out)
            else:
                self._note_unusual(facts, args, kwargs, where, note, out)
        except BaseException as error:
            self.switch_off(error)
        return out

    def _prepare(
        self, facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, int], FunctionNote | None, Any] | None:
        """Where a call is made, what else is known of it, and what it writes; ``None`` if it need not be noted."""
        user, root, has_library = caller_of(frame)
        if root is not None:
            self.roots.meet_class(type(root.f_locals["self"]))
        if user is None:  # what a custom autograd function returns is used by value
            return None
        note = FunctionNote(library=find_frames(frame)[1]) if has_library else None
        where = (user.f_code, user.f_lasti)
        name = facts.name
        if name in functions.GRAD_WRITES:
            given, named = self.encode(args, kwargs)
            self.loop.before_gradient_write()
            return where, _as(note, is_write=True), (args[0], given, named, False)
        if facts.may_write:
            written = _written_by(facts, args, kwargs)
            if written is not None:
                return self._prepare_write(facts, args, kwargs, written, where, note)
        if self.is_hand_updated and _begins_forward(name, args, kwargs):
            self.loop.finish_hand_update()
        if facts.is_random:
            tensors = tensors_in((args, kwargs))
            if any(tensor.requires_grad for tensor in tensors):
                note = _as(note, rng=generator_states(tensors))
        return where, note, None

    # -- writes --------------------------------------------------------------------------------------------------

    def _prepare_write(
        self,
        facts: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Any,
        where: tuple[Any, int],
        note: FunctionNote | None,
    ) -> tuple[tuple[Any, int], FunctionNote | None, Any] | None:
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
        if not owners and (is_leaf(written) or self.loop.is_differentiated(written)):
            if self.loop.has_differentiated:
                world.train(written)
                owners = [written]
            elif all(item is written or self.tape.known(item) is None for item in iter_tensors((args, kwargs))):
                return None  # being made, for example a parameter of a module that no root holds yet
        if owners:
            given, named = self.encode(args, kwargs)
            if facts.writes_data and not _is_alike(args[0], args[1]):
                self.loop.before_conversion()
            self.loop.before_state_write(owners, (args, kwargs))
            note = _as(note, is_write=True, writes_state=True)
            return where, note, (written, given, named, facts.writes_data)
        has_graph = is_leaf(written) or (
            torch.is_grad_enabled() and any(t.requires_grad for t in iter_tensors((args, kwargs)))
        )
        if written.layout is torch.strided and not self.tape.before_write(written, has_graph=has_graph):
            return None
        given, named = self.encode(args, kwargs)
        return where, _as(note, is_write=True), (written, given, named, False)

    def _note_write(self, facts: Traits, written: Any, note: FunctionNote, where: tuple[Any, int], out: Any) -> None:
        target, given, named, is_data = written
        if note.rng is None and facts.is_random and isinstance(target, torch.Tensor):
            note.outcome = target.detach().clone()
        outs: Any = ()
        if is_data:
            self.loop.world.moved(target)
        if not note.writes_state and isinstance(target, torch.Tensor) and facts.name not in functions.GRAD_WRITES:
            outs = self.tape.written(target)
            if out is not target and isinstance(out, torch.Tensor):
                outs = (self.tape.result(out),)
        elif isinstance(out, torch.Tensor) and out is not target:
            outs = self.tape.results(out)
        self.tape.add(Function, facts.function, given, named, outs, where, current_mode(), note)

    # -- backward passes -----------------------------------------------------------------------------------------

    def differentiate(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """A backward call of the loop: it is checked before it runs, and noted after."""
        call: Begun | None = None
        popped = self.step_aside()
        try:
            try:
                begun = self._begin_backward(function, args, kwargs, frame)
            except BaseException as error:
                self.switch_off(error)
                begun = None
            if begun is not None:
                args, kwargs, call = begun
                self.is_claimed = True
                self.loop.before_backward(call, args, kwargs)
                try:
                    output = function(*args, **kwargs)
                except BaseException as error:
                    self.fail(error, call)
                    raise
                if self.enabled:
                    try:
                        self.finish(call, output)
                        self.loop.after_backward(call, output)
                    except BaseException as error:
                        self.switch_off(error)
                return output
        finally:
            self.step_back(popped)
        return function(*args, **kwargs)

    def _begin_backward(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any], Begun] | None:
        user, root, _ = caller_of(frame)
        if root is not None:
            self.roots.meet_class(type(root.f_locals["self"]))
        if user is None:
            return None
        if self.is_hand_updated:
            self.loop.finish_hand_update()
        if len(args) != 1 or args[0].__class__ not in TENSORS or not ATOMS.issuperset(map(type, kwargs.values())):
            args, kwargs = repeatable(args, kwargs)
        given, named = self.encode(args, kwargs)
        where = (user.f_code, user.f_lasti)
        return args, kwargs, (Backward, function, given, named, *where, current_mode(), BackwardNote())

    def begin_forward(self) -> None:
        """Called before an operation that builds a graph; after a manual update it begins a new step."""
        if self.is_hand_updated:
            self.loop.finish_hand_update()

    # -- every kind of call --------------------------------------------------------------------------------------

    def whole(
        self,
        begin: Callable[..., Begun | None],
        known: tuple[Any, ...],
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        note: Callable[[], Any] | None = None,
    ) -> Any:
        """Perform a call of the loop that is noted as one, with the mode out of the way.

        ``begin``, called with what is ``known``, tells what it is. ``note`` makes its note when it is over.
        """
        popped = self.step_aside()
        try:
            try:
                begun = begin(*known)
            except BaseException as error:
                self.switch_off(error)
                begun = None
            try:
                output = target(*args, **kwargs)
            except BaseException as error:
                if begun is not None:
                    self.fail(error, begun)
                raise
            if begun is not None and self.enabled:
                try:
                    self.finish(begun if note is None else (*begun[:-1], note()), output)
                except BaseException as error:
                    self.switch_off(error)
            return output
        finally:
            self.step_back(popped)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
        """Arguments with numbers in the place of tensors."""
        tape, given = self.tape, []
        for value in args:
            kind = value.__class__
            if kind in TENSORS:
                given.append(tape.number(value))
            else:
                given.append(value if kind in ATOMS else tape.encode(value))
        if kwargs and not ATOMS.issuperset(map(type, kwargs.values())):
            return tuple(given), tape.encode(kwargs)
        return tuple(given), kwargs or None

    def finish(self, begun: Begun, out: Any) -> None:
        """A call is over: note it with its results."""
        kind, target, given, named, code, instruction, mode, note = begun
        tape = self.tape
        if out is None:
            outs: Any = ()
        elif out.__class__ is _Tensor:
            known = tape.values.get(id(out))
            outs = known.number if known is not None and known() is out else tape.new_number(out)
            if kind is Transform:
                tape.held[outs] = out
            if out.requires_grad and not out.dim():
                tape.scalars.append((out, code, instruction))
        else:
            tensors = tensors_in(out)
            outs = tuple(map(tape.result, tensors))
            if kind is Transform:  # perhaps gradients, which are looked at where the loop says that its step is over
                tape.held.update(zip(outs, tensors, strict=True))
            elif kind is Root:
                tape.scalars.extend((t, code, instruction) for t in tensors if t.requires_grad and not t.dim())
        tape.log += (kind, target, given, named, outs, code, instruction, mode, note)
        if len(tape.log) > tape.sweep_at or tape.num_bytes > tape.sweep_bytes:
            tape.sweep()

    def fail(self, error: BaseException, begun: Begun) -> None:
        """An exception came out of a call that is running."""
        with ignored_errors():
            kind, target, given, named, code, instruction, mode, note = begun
            op = Op(kind, target, given, named or {}, (), code, instruction, mode, note)
            self.raised = (error, op)
            if _may_have_written(op):
                self.gaps.append(op)

    def forget_gradients(self) -> None:
        """All gradients are gone, and with them those of interrupted backward calls."""
        self.gaps = [gap for gap in self.gaps if gap is None or gap.kind is not Backward]


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
    if not torch.is_grad_enabled() or name.endswith(("__get__", "__set__")) or functions.is_in_place(name):
        return False
    return any(tensor.requires_grad for tensor in iter_tensors((args, kwargs)))


def _can_repeat(facts: Traits, note: FunctionNote | None, outputs: list[torch.Tensor], *, has_tensors: bool) -> bool:
    """True if replaying the function gives the same; otherwise its outcome is used by value."""
    if not facts.name:
        return any(tensor.requires_grad for tensor in outputs)
    if facts.is_random:
        return note is not None and note.rng is not None
    if has_tensors:
        return True
    is_trained = any(tensor.requires_grad for tensor in outputs)  # then it is an input, with a gradient of its own
    return functions.is_factory(facts.name) and not is_trained


def _may_have_written(op: Op) -> bool:
    if op.kind is Function:
        return op.note is not None and bool(op.note.is_write)
    if op.kind is Root:
        return bool(op.note.is_training) and any(True for _ in op.target.buffers())
    return op.kind is Backward and op.target is not torch.autograd.grad  # some gradients


def _is_alike(target: torch.Tensor, value: torch.Tensor) -> bool:
    return (target.dtype, target.shape, target.device) == (value.dtype, value.shape, value.device)


_Tensor = torch.Tensor
_SINGLE = ATOMS | {slice, type(...), torch.Size}
_PLAIN_MODE = Mode()
_NOTHING: tuple[Any, ...] = ()
is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch_private.is_any_autocast_enabled
_tracing_state = torch_private.tracing_state  # of `torch.jit.trace`, which would trace our work as well
_peek_transforms = torch_private.peek_transforms  # vmap and the like, inside which values are not ours
