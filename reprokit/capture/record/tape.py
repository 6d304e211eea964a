"""The tape: notes the torch functions that the training loop itself calls, and its backward calls.

Inside a root module the tape is not present: its mode is off the stack and nothing runs. What it cannot note (random
outcomes, values from NumPy) is used later by its value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.current_step import Listener, RunningStep
from reprokit.capture.record.entry import (
    FACTS,
    OPERATORS,
    TENSORS,
    UNKNOWN,
    Entry,
    Facts,
    PlainEntry,
    facts_of,
    generator_states,
    own_and_stamped,
    stamps_of,
    versions_of,
)
from reprokit.capture.record.kinds import EntryKind
from reprokit.capture.record.roots import RootCalls, caller_of, first_user_frame, plain_caller
from reprokit.capture.record.screens import is_telling
from reprokit.capture.record.stack import StackedMode
from reprokit.capture.record.structure import ATOMS, iter_tensors, repeatable, with_own_index
from reprokit.capture.record.tensor_names import note_unfollowed
from reprokit.program import functions
from reprokit.program.ir import Mode
from reprokit.program.sites import find_frames
from reprokit.program.trace import current_mode


class Tape(StackedMode):
    """Notes the loop's outermost calls in the ``running`` step; ``roots`` notes those of modules.

    The listener is called for every event of the step. ``has_read_bad`` says whether the loop has
    read a number that is not finite, until somebody has taken notice of that. ``has_transform``: functions were called
    inside a transform such as `torch.func.grad`.
    """

    def __init__(self, switch_off: Callable[[BaseException], None]) -> None:
        super().__init__(switch_off)
        self.running = RunningStep()
        self.on_rest = self.running.restart
        self.roots = RootCalls(self, self.running)
        self.has_read_bad = False
        self.has_transform = False
        self._listener: Listener

    def install(self, listener: Listener) -> None:
        """Meet root modules and go on top of torch's stack of function modes."""
        self._listener, self._returns = listener, True
        self.roots.install(listener)
        if not self.is_resting:
            self.enter_stack()

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; the mode stays on the stack if it is there, else away from it."""
        self.enabled = self._returns = False
        self.roots.uninstall()

    def note(self, kind: EntryKind, target: Any, frame: FrameType, args: tuple[Any, ...] = ()) -> Entry:
        """Add an entry for something that is not a torch function, such as an optimizer's step."""
        user = first_user_frame(frame)
        entry = Entry(kind, target, args, {}, current_mode(), None, "", user.f_code, user.f_lasti)
        self.running.entries.append(entry)
        return entry

    def begin_forward(self) -> None:
        """Called before an operation that builds a graph; after a manual update it begins a new step."""
        if self.is_preparing or self.is_resting:
            self.begin()
        if self.running.is_hand_updated:
            self._listener.finish_hand_update()

    def note_loss(self, loss: Any) -> None:
        """A transform that differentiates has returned what it started from."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._listener.note_loss(loss)

    # -- functions the loop calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Perform a torch function of the loop and note it; most are of the usual kind, for which little is done."""
        facts = FACTS.get(func)
        if facts is None:
            try:
                facts = facts_of(func)
            except BaseException as error:
                self.switch_off(error)
                facts = UNKNOWN
        if (
            not facts.is_plain
            or self.depth
            or not self.enabled
            or get_ident() != self.thread
            or _peek_transforms() is not None
            or _tracing_state() is not None
        ):
            return self._perform_unusual(facts, func, args, kwargs or {})
        if self.is_preparing:
            self.count_prepared(args)
        options: dict[str, Any] = kwargs or {}  # type: ignore[assignment]
        frame = sys._getframe(1)
        try:
            user = None if self.running.is_hand_updated else plain_caller(frame)
        except BaseException as error:
            self.switch_off(error)
            return func(*args, **options)
        if user is None or (kwargs and not ATOMS.issuperset(map(type, kwargs.values()))):
            return self._perform(func, args, options, frame)
        if facts.may_write:
            return self._perform_write(facts, func, args, options, user)
        try:
            output = func(*args, **options)
        except BaseException as error:
            self.note_failure(error, func, args, options, frame)
            raise
        try:
            self._note_plain(facts, args, options, user, output)
        except BaseException as error:
            self.switch_off(error)
        return output

    def _note_plain(
        self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], user: FrameType, output: Any
    ) -> None:
        """Note a call of the usual kind, which changes nothing and is over: its tensors are in the cache now."""
        entry = self._plain_entry(facts, args, kwargs, user)
        if entry is None:
            unusual = self._prepare(facts.function, args, kwargs, user)
            if unusual is not None:
                self._finish_function(unusual, output)
        elif output.__class__ not in TENSORS:
            self._finish_function(entry, output)
        elif entry.stamps:
            entry.output = output
            self.running.add_plain(entry, output)

    def note_failure(
        self, error: BaseException, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, frame: FrameType
    ) -> None:
        """An exception came out of a call that writes nothing."""
        try:
            entry = self._prepare(func, args, kwargs, frame)
            if entry is not None:
                self.running.fail(error, entry)
        except BaseException as own:
            self.switch_off(own)

    def _plain_entry(
        self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], user: FrameType
    ) -> PlainEntry | None:
        """The entry of a call; ``None`` if there is anything unusual about its arguments."""
        entry = _new(PlainEntry)
        stamps = stamps_of(args)
        entry.is_nested = stamps is None
        if stamps is None:
            given = own_and_stamped(args)
            if given is None:
                return None
            args, stamps = given
        entry.target, entry.args, entry.kwargs, entry.stamps = facts.function, args, kwargs, stamps
        if _is_any_autocast_enabled() or not is_grad_enabled():
            entry.mode = current_mode()
        else:
            entry.mode = _PLAIN_MODE
        entry.code, entry.instruction, entry.is_write = user.f_code, user.f_lasti, facts.is_in_place
        return entry

    def _perform_write(
        self, facts: Facts, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], user: FrameType
    ) -> Any:
        """Perform a call of the usual kind that may write into its arguments, and note it."""
        try:
            entry = self._plain_entry(facts, args, kwargs, user)
            is_write = entry is not None and facts.is_in_place
            is_noted = entry is None or not is_write or self._prepare_write(facts, entry, args[0] if args else None)
        except BaseException as error:
            self.switch_off(error)
            is_noted = False
        if not is_noted:
            return func(*args, **kwargs)
        if entry is None:
            return self._perform(func, args, kwargs, user)
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            self.running.fail(error, entry)
            raise
        try:
            written = args[0] if is_write and args else None
            if is_write and entry.writes_state:
                self.running.entries.append(entry)
            elif output.__class__ not in TENSORS and written.__class__ not in TENSORS:
                self._finish_function(entry, output)
            elif entry.stamps:
                entry.output = output
                self.running.add_plain(entry, written if output is None else output)
        except BaseException as error:
            self.running.note_gap(entry)
            self.switch_off(error)
        return output

    def _perform_unusual(
        self, facts: Facts, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Perform a function that is not plain, or that the loop itself does not call; note it if need be."""
        if self.depth or facts.is_silent:
            result = func(*args, **kwargs)
            if facts.is_read and not self.depth:
                try:
                    self._look_at(args[0], result)
                except Exception as error:
                    self.switch_off(error)
            return result
        if _peek_transforms() is not None:
            self.has_transform = True
            return func(*args, **kwargs)
        if not self.enabled or get_ident() != self.thread or _tracing_state() is not None:
            return func(*args, **kwargs)
        if self.is_preparing:
            self.count_prepared(args)
        if func is torch.Tensor.__iter__ and args[0].dim() > 0:
            return iter(self.__torch_function__(torch.Tensor.unbind, (), (args[0], 0)))
        return self._perform(func, args, dict(kwargs), sys._getframe(2))

    def _prepare_write(self, facts: Facts, entry: Entry, written: Any) -> bool:
        """Judge what a call is about to write into; false if the call need not be noted."""
        running = self.running
        is_trained = bool(running.differentiations)
        verdict = running.memory.judge(written, entry, running.entries, is_trained=is_trained)
        if verdict is None:
            return False
        entry.writes_state = verdict
        entry.writes_view = isinstance(written, torch.Tensor) and written._is_view()
        if verdict:
            if facts.writes_data:
                running.memory.before_move(written)
                if not _is_alike(*entry.args[:2]):
                    self._listener.before_conversion()
            if running.suspect is not None:
                running.is_hand_updated |= self._listener.is_update(written)
            elif not running.is_hand_updated:
                running.is_hand_updated = running.memory.is_trained(written, running.differentiations)
        return True

    def _perform(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        try:
            entry = self._prepare(func, args, kwargs, frame)
        except BaseException as error:
            self.switch_off(error)
            entry = None
        if entry is None:
            return func(*args, **kwargs)
        if entry.kind is kinds.BACKWARD:
            return self._differentiate(entry)
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            self.running.fail(error, entry)
            raise
        try:
            self._finish_function(entry, output)
        except BaseException as error:
            self.running.note_gap(entry)
            self.switch_off(error)
        return output

    def _look_at(self, tensor: torch.Tensor, result: Any) -> None:
        """The loop has read ``result``; remember if that tells it of a bad value."""
        if not _is_number(result):
            return
        if not math.isfinite(result):
            self.has_read_bad = True
        elif not is_telling(self.running.entries, tensor, bool(result)):
            return
        if get_ident() == self.thread and not self.depth:
            self.guard(self._listener.read_bad, tensor)

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like a loop's ``loss.backward()``, for entry points that torch does not hand to modes."""
        entry = self.guard(self._prepare, function, args, kwargs, sys._getframe(2))
        return function(*args, **kwargs) if entry is None else self._differentiate(entry)

    def _differentiate(self, entry: Entry) -> Any:
        self.is_claimed = True
        output = entry.output = self.call_aside(entry, entry.target, entry.args, entry.kwargs, is_checked=True)
        self.guard(self.running.add_differentiation, entry)
        self._listener.finish_differentiation(entry)
        return output

    def call_aside(
        self,
        entry: Entry | None,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_checked: bool = False,
    ) -> Any:
        """Call a function with the mode out of the way; what its entry starts from is checked before, if wanted."""
        popped = self.step_aside()
        try:
            if is_checked and entry is not None:
                self._listener.judge_start(entry)
            return target(*args, **kwargs)
        except BaseException as error:
            if entry is not None:
                self.running.fail(error, entry)
            raise
        finally:
            self.step_back(popped)

    def _prepare(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Entry | None:
        running = self.running
        user, root, has_library = caller_of(frame)
        if root is not None:
            self.roots.meet_late(root)
            return None
        if user is None:  # what a custom autograd function returns is used by value
            return None
        facts = facts_of(func)
        if facts.is_differentiation:
            self.begin_forward()
            is_plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
            if not is_plain:
                args, kwargs = repeatable(args, kwargs)
            where = (facts.name, user.f_code, user.f_lasti)
            entry = Entry(kinds.BACKWARD, facts.function, args, kwargs, current_mode(), None, *where)
            if not is_plain:
                entry.versions = versions_of(args, kwargs)
            return entry
        versions = versions_of(args, kwargs)
        draws = facts.is_random and any(tensor.requires_grad for tensor, _ in versions)
        if facts.is_random and not versions:
            return None  # used by its value
        if facts.is_indexing:
            args = with_own_index(args)
        where = (facts.name, user.f_code, user.f_lasti)
        entry = Entry(kinds.FUNCTION, facts.function, args, kwargs, current_mode(), None, *where)
        entry.versions = versions
        if facts.is_in_place:
            written = args[0] if args else next(iter(kwargs.values()), None)
            if not self._prepare_write(facts, entry, written):
                return None
        if running.is_hand_updated and _begins_forward(facts.name, versions):
            self._listener.finish_hand_update()
        if has_library:
            entry.library = find_frames(frame)[1]
        if draws:
            entry.rng = generator_states(versions)
        return entry

    def _finish_function(self, entry: Entry, output: Any) -> None:
        """Keep the entry if it made tensors that a replay has to make again, or wrote into some."""
        running, facts = self.running, facts_of(entry.target)
        if entry.writes_state:
            self._keep_random_outcome(entry)
            running.entries.append(entry)
            if facts.writes_data:
                running.memory.moved(entry.args[0])
            return
        outputs = list(iter_tensors(output))
        is_single = output is None or output.__class__ is torch.Tensor
        entry.output = output if is_single else outputs  # a list may be changed by the loop
        is_in_place = facts.is_in_place or entry.name in functions.GRAD_WRITES
        if not (outputs or is_in_place) or not self._can_repeat(entry, outputs):
            if output is False and entry.name in _SAME and len({*map(id, entry.args[:2])}) == 1 < len(entry.args):
                self.guard(self._listener.read_bad, entry.args[0])  # only a NaN is not equal to itself
            if isinstance(entry.target, OPERATORS):
                note_unfollowed(outputs)
            return
        if is_in_place:
            self._keep_random_outcome(entry)
        running.add(entry)

    def _keep_random_outcome(self, entry: Entry) -> None:
        if entry.rng is None and functions.is_random(entry.name):
            written = functions.written_argument(entry.name, entry.args, entry.kwargs)
            if isinstance(written, torch.Tensor):
                entry.outcome = written.detach().clone()

    def _can_repeat(self, entry: Entry, outputs: list[torch.Tensor]) -> bool:
        """True if replaying the function gives the same; otherwise its outcome is used by value."""
        if not entry.name:
            return any(tensor.requires_grad for tensor in outputs)
        if functions.is_random(entry.name):
            return entry.rng is not None or functions.is_in_place(entry.name)
        if entry.versions:
            return True
        is_trained = any(tensor.requires_grad for tensor in outputs)  # then it is an input, with a gradient of its own
        return functions.is_factory(entry.name) and not is_trained


def _begins_forward(name: str, versions: list[tuple[torch.Tensor, int]]) -> bool:
    """True if a function after a hand-made update is no more part of it: it builds a graph."""
    if not torch.is_grad_enabled() or name.endswith(("__get__", "__set__")) or functions.is_in_place(name):
        return False
    return any(tensor.requires_grad for tensor, _ in versions)


_SAME = frozenset({"torch.allclose", "torch.Tensor.allclose", "torch.equal", "torch.Tensor.equal"})
_NUMBERS = frozenset({bool, int, float})


def _is_number(value: Any) -> bool:
    return value.__class__ in _NUMBERS or (getattr(value, "ndim", 1) == 0 and value.dtype.kind in "fiub")


def _is_alike(target: torch.Tensor, value: torch.Tensor) -> bool:
    return (target.dtype, target.shape, target.device) == (value.dtype, value.shape, value.device)


_new = object.__new__
_PLAIN_MODE = Mode()
is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch_private.is_any_autocast_enabled
_tracing_state = torch_private.tracing_state  # of `torch.jit.trace`, which would trace our work as well
_peek_transforms = torch_private.peek_transforms  # vmap and the like, inside which values are not ours
