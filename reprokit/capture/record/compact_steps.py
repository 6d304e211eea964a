"""The steps since the last copy of the state, kept so that they can be played again and cost next to nothing meanwhile.

What a finished step made itself is let go of: a number stands for each such tensor, and only what came from outside
(the batch, small states) stays alive. All entries of a step become one flat list, because every container that stays
alive is one more for Python's garbage collector to walk through, again and again.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import TENSORS, Entry, PlainEntry, facts_of
from reprokit.capture.record.state import num_bytes
from reprokit.capture.record.structure import ATOMS, iter_tensors, map_tensors


@dataclass(slots=True, eq=False)
class PastStep:
    """A finished step: what the loop did in it, and what was true when it began or ended.

    Either ``entries`` and ``saved`` tell, or, once it is frozen, ``flat`` does, and ``kept`` in the place of ``saved``.
    ``num_bytes`` is what it holds then, ``made_bytes`` what it held before of its own. ``is_cut``: it uses a graph that
    began before anything that is remembered. ``place`` is how many steps there were before, of any optimizer. ``made``
    are the numbers of what it made.
    """

    entries: list[Entry]
    saved: dict[int, torch.Tensor]
    completed: int
    micro_step: int
    loss: torch.Tensor | float | None
    generators: dict[str, Any] | None
    flat: list[Any] | None = None
    kept: list[Any] | None = None
    num_bytes: int = 0
    made_bytes: int = 0
    is_cut: bool = False
    place: int = 0
    made: range = range(0)


class TensorNumber(int):
    """The number of a tensor that a remembered step made: it stands for the tensor in a frozen step."""

    __slots__ = ()


class Freezer:
    """Turns finished steps into frozen ones and, when somebody goes back, into entries again.

    A tensor that one step made and a later one uses with its graph (a generator's output that the next optimizer's loss
    starts from) keeps its number: ``_carried`` knows it as long as the tensor lives. Entries that are made again hold
    empty ``_stand_ins`` for tensors that steps made. Numbers below ``_first`` are of steps before the last copy. Steps
    since that copy go on with the tensors of earlier steps whose numbers are ``used``.
    """

    def __init__(self) -> None:
        self._carried: dict[int, tuple[weakref.ref[torch.Tensor], TensorNumber]] = {}
        self._most_carried = _FEW
        self._stand_ins: dict[TensorNumber, torch.Tensor] = {}
        self._num_made = 0
        self._first = 0
        self.used: set[TensorNumber] = set()

    def forget(self, but: Sequence[PastStep] = ()) -> None:
        """No step before now can be played again; ``but`` these are still known, as makers of what later ones use."""
        ranges = sorted((step.made.start, step.made.stop) for step in but)

        def is_known(number: int) -> bool:
            place = bisect.bisect(ranges, (number, self._num_made + 2)) - 1
            return place >= 0 and number < ranges[place][1]

        self._carried = {key: pair for key, pair in self._carried.items() if is_known(pair[1])}
        self._stand_ins = {number: tensor for number, tensor in self._stand_ins.items() if is_known(number)}
        self._first = self._num_made + 1
        self.used = set()

    def living(self, steps: Iterable[PastStep], used: Set[TensorNumber] = frozenset()) -> list[PastStep]:
        """The frozen steps that made, with a graph, a tensor that is alive or among those ``used``."""
        alive = [*used, *(number for reference, number in self._carried.values() if reference() is not None)]
        return [step for step in steps if not step.is_cut and any(number in step.made for number in alive)]

    def freeze(self, step: PastStep, *, keeps_values: bool = False) -> None:
        """Let go of what the step made; ``keeps_values``: not of the values that it reads of what earlier ones made."""
        first = self._num_made + 1
        entries = step.entries if keeps_values else _of_use(step.entries)
        work = _Freezing(self, entries, keeps_values)
        for entry in entries:
            if entry.__class__ is PlainEntry:
                work.add_plain(entry)
            else:
                work.add(entry)
        kept: list[Any] = []
        for key, content in step.saved.items():
            if key in work.frozen:
                kept += (work.frozen[key], content)
        step.flat, step.kept, step.entries, step.saved = work.flat, kept or None, _NO_ENTRIES, _NOTHING_SAVED
        step.num_bytes = num_bytes([*work.outside.values(), *work.values, *kept[1::2]])
        step.made_bytes, step.is_cut, step.made = work.made_bytes, work.is_cut, range(first, self._num_made + 1)

    def thaw(self, step: PastStep) -> PastStep:
        """The same step with entries."""
        if step.flat is None:
            return step
        kept = step.kept or []
        saved = {id(self._thawed(kept[n])): kept[n + 1] for n in range(0, len(kept), 2)}
        return replace(step, entries=self._entries(step.flat), saved=saved, flat=None, kept=None)

    def lightened(self, step: PastStep, pending: Entry | None = None) -> PastStep:
        """The step and ``pending`` with stand-ins for what was made; the step itself stays as it is."""
        entries = [*step.entries, pending] if pending is not None else step.entries
        frozen = replace(step, entries=entries)
        self.freeze(frozen, keeps_values=True)
        return self.thaw(frozen)

    def _entries(self, flat: list[Any]) -> list[Entry]:
        entries, position, thawed = [], 0, self._thawed
        while position < len(flat):
            if flat[position] is _PLAIN:
                head = flat[position + 1 : position + _PLAIN_HEAD]
                target, mode, code, instruction, writes, names, num_args, num_outputs, num_versions = head
                position += _PLAIN_HEAD
                entry = Entry(kinds.FUNCTION, target, (), {}, mode, None, facts_of(target).name, code, instruction)
                entry.writes_state, entry.writes_view = writes
            else:
                head = flat[position : position + _HEAD]
                kind, target, mode, name, code, offset, library, rng, cuda_rng, outcome, settings, marks = head[:12]
                names, num_args, num_outputs, num_versions = head[12:]
                position += _HEAD
                entry = Entry(kind, target, (), {}, mode, None, name, code, offset)
                entry.rng = None if rng is None else (rng, cuda_rng)
                entry.outcome, entry.settings = outcome, settings
                entry.writes_state, entry.writes_view, entry.has_stepped, entry.forward, entry.generators = marks
                entry.library = library
            ends = [position + num_args]
            for length in (len(names), max(num_outputs, 0), 2 * num_versions):
                ends.append(ends[-1] + length)
            entry.args = tuple(map(thawed, flat[position : ends[0]]))
            entry.kwargs = dict(zip(names, map(thawed, flat[ends[0] : ends[1]]), strict=True))
            if num_outputs >= 0:
                entry.output = list(map(thawed, flat[ends[1] : ends[2]]))
            entry.versions = list(zip(flat[ends[2] : ends[3] : 2], flat[ends[2] + 1 : ends[3] : 2], strict=True))
            entries.append(entry)
            position = ends[3]
        return entries

    def _thawed(self, value: Any) -> Any:
        return self.stand_in(value) if type(value) is TensorNumber else value

    def stand_in(self, number: TensorNumber) -> torch.Tensor:
        """The empty tensor that stands for one that a step made."""
        known = self._stand_ins.get(number)
        if known is None:
            known = self._stand_ins[number] = torch.empty(0)
        return known

    def number(self, tensor: torch.Tensor) -> TensorNumber:
        """A number for a tensor that a step made."""
        self._num_made += 1
        number = TensorNumber(self._num_made)
        if tensor.requires_grad:
            self._carried[id(tensor)] = (weakref.ref(tensor), number)
            if len(self._carried) > self._most_carried:
                self._carried = {key: pair for key, pair in self._carried.items() if pair[0]() is not None}
                self._most_carried = max(_FEW, 2 * len(self._carried))
        return number

    def carried(self, tensor: torch.Tensor) -> TensorNumber | None:
        """The number of a tensor that an earlier step made."""
        reference, number = self._carried.get(id(tensor), (None, None))
        return number if reference is not None and reference() is tensor else None

    def is_played(self, number: TensorNumber) -> bool:
        """True if the step that made a tensor is played when somebody goes back."""
        return number >= self._first

    def with_makers(
        self, entries: list[Entry], earlier: Sequence[list[Entry]], known: Set[int] = frozenset()
    ) -> list[Entry] | None:
        """``entries`` of a step with those of ``earlier`` ones that made the graphs it goes on with.

        They come after what the loop wrote by hand before the step. What has one of the ``known`` ids is there already.
        ``None`` if something else is missing.
        """
        made = set(map(id, self._stand_ins.values()))
        made -= known | {id(tensor) for entry in entries for tensor in iter_tensors(entry.output)}
        needed = {key for entry in entries for key in _graphs_in(entry) & made}
        makers: list[Entry] = []
        for step in reversed(earlier):
            for entry in reversed(step):
                outputs = {id(tensor) for tensor in iter_tensors(entry.output)}
                if entry.kind in kinds.FORWARD and not entry.writes_state and outputs & needed:
                    makers.insert(0, entry)
                    needed = (needed - outputs) | (_graphs_in(entry) & made)
        if needed:
            return None
        lead, rest = split(entries)
        return [*lead, *makers, *rest]

    def first_joined(self, steps: Sequence[list[Entry]], last: list[Entry]) -> int | None:
        """The position of the first of ``steps`` whose graphs ``last``, or a step between them, goes on with.

        ``None`` if nothing goes on with a graph, or with one from before all of them.
        """
        made = set(map(id, self._stand_ins.values()))
        needed, first = _graphs_from_before(last) & made, None
        for position in range(len(steps) - 1, -1, -1):
            outputs = {id(tensor) for entry in steps[position] for tensor in iter_tensors(entry.output)}
            if needed & outputs:
                first = position
            if first is not None:
                needed = (needed - outputs) | (_graphs_from_before(steps[position]) & made)
        return None if needed else first


class _Freezing:
    """One step on its way into a flat list: its ``entries``.

    Of an entry the list holds ``_HEAD`` values, or ``_PLAIN_HEAD`` after the mark of a plain one. The last of these say
    how many arguments, results and pairs of tensors and versions follow; a number of results of -1 stands for none at
    all. ``frozen`` maps ids of tensors to what stands for them: a number if the step made them, or themselves.
    """

    def __init__(self, freezer: Freezer, entries: list[Entry], keeps_values: bool) -> None:
        self._freezer = freezer
        self._entries = entries
        self._reached: set[int] | None = None
        self._keeps_values = keeps_values
        self.frozen: dict[int, torch.Tensor | TensorNumber] = {}
        self.outside: dict[int, torch.Tensor] = {}
        self.values: list[torch.Tensor] = []
        self.flat: list[Any] = []
        self.is_cut = False
        self._num_elements = 0
        self._entry: Entry

    @property
    def made_bytes(self) -> int:
        """At most so many bytes the step has made."""
        return _LARGEST * self._num_elements

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self._entry = entry
        args, kwargs, output = entry.args, entry.kwargs, entry.output
        names: tuple[str, ...] = ()
        if kwargs:
            names = _names_of(kwargs)
            args = (*args, *kwargs.values())
        values: Any = args if entry.kind in _WITHOUT_RESULTS else self._all_frozen(args)
        results: Any = ()
        if output is not None:
            results = self._results((output,) if isinstance(output, torch.Tensor) else iter_tensors(output))
        versions: Any = ()
        if entry.versions:
            outside = self.outside
            versions = [item for pair in entry.versions if id(pair[0]) in outside for item in pair]
        rng, cuda_rng = entry.rng or _NO_RNG
        marks = entry.writes_state, entry.writes_view, entry.has_stepped, entry.forward, entry.generators
        self.flat += (
            entry.kind,
            entry.target,
            entry.mode,
            entry.name,
            entry.code,
            entry.instruction,
            entry.library,
            rng,
            cuda_rng,
            entry.outcome,
            entry.settings,
            _NO_MARKS if marks == _NO_MARKS else marks,
            names,
            len(args) - len(names),
            -1 if output is None else len(results),
            len(versions) // 2,
            *values,
            *results,
            *versions,
        )

    def add_plain(self, entry: PlainEntry) -> None:
        """Append an entry of the usual kind, unless its result says enough."""
        self._entry = entry
        args, kwargs, output, stamps = entry.args, entry.kwargs, entry.output, entry.stamps
        if len(stamps) > _MANY and self._is_joined(entry):
            return
        frozen = self.frozen
        values: list[Any] = []
        versions: list[Any] = []
        position = 0
        for value in args:
            kind = value.__class__
            if kind is _Tensor or kind is _Parameter:
                known = frozen.get(id(value))
                if known is None:
                    known = self._outer(value)
                values.append(known)
                if known is value and kind is _Tensor:
                    versions += (value, stamps[position])
                position += 1
            elif entry.is_nested and (kind is list or kind is tuple):
                values.append(kind(self._light(item) if item.__class__ in TENSORS else item for item in value))
                for tensor in value:
                    if tensor.__class__ in TENSORS:
                        if id(tensor) in self.outside:
                            versions += (tensor, stamps[position])
                        position += 1
            else:
                values.append(value)
        results = self._results((output,) if output.__class__ in TENSORS else output or ())
        self.flat += (
            _PLAIN,
            entry.target,
            entry.mode,
            entry.code,
            entry.instruction,
            _WRITES[entry.writes_state, entry.writes_view] if entry.is_write else _NO_WRITES,
            _names_of(kwargs) if kwargs else (),
            len(values),
            -1 if output is None else len(results),
            len(versions) // 2,
            *values,
            *kwargs.values(),
            *results,
            *versions,
        )

    def _is_joined(self, entry: PlainEntry) -> bool:
        """True if a call only joined many tensors from outside, so that its result is kept and they are not."""
        output = entry.output
        if output.__class__ is not torch.Tensor or output.requires_grad or output.is_inference() or output._version:
            return False  # it may have been written since
        frozen = self.frozen
        ids = {*map(id, entry.args), *map(id, itertools.chain.from_iterable(_sequences(entry.args)))}
        return not any(type(frozen[key]) is TensorNumber for key in frozen.keys() & ids)

    def _all_frozen(self, values: Iterable[Any]) -> list[Any]:
        frozen, found = self.frozen, []
        for value in values:
            if type(value) in ATOMS:
                found.append(value)
            elif isinstance(value, torch.Tensor):
                known = frozen.get(id(value))
                found.append(self._outer(value) if known is None else known)
            else:
                found.append(map_tensors(value, self._light))
        return found

    def _results(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | TensorNumber]:
        """The flat form of results: those that were not known are made by the step."""
        frozen, found = self.frozen, []
        for tensor in tensors:
            known = frozen.get(id(tensor))
            if known is None:
                known = frozen[id(tensor)] = self._freezer.number(tensor)
                self._num_elements += tensor.numel()
            found.append(known)
        return found

    def _light(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self.frozen.get(id(tensor))
        frozen = self._outer(tensor) if known is None else known
        return frozen if isinstance(frozen, torch.Tensor) else self._freezer.stand_in(frozen)

    def _outer(self, tensor: torch.Tensor) -> torch.Tensor | TensorNumber:
        key = id(tensor)
        result: torch.Tensor | TensorNumber = tensor
        if tensor.requires_grad and tensor.grad_fn is not None:
            carried = self._freezer.carried(tensor)
            is_played = carried is not None and self._freezer.is_played(carried) and not self._keeps_values
            # Read by value: the last loss, which many loops add to a sum, or another loss's output behind a `detach`.
            if not is_played and (self._entry.reads_values or not self._is_reached(key)):
                self.values.append(tensor.detach())
                return self.values[-1]
            if carried is None:
                self.is_cut = True
                return tensor.detach().requires_grad_()
            result = carried
            self._freezer.used.add(carried)
        elif type(tensor) is not torch.nn.Parameter:
            self.outside[key] = tensor
        self.frozen[key] = result
        return result

    def _is_reached(self, key: int) -> bool:
        if self._reached is None:
            self._reached = _reached_backward(self._entries)
        return key in self._reached


def _reached_backward(entries: Sequence[Entry]) -> set[int]:
    """The ids of the tensors whose graphs backward calls may go through; of all tensors if there is no such call."""
    is_open = all(entry.kind not in kinds.DIFFERENTIATING for entry in entries)
    reached: set[int] = set()
    for entry in reversed(entries):
        is_start = is_open or entry.kind in kinds.DIFFERENTIATING or entry.writes_view
        made = () if is_start or entry.reads_values else iter_tensors(entry.output)
        if is_start or any(id(tensor) in reached for tensor in made):
            reached.update(id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs)))
    return reached


def _of_use(entries: list[Entry]) -> list[Entry]:
    """The entries of a step without those that neither its gradients nor its updates depend on."""
    needed: set[int] = set()
    kept: list[Entry] = []
    is_trained = False
    for entry in reversed(entries):
        if entry.__class__ is PlainEntry:
            output = entry.output
            is_pure = not entry.is_write and output.__class__ in TENSORS and not output.requires_grad
            if is_pure and id(output) not in needed:
                continue
            needed.update(map(id, entry.args))
            if entry.is_nested:
                needed.update(map(id, itertools.chain.from_iterable(_sequences(entry.args))))
        else:
            is_trained = is_trained or entry.kind in kinds.DIFFERENTIATING
            for value in (*entry.args, *entry.kwargs.values()):
                needed.update((id(value),) if value.__class__ in TENSORS else map(id, iter_tensors(value)))
        kept.append(entry)
    kept.reverse()
    return kept if is_trained else entries


def _sequences(args: tuple[Any, ...]) -> list[Sequence[Any]]:
    return [value for value in args if value.__class__ is list or value.__class__ is tuple]


def _names_of(kwargs: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(kwargs)
    return _NAMES.setdefault(names, names)


def split(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The manual changes before the first forward pass of the step, and the rest."""
    first = next((n for n, e in enumerate(entries) if e.kind in _FORWARDS), len(entries))
    end = max((n + 1 for n in range(first) if entries[n].writes_state), default=0)
    return entries[:end], entries[end:]


def _graphs_from_before(entries: list[Entry]) -> set[int]:
    """The ids of the tensors that a step is given with their graphs and that it has not made itself."""
    needed: set[int] = set()
    for entry in reversed(entries):
        needed -= {id(tensor) for tensor in iter_tensors(entry.output)}
        needed |= _graphs_in(entry)
    return needed


def _graphs_in(entry: Entry) -> set[int]:
    return set() if entry.reads_values else {id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs))}


_FORWARDS = (kinds.MODULE, kinds.TRANSFORM, *kinds.DIFFERENTIATING)
_MANY = 32  # tensors that a call joins, such as the samples of a batch
_FEW = 256  # tensors that may be carried before those that are gone are looked for
_PLAIN = object()  # marks an entry of the usual kind, with less before its arguments
_PLAIN_HEAD = 10
_WRITES = {pair: pair for pair in itertools.product((False, True), repeat=2)}  # so that all entries share four
_NO_WRITES = _WRITES[False, False]
_LARGEST = 8  # bytes of an element
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_HEAD = 16  # values in a flat list before an entry's arguments
_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}
_NO_MARKS = (False, False, False, None, None)
_NO_RNG = (None, None)
_NO_ENTRIES: list[Entry] = []
_NOTHING_SAVED: dict[int, torch.Tensor] = {}
_WITHOUT_RESULTS = frozenset({kinds.ZERO_GRAD, kinds.CLIP, kinds.UNSCALE})  # are not given what the step made
