"""The tape: what the loop has called since the last copy of the state, in one flat list.

Every tensor has a number; a write into one gives it a new number. What came from outside (a batch, a small state) is
held, with a copy of what it held before the loop wrote into it, or at once if its memory is NumPy's; results are held
only weakly, because a replay makes them again. What an earlier step has made is held while the running step uses it.
An update ends a step with a `Mark`: steps are pieces of one list, so a graph that goes on over an update needs nothing
special.

Version counters do not decide anything here; they are the alarm for writes that the tape could not see.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reprokit import native, torch_private
from reprokit.capture.structure import ATOMS, TENSORS, iter_leaves, map_leaves
from reprokit.program.dataflow import node_of, same_bits
from reprokit.program.ir import Mode

if TYPE_CHECKING:
    from reprokit.capture.calls import Kind

SLOTS = 9  # values in the list for each call
SMALL = 65_536  # elements that are always worth saving before a write
SWEEP_OPS = 4096  # calls of a step after which those that nobody needs are looked for
_SWEEP_ALL = 65_536  # calls of all steps, which take some 20 MB
SWEEP_BYTES = 2**23
_SWEEP_BYTES_A_CALL, _MOST_SWEEP_BYTES = 2**16, 2**28  # made anew, before the next look, for each call that is kept
MOST_BYTES = 256 * 2**20  # of tensors from outside that a step may hold
MOST_OPS = 16_384  # of a step whose data are made by calls of their own; a noted call takes a kilobyte
_SINGLE = ATOMS | {slice, type(...), torch.Size}  # have no tensors in them
_FOREIGN = -2  # the stamp of memory that is not torch's, such as NumPy's: no counter knows what others write there
_MOST_COPIED = 2**18  # elements of such memory, which takes 0.1 ms
_MOST_CARRIED = 512  # calls before a copy that made graphs which are alive


class Number(weakref.ref[torch.Tensor]):
    """Stands for a tensor in the arguments and results of a call, and leads to it while it is alive.

    One tensor has another number after each write. ``step`` is the last step that made or used it; ``batch`` is there
    for what a loader gave, see `SampleWatch`.
    """

    __slots__ = ("batch", "step")
    step: int
    batch: Any
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class Op(NamedTuple):
    """A call of the loop: a view of the tape. ``outs`` are the numbers of its results; ``note`` is of the type that its
    kind has."""

    kind: type[Kind]
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Number, ...]
    code: CodeType | None
    instruction: int
    mode: Mode
    note: Any

    @property
    def ins(self) -> list[Number]:
        """The numbers of the tensors that the call was given."""
        return numbers_in(self.args, self.kwargs)


@dataclass(slots=True, eq=False)
class Mark:
    """An attempted update, the ``place``-th of all, which ends the calls of a step before ``end``. ``step`` is the
    iteration, in which ``micro_step`` backward calls were made; ``generators`` are the states of Python's and NumPy's
    generators when it began, where a forward draws from them."""

    end: int
    step: int
    place: int
    micro_step: int = 0
    loss: Any = None
    generators: dict[str, Any] | None = None


class Segment(NamedTuple):
    """A step: its calls and its mark."""

    ops: list[Op]
    mark: Mark


class Tape:
    """The log. ``step`` counts the steps, ``begin`` is the position of the first call of the running one.

    ``inputs`` are tensors from outside, ``held`` those from before the running step that it uses, ``stamps`` their
    version counters then, ``saved`` copies of what they held before the loop wrote into them. ``carried`` are calls
    from before the copy that made graphs which were alive then, ``before`` values of that time that a step since has
    used. ``scalars`` are the last single numbers with a graph.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.values: dict[int, Number] = {}  # the number that a tensor has now, by its `id`
        self.inputs: dict[Number, torch.Tensor] = {}
        self.held: dict[Number, torch.Tensor] = {}
        self.stamps: dict[Number, int] = {}
        self.saved: dict[Number, torch.Tensor] = {}
        self.marks: list[Mark] = []
        self.carried: list[Op] = []
        self.before: dict[Number, torch.Tensor] = {}
        self._early: set[Number] = set()  # made before the copy and not used since
        self.scalars: deque[tuple[Number, CodeType, int]] = deque(maxlen=4)
        self.recent: deque[torch.Tensor] = deque(maxlen=4)  # these scalars, until a root is called: each holds a graph
        self.on_lost: Callable[[], None] = lambda: None  # calls were let go of that may have changed something
        self.step = 0
        self.begin = 0
        self.num_bytes = 0
        self.sweep_at, self.sweep_bytes = SWEEP_OPS * SLOTS, SWEEP_BYTES
        self._sweep_all_at = _SWEEP_ALL * SLOTS
        self._counted: set[int] = set()  # ids of inputs that are part of `num_bytes`
        self._by_memory: dict[int, list[Number]] = {}
        self._num_scanned = 0

    # -- numbers -------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> Number:
        """The number of a tensor that a call is given; one that nobody knows is from outside."""
        number = self.values.get(id(tensor))
        if number is None or number() is not tensor:
            return self.add_input(tensor)
        return number if number.step == self.step else self._hold(number, tensor)

    def known(self, tensor: torch.Tensor) -> Number | None:
        """The number of a tensor, ``None`` if it has none."""
        number = self.values.get(id(tensor))
        return number if number is not None and number() is tensor else None

    def add_input(self, tensor: torch.Tensor) -> Number:
        """A tensor comes from outside."""
        number = self.new_number(tensor)
        self.inputs[number] = tensor
        self.stamps[number] = version_of(tensor)
        if tensor.__class__ is not torch.nn.Parameter and id(tensor) not in self._counted:
            self._counted.add(id(tensor))
            self.num_bytes += _bytes_of(tensor)
        if tensor.__class__ is torch.Tensor and tensor.layout is torch.strided:
            try:
                memory = native.untyped_storage(tensor)  # that of data loaders' workers is shared
                if not (memory.resizable() or memory.is_shared() or tensor.requires_grad) and tensor.is_cpu:
                    self._copy(number, tensor)
            except (RuntimeError, NotImplementedError):
                pass
        return number

    def _copy(self, number: Number, tensor: torch.Tensor) -> None:
        """Keep what an input holds whose memory others may write, unless it is large."""
        if native.numel(tensor) <= _MOST_COPIED:
            self.stamps[number] = _FOREIGN
            self.saved[number] = native.clone(native.detach(tensor), memory_format=torch.preserve_format)
            self.num_bytes += _bytes_of(tensor)

    def rewritten(self) -> Iterator[tuple[Number, torch.Tensor, torch.Tensor]]:
        """The inputs whose memory is not torch's and was written since the loop has read it last: what they hold now,
        and what they held."""
        last = {
            native.data_ptr(self.inputs[number]): number for number, stamp in self.stamps.items() if stamp == _FOREIGN
        }
        for number in last.values():
            now, then = self.inputs[number], self.saved[number]
            if self.known(now) is number and not same_bits(now, then):
                yield number, now, then

    def _hold(self, number: Number, tensor: torch.Tensor) -> Number:
        """The running step uses a tensor from before; something unseen may have written it meanwhile."""
        is_input, version = number in self.inputs, version_of(tensor)
        stamp = self.stamps[number] if is_input else version
        is_same = stamp == version or (stamp == _FOREIGN and native.equal(self.saved[number], tensor))
        if not is_same and tensor.__class__ is not torch.nn.Parameter:
            return self.add_input(tensor)
        number.step = self.step
        self.held[number] = tensor
        self.stamps.setdefault(number, version)
        if number in self._early:
            self._early.discard(number)
            if node_of(tensor) is not None and not is_input:
                self.before[number] = native.detach(tensor)
            elif not is_input:  # a replay from the last copy does not make it
                self.inputs[number] = tensor
                self.num_bytes += _bytes_of(tensor)
        return number

    def new_number(self, tensor: torch.Tensor) -> Number:
        """A number that no tensor had."""
        number = self.values[id(tensor)] = Number(tensor)
        number.step = self.step
        return number

    def result(self, tensor: torch.Tensor) -> Number:
        """The number of a result: a new one, unless the call has returned what it was given."""
        return self.known(tensor) or self.new_number(tensor)

    def encode(self, args: Iterable[Any]) -> list[Any]:
        """Arguments with numbers in the place of tensors; written out, since a call may have hundreds."""
        values, held, stamps, early, step = self.values, self.held, self.stamps, self._early, self.step
        found: list[Any] = []
        for value in args:
            kind = value.__class__
            if kind in TENSORS:
                number: Any = values.get(id(value))
                if number is None or number() is not value:
                    number = self.add_input(value)
                elif number.step != step:
                    version = -1 if native.is_inference(value) else torch_private.version(value)
                    is_same = stamps.setdefault(number, version) == version or kind is torch.nn.Parameter
                    if is_same and number not in early:  # as `_hold`
                        number.step, held[number] = step, value
                    else:
                        number = self._hold(number, value)
                found.append(number)
            elif kind in _SINGLE or (kind is tuple and _SINGLE.issuperset(map(type, value))):
                found.append(value)
            elif (kind is tuple or kind is list) and TENSORS.issuperset(map(type, value)):
                found.append(kind(self.encode(value)))
            else:
                found.append(map_leaves(value, torch.Tensor, self.number))
        return found

    def results(self, value: Any) -> tuple[Number, ...]:
        """The numbers of all tensors in a result."""
        return tuple(map(self.result, iter_leaves(value, torch.Tensor)))

    def alive(self) -> dict[Number, torch.Tensor]:
        """All tensors of the loop that are still there, by their numbers."""
        living = {number: tensor for number in self.values.values() if (tensor := number()) is not None}
        return {**living, **self.held, **self.inputs}

    def arguments(self) -> list[Any]:
        """Positional and keyword arguments of every call of the log."""
        return [part for op in self.ops() for part in (op.args, op.kwargs)]

    # -- writing -------------------------------------------------------------------------------------------------

    def add(
        self,
        kind: type[Kind],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        outs: Number | tuple[Number, ...],
        where: tuple[CodeType | None, int],
        mode: Mode,
        note: Any = None,
    ) -> None:
        """Note a call."""
        self.log += (kind, target, args, kwargs, outs, *where, mode, note)
        if len(self.log) > self.sweep_at or self.num_bytes > self.sweep_bytes:
            self.sweep()

    def pop(self) -> None:
        """Take the last call back."""
        del self.log[-SLOTS:]

    def before_write(self, target: torch.Tensor, *, has_graph: bool) -> bool:
        """Save what the memory of ``target`` holds, as far as a replay needs it; ``False`` if the write need not be
        noted: what is read later is used by its value then.

        A large tensor that the running step has not read yet begins anew as an input.
        """
        known = self.known(target)
        sharing = [number for number in self._sharing(target) if number is not known]
        is_unread = known is None or known.step != self.step
        if native.numel(target) > SMALL and not has_graph and not sharing and is_unread:
            self.values.pop(id(target), None)
            return False
        number = self.number(target)
        for other in (number, *sharing):
            tensor = self.inputs.get(other, self.held.get(other))
            if other not in self.saved and tensor is not None:
                self.saved[other] = native.clone(native.detach(tensor), memory_format=torch.preserve_format)
                self.num_bytes += _bytes_of(tensor)
        return True

    def _sharing(self, target: torch.Tensor) -> list[Number]:
        """The inputs with the memory of a tensor."""
        for number, tensor in itertools.islice(self.inputs.items(), self._num_scanned, None):
            pointer = address_of(tensor)
            if pointer is not None:
                self._by_memory.setdefault(pointer, []).append(number)
        self._num_scanned = len(self.inputs)
        pointer = address_of(target)
        return self._by_memory.get(pointer, []) if pointer is not None else []

    # -- steps ---------------------------------------------------------------------------------------------------

    def mark(self, mark: Mark | None) -> None:
        """The running step is over; without a mark nothing is known of it."""
        if mark is not None:
            self.marks.append(mark)
        dead = []
        for key in reversed(self.values):  # the last ones first: those that the step has made
            number = self.values[key]
            if number.step != self.step:
                break
            if number() is None:
                dead.append(key)
        for key in dead:
            del self.values[key]
        self.begin = len(self.log) // SLOTS
        self.step += 1
        self.held = {}
        self.scalars.clear()
        self.recent.clear()
        self.sweep_at = len(self.log) + SWEEP_OPS * SLOTS
        if len(self.log) > self._sweep_all_at:
            self.sweep()

    def drop_gradients(self) -> None:
        """The loop has dropped all gradients of the running step, and skipped it: forget the calls that made them."""
        ops = self.running()
        self._drop({self.begin + n for n in set(range(len(ops))) - set(without_gradients(ops))})
        self.scalars.clear()
        self.recent.clear()

    def running(self) -> list[Op]:
        """The calls of the running step."""
        return self.ops(self.begin)

    def ops(self, begin: int = 0, end: int | None = None) -> list[Op]:
        """Calls of the log."""
        log, last = self.log, len(self.log) if end is None else end * SLOTS
        found = []
        for place in range(begin * SLOTS, last, SLOTS):
            kind, target, args, kwargs, outs, code, instruction, mode, note = log[place : place + SLOTS]
            numbers = (outs,) if outs.__class__ is Number else outs
            found.append(Op(kind, target, args, kwargs or {}, numbers, code, instruction, mode, note))
        return found

    def segments(self) -> list[Segment]:
        """The steps since the copy that are over."""
        begins = [0, *(mark.end for mark in self.marks)]
        return [Segment(self.ops(begin, mark.end), mark) for begin, mark in zip(begins, self.marks, strict=False)]

    def cut(self, num_marks: int) -> None:
        """The state was copied after so many steps: what made graphs that are alive is all that is known of them."""
        end = self.marks[num_marks - 1].end if num_marks else 0
        early, later = self.ops(0, end), self.ops(end)
        living = self.alive()
        tracked = {number: node_of(tensor) for number, tensor in living.items() if tensor.requires_grad}
        graphs = {number for number, node in tracked.items() if node is not None}
        trained = tracked.keys() - graphs
        graphs.update([number for op in later for number in op.ins if number not in trained])  # loaded, then clipped
        carried = makers_of(graphs, [*self.carried, *early])
        self.carried = carried if len(carried) <= _MOST_CARRIED else []
        self.log, self.marks = self.log[end * SLOTS :], self.marks[num_marks:]
        for mark in self.marks:
            mark.end -= end
        self._early |= {number for op in (*early, *later) for number in op.outs}
        self.before = self.before if later else {}
        self._keep()
        self._early &= set(self.values.values())
        self.mark(None)
        self.sweep_bytes, self._sweep_all_at = SWEEP_BYTES, _SWEEP_ALL * SLOTS

    def drop_past(self) -> None:
        """Forget the steps before the running one."""
        self.log, self.marks, self.carried, held = self.log[self.begin * SLOTS :], [], [], self.held
        self._keep()
        self.begin = 0
        self.held = {number: tensor for number, tensor in held.items() if self.known(tensor) is number}

    def forget(self) -> None:
        """Let go of everything."""
        if self.log or self.values or self.marks:
            self.log, self.marks, self.carried, self.before, self._early = [], [], [], {}, set()
            self._keep()
        self.mark(None)

    def _keep(self) -> None:
        """Let go of the tensors and the numbers that no call has."""
        log, used = self.log, {number for op in self.carried for number in (*op.ins, *op.outs)}
        for place in range(0, len(log), SLOTS):
            args, kwargs, outs = log[place + 2 : place + 5]
            used.update(numbers_in(args, kwargs))
            used.update((outs,) if outs.__class__ is Number else outs)
        self.inputs = {number: tensor for number, tensor in self.inputs.items() if number in used}
        self.saved = {number: content for number, content in self.saved.items() if number in used}
        self.stamps = {number: version for number, version in self.stamps.items() if number in used}
        self.values = {key: number for key, number in self.values.items() if number in used and number() is not None}
        kept = (*self.inputs.values(), *self.saved.values())
        held = {id(tensor): tensor for tensor in kept if tensor.__class__ is not torch.nn.Parameter}
        self._counted = set(held)
        self.num_bytes = sum(map(_bytes_of, held.values()))
        self._by_memory, self._num_scanned = {}, 0

    # -- room ----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let go of calls that nobody needs, such as those of an evaluation; the less these are, the longer until the
        next look. A running step that holds too much lets go of data that no gradient flows through so far."""
        self._drop(self._useless())
        numbers = {number for op in self.running() for number in op.ins} if self.num_bytes > MOST_BYTES else set()
        is_large = sum(_bytes_of(self.inputs[number]) for number in numbers & self.inputs.keys()) > MOST_BYTES
        is_long = len(self.log) // SLOTS - self.begin > MOST_OPS
        dropped = self._useless(self.begin, are_data=False) if is_large or is_long else set()
        self._drop(dropped)
        if is_large or dropped:
            self.on_lost()
        self.sweep_at = len(self.log) + max(SWEEP_OPS, len(self.log) // SLOTS - self.begin) * SLOTS
        # A look costs as much as there are calls: many small ones and a few large results would else be quadratic.
        worth = min(_MOST_SWEEP_BYTES, len(self.log) // SLOTS * _SWEEP_BYTES_A_CALL)
        self.sweep_bytes = max(SWEEP_BYTES, 2 * self.num_bytes, worth)
        self._sweep_all_at = max(_SWEEP_ALL * SLOTS, 2 * len(self.log))

    def _drop(self, positions: Set[int]) -> None:
        if positions:
            log, kept, num_kept, places = self.log, [], 0, []
            for position in range(len(log) // SLOTS):
                places.append(num_kept)
                if position not in positions:
                    kept += log[position * SLOTS : (position + 1) * SLOTS]
                    num_kept += 1
            places.append(num_kept)
            for mark in self.marks:
                mark.end = places[mark.end]
            self.begin = places[self.begin]
            self.log = kept
        held = self.held
        self._keep()
        self.held = {number: tensor for number, tensor in held.items() if self.known(tensor) is number}

    def _useless(self, begin: int = 0, *, are_data: bool = True) -> set[int]:
        """The positions of calls from ``begin`` on whose results are gone and that no other call depends on.

        Unless they ``are_data``, results without a gradient are not needed, nor are writes before a backward pass.
        """
        log, found = self.log, set()
        are_kept = are_data or any(op.kind.differentiates for op in self.running())
        living = [(number, tensor) for number in self.values.values() if (tensor := number()) is not None]
        needed = {number for number, tensor in living if are_data or tensor.requires_grad}
        for place in range(len(log) - SLOTS, begin * SLOTS - 1, -SLOTS):
            kind, _, args, kwargs, outs, _, _, _, note = log[place : place + SLOTS]
            is_pure = note is None and kind.is_forward  # as most of thousands
            if not is_pure:
                (op,) = self.ops(place // SLOTS, place // SLOTS + 1)
                is_pure = kind.is_pure(op) if are_kept else kind.is_forward and not kind.writes_state(op)
            if is_pure and (outs not in needed if outs.__class__ is Number else needed.isdisjoint(outs)):
                found.add(place // SLOTS)
            else:
                needed.update(numbers_in(args, kwargs))
        return found


def without_gradients(ops: Sequence[Op]) -> list[int]:
    """The positions of ``ops`` but those that made gradients which were cleared later, and what looked at these."""
    cleared = max((n for n, op in enumerate(ops) if op.kind.clears_gradients(op)), default=-1)
    gone: set[Number] = set()
    kept = []
    for position, op in enumerate(ops):
        is_of_gone = op.kind.is_pure(op) and not gone.isdisjoint(op.ins)
        is_of_grad = op.kind.makes_gradients and op.target is not torch.autograd.grad  # whose results outlive clearing
        if (position < cleared and (is_of_grad or op.kind.reads_gradients(op))) or is_of_gone:
            gone.update(op.outs)
        else:
            kept.append(position)
    return kept


def numbers_in(args: Iterable[Any], kwargs: dict[str, Any] | None) -> list[Number]:
    """The numbers among arguments, in order."""
    found: list[Number] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if value.__class__ is Number:
            found.append(value)
        elif value.__class__ not in ATOMS:
            found += iter_leaves(value, Number)
    return found


def makers_of(numbers: Set[Number], ops: Sequence[Op]) -> list[Op]:
    """The forward calls of ``ops`` that have made tensors with these numbers, and what these were made of, in order."""
    needed, made = set(numbers), []
    for op in reversed(ops):
        if op.kind.is_forward and not needed.isdisjoint(op.outs) and not op.kind.writes_state(op):
            made.append(op)
            needed.difference_update(op.outs)
            needed.update(op.ins)
    return made[::-1]


def _bytes_of(tensor: torch.Tensor) -> int:
    return native.numel(tensor) * native.element_size(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, -1 if it has none."""
    return -1 if native.is_inference(tensor) else torch_private.version(tensor)


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins; ``None`` for tensors without plain memory of their own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        part = tensor if tensor.__class__ in TENSORS else torch_private.shard_of(tensor)
        return native.untyped_storage(part).data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None
