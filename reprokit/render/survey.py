"""One observed run of a program: ranges of all values and gradients, and the places where the bad tensor is bad.

Only ranges are kept, so the run needs hardly more memory than the program itself. Values are measured when they are
written, because a call in place changes them later.

The path of a bad value: the calls that lead from the inputs of the step to the origin of the failure.

Going back from the origin, every call is left through the operand that is furthest from ordinary numbers. Of a bad
gradient there are two ways: that of the values up to the origin, and that of the gradient from the loss back to it.
A terminal shows the last of these calls (`steps`) and the lines around the origin (`source_lines`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from reprokit.locate.domains import DOMAINS, Domain
from reprokit.locate.failure import Failure, label_of
from reprokit.locate.ranges import Range, measure, range_text
from reprokit.locate.samples import bad_rows
from reprokit.locate.spelling import short_name
from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, local_part
from reprokit.program.dataflow import Edge, NodeOwners, calls_after, edge_of, needed_calls
from reprokit.program.dataflow import written_by as written_values
from reprokit.program.functions import GRAD_READ
from reprokit.program.interpreter import determinism
from reprokit.program.ir import AUTOGRAD_BACKWARD, OPAQUE, Call, Ref, iter_refs
from reprokit.program.observe import Trace
from reprokit.render.names import labels
from reprokit.render.printer import call_text
from reprokit.snapshot.format import Snapshot

MAX_ROWS, MAX_COLUMNS = 24, 64
_MOST_INDEXES = 6  # that are worth listing


@dataclass(frozen=True, slots=True)
class Positions:
    """A tensor's bad elements. The last dimension runs over the columns of ``cells``, all others over its rows.

    A cell is ``nan``, ``+inf``, ``-inf`` or empty, and stands for as many neighbours as it takes to fit; it is bad when
    any of them is, and ``nan`` before anything else.
    """

    name: str
    shape: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]
    size: tuple[int, int]  # the number of rows and columns that stand behind it
    counts: dict[str, int]
    pattern: str
    rows: tuple[int, ...] = ()  # the bad indexes of the first dimension, if they are few

    @property
    def num_finite(self) -> int:
        """Elements that are finite."""
        return self.size[0] * self.size[1] - sum(self.counts.values())

    @property
    def is_condensed(self) -> bool:
        """True if a cell stands for several elements."""
        return self.size != (len(self.cells), len(self.cells[0]))


def positions_of(tensor: torch.Tensor, name: str) -> Positions | None:
    """The places where ``tensor`` is not finite; ``None`` if it is finite, or has no floating-point elements."""
    values = local_part(tensor.detach())
    if not values.is_floating_point() or values.layout is not torch.strided or values.is_meta or not values.numel():
        return None
    values = values.float() if values.element_size() == 1 else values
    masks = {way: bad_mask(values, way) for way in (NAN, PLUS, MINUS)}
    counts = {way: int(mask.sum()) for way, mask in masks.items()}
    if not any(counts.values()):
        return None
    columns = values.shape[-1] if values.dim() else 1
    rows = values.numel() // columns
    grids = {way: _grid(mask.reshape(rows, columns)).tolist() for way, mask in masks.items() if counts[way]}
    first = next(iter(grids.values()))
    cells = tuple(
        tuple(next((way for way, grid in grids.items() if grid[row][column]), "") for column in range(len(first[0])))
        for row in range(len(first))
    )
    bad = masks[NAN] | masks[PLUS] | masks[MINUS]
    found = {way: count for way, count in counts.items() if count}
    return Positions(name, tuple(tensor.shape), cells, (rows, columns), found, pattern_of(bad), bad_rows(bad))


def pattern_of(bad: torch.Tensor) -> str:
    """The pattern of the bad elements as a sentence: all, one, whole slices, or scattered."""
    total, count = bad.numel(), int(bad.sum())
    if count == total:
        return "Every element is bad." if total > 1 else "It is a single number."
    if count == 1:
        place = ", ".join(str(int(index)) for index in bad.nonzero()[0])
        return f"A single element is bad, at [{place}]."
    for dimension in range(bad.dim()):
        whole = _indexes(bad, dimension, torch.all)
        if whole and bad.dim() > 1 and len(whole) * (total // bad.shape[dimension]) == count:
            return f"Exactly what lies at {_listed(whole)} of dimension {dimension} is bad, and all of it."
    touched = [_indexes(bad, dimension, torch.any) for dimension in range(bad.dim())]
    for dimension, indexes in enumerate(touched):
        if bad.dim() > 1 and len(indexes) < bad.shape[dimension] and len(indexes) <= _MOST_INDEXES:
            return f"All bad elements lie at {_listed(indexes)} of dimension {dimension}."
    return f"{count:,} of {total:,} elements are bad, spread over every dimension."


def _indexes(bad: torch.Tensor, dimension: int, test: Callable[[torch.Tensor, int], torch.Tensor]) -> list[int]:
    """The indexes of a dimension whose slice is bad: throughout (``torch.all``) or somewhere (``torch.any``)."""
    slices = bad.movedim(dimension, 0).reshape(bad.shape[dimension], -1)
    return [int(index) for index in test(slices, 1).nonzero().flatten()]


def _listed(indexes: list[int]) -> str:
    if len(indexes) == 1:
        return f"index {indexes[0]}"
    if len(indexes) > _MOST_INDEXES:
        return f"{len(indexes):,} indexes, {indexes[0]} to {indexes[-1]},"
    return f"the indexes {', '.join(map(str, indexes[:-1]))} and {indexes[-1]}"


def _grid(mask: torch.Tensor) -> torch.Tensor:
    """The mask with at most so many rows and columns; a cell is set when any element behind it is."""
    sizes = (min(mask.shape[0], MAX_ROWS), min(mask.shape[1], MAX_COLUMNS))
    places = mask.nonzero()
    grid = torch.zeros(sizes, dtype=torch.bool)
    grid[places[:, 0] * sizes[0] // mask.shape[0], places[:, 1] * sizes[1] // mask.shape[1]] = True
    return grid


@dataclass
class Survey(Trace[Range]):
    """A trace of ranges, and the places where the bad tensor is bad."""

    failure: Failure = field(kw_only=True)
    name: str = field(default="", kw_only=True)  # of the bad tensor
    inputs: dict[int, Range] = field(default_factory=dict)  # of what the program was given, when it was first read
    leaf_gradients: dict[int, Range] = field(default_factory=dict)  # left in ``.grad``, or given to an optimizer
    operands: dict[int, Range] = field(default_factory=dict)  # what the origin read
    optimizer: dict[str, Range] = field(default_factory=dict)  # a step's, for the parameter it ruined
    positions: Positions | None = None  # of the bad elements
    readers: dict[int, list[int]] = field(default_factory=dict)  # by value: the calls that read it
    error: Exception | None = None  # that ended the run
    parts: Mapping[int, Mapping[Any, Set[int]]] | None = None  # some readers of a value in groups, by a key
    passed: dict[tuple[Any, int], Range] = field(default_factory=dict)  # what a group sent of a gradient

    def __post_init__(self) -> None:
        self._given = {item.value for item in self.program.inputs if item.role != "rng"}
        self._states = {item.value for item in self.program.inputs if item.role == "rng"}
        self._owners = NodeOwners()
        self._edges: dict[Edge, int] = {}  # of what the running call reads
        self._sent: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by value: calls, and what they sent to it
        self._is_cut = self.parts is not None and any(map(_goes_on, self.program.calls))
        self._begun = self._made = -1  # the backward call of the loop; the call whose derivative the program computes
        self._before: dict[Any, tuple[int, torch.Tensor]] = {}  # what arrived before in the same call of the loop
        for index, call in enumerate(self.program.calls):
            for value in call.input_refs() if call.target != OPAQUE else ():
                self.readers.setdefault(value, []).append(index)

    def range_of(self, value: int, before: int) -> Range | None:
        """The range of a value when call number ``before`` reads it."""
        index = self.writer(value, before)
        return self.written(index, value) if index is not None else self.inputs.get(value)

    def written(self, index: int, value: int) -> Range | None:
        """The range of a value after call number ``index``."""
        return self.writes.get(index, {}).get(value)

    @property
    def arrived(self) -> dict[int, Range]:
        """What the backward passes sent to a value: the first gradient that is bad, else the last."""
        return {
            value: next((found for found in seen if found.is_bad), seen[-1])
            for (_, value), seen in self.gradients.items()
        }

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what the call reads; wait for the gradients of inputs."""
        super().before(index, call, values)
        for value, known in self.reads[index].items():
            if value in self._given and value not in self.inputs:
                self.inputs[value] = known
                if values[value].requires_grad:
                    self._wait_for_gradients(-1, value, values[value])
        read = [value for value in call.input_refs() if value in (self.parts or ()) and value in values]
        self._edges = {edge: value for value in read if (edge := edge_of(values[value])) is not None}
        if self._is_cut:
            self._follow_custom(index, call, values)
        failure = self.failure
        if call.is_optimizer_step:
            self._note_optimizer(index, call, values)
        if index != failure.call_index or call.is_optimizer_step:
            return
        self.operands = {value: known for value, known in self.reads[index].items() if value not in self._states}
        if any(point.test == "at_most" for point in DOMAINS.get(short_name(call), Domain(())).points):
            for value, known in self.operands.items():  # their signs may be the cause, such as of a logarithm
                writer = self.writer(value, index)
                held = self.inputs if writer is None else self.writes[writer]
                held[value] = self.operands[value] = replace(known, ends=measure(values[value], is_signed=True).ends)
        bad = values.get(failure.value) if failure.value is not None else None
        if failure.is_derivative and bad is not None and bad.requires_grad:
            bad.register_hook(self._note_positions)  # type: ignore[no-untyped-call]

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        super().after(index, call, values)
        if self._is_cut and call.name == "requires_grad_":  # what a custom function returned
            self._wait_for_gradients(index, call.output_refs()[0], values[call.output_refs()[0]])
        if self.parts:
            for node in self._owners.own_outputs(index, call, values):
                for slot, edge in enumerate(node.next_functions):
                    if edge in self._edges:
                        node.register_hook(partial(self._note_part, index, self._edges[edge], slot))
        bad = values.get(self.failure.value) if self.failure.value is not None else None
        if index == self.failure.call_index and not self.failure.is_derivative and bad is not None:
            self._note_positions(bad)

    def _note_part(self, index: int, value: int, slot: int, sent: Sequence[torch.Tensor | None], _: object) -> None:
        if (gradient := sent[slot]) is not None:
            self._sent.setdefault(value, []).append((index, gradient))

    def _follow_custom(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """The backward of a custom function is calls of the program, between two backward calls for one of the loop."""
        if _goes_on(call):
            calls = self.program.calls
            for ref, gradient in zip(iter_refs(call.args[0]), iter_refs(call.args[1]), strict=False):
                readers = (i for i in self.readers[ref.value] if calls[i].scope == calls[self._made].scope)
                self._sent.setdefault(ref.value, []).append((next(readers, -1), values[gradient.value]))
        elif call.is_differentiation:
            self._begun = index
        elif call.target == GRAD_READ and call.site is None:
            self._made = self.writer(call.input_refs()[0], index) or 0

    def _whole(self, key: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient with what arrived at the same place in the same backward call of the loop before."""
        if self._is_cut:
            begun, before = self._before.get(key, (-1, gradient))
            gradient = before + gradient if begun == self._begun else gradient
            self._before[key] = self._begun, gradient
        return gradient

    def _arrive(self, index: int, value: int, gradient: torch.Tensor) -> None:
        super()._arrive(index, value, self._whole((index, value), gradient.detach()))
        sent = self._sent.pop(value, [])
        for key, calls in (self.parts or {}).get(value, {}).items():  # what its readers have sent is complete
            own = [part.detach() for reader, part in sent if reader in calls]
            if own and (found := self.measure(self._whole((key, value), functools.reduce(torch.add, own)))) is not None:
                self.passed[key, value] = found

    def _note_positions(self, tensor: torch.Tensor) -> None:
        self.positions = self.positions or positions_of(tensor, self.name)

    def _note_optimizer(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        groups, read = (call.kwargs["params"], call.kwargs["grads"], call.kwargs["state"]), self.reads[index]
        for param, grad, state in (row for group in zip(*groups, strict=True) for row in zip(*group, strict=True)):
            gradient = values[grad.value] if isinstance(grad, Ref) else values[param.value].grad
            given = self.measure(gradient) if gradient is not None else None
            if given is not None:
                self.leaf_gradients[param.value] = given
            if (index, param.value) == (self.failure.call_index, self.failure.value):
                parts = {name: read.get(part.value) for name, part in state.items() if isinstance(part, Ref)}
                named = {"parameter": read.get(param.value), "gradient": given, **parts}
                self.optimizer = {name: seen for name, seen in named.items() if seen is not None}


def _goes_on(call: Call) -> bool:
    """True for a backward call that the loop has not made: it goes on behind the backward of a custom function."""
    return call.target == AUTOGRAD_BACKWARD and call.site is None and len(call.args) > 1


def survey(
    snapshot: Snapshot,
    name: str = "",
    shown: Iterable[int] | None = None,
    *,
    histograms: bool = False,
    parts: Mapping[int, Mapping[Any, Set[int]]] | None = None,
) -> Survey:
    """Run the captured step once and measure it, as far as it can be run here; ``name`` is that of the bad tensor.

    ``shown`` are the calls whose operands, results and gradients matter beside those of the origin, ``None`` for all:
    only these run, with what they depend on, and means and deviations are left out. ``histograms``: measure these too.
    ``parts`` are those of `Survey`, for a trace, whose ranges are signed.
    """
    only = needed_calls(snapshot.program.calls, {*shown, *ends(snapshot)}) if shown is not None else None
    range_of = partial(measure, moments=shown is None, histogram=histograms, is_signed=parts is not None)
    failure = snapshot.failure
    found = Survey(snapshot.program, range_of, gradients_of=range_of, failure=failure, name=name, parts=parts)
    with determinism(snapshot.settings), warnings.catch_warnings(action="ignore"):
        try:
            outcome = found.run(snapshot.tensors, only=only)
        except Exception as error:  # what else is known is worth showing whatever this machine lacks
            found.error = error
        else:
            found.error = outcome.error if outcome.error_call != snapshot.failure.call_index else None
    if shown is None:
        left = {value: range_of(gradient) for value, gradient in found.outcome.gradients.items()}
        found.leaf_gradients = left | found.leaf_gradients
    return found


def ends(snapshot: Snapshot) -> set[int]:
    """The origin, and the backward passes that may have made its bad gradient."""
    calls, failure = snapshot.program.calls, snapshot.failure
    if failure.call_index is None:
        return {len(calls) - 1}
    after = calls_after(calls, failure.call_index) if failure.is_derivative else []
    return {failure.call_index, *(index for index in after if calls[index].is_differentiation)}


def written_by(call: Call, failure: Failure) -> tuple[int, ...]:
    """The values that a call writes, of an optimizer's parameters only the one that it ruined."""
    if call.is_optimizer_step:
        return (failure.value,) if failure.value in call.input_refs() else ()
    return written_values(call)


MAX_BEFORE = 16
WORTH_LEAVING = 2  # so few take hardly more room than the line that says they are missing
MAX_CALL = 160


class Stop(NamedTuple):
    """One stop of a way: a call or an input, with the range of what it gave; ``None`` where the run did not get."""

    text: str
    range: Range | None
    module: str = ""
    place: str = ""
    code: str = ""
    is_origin: bool = False


class Way(NamedTuple):
    """Stops in the order in which they happened; ``num_left_out`` are missing after the first one."""

    title: str
    about: str
    stops: Sequence[Stop]
    num_left_out: int = 0


def ways(found: Survey, names: Mapping[int, str]) -> list[Way]:
    """The ways to draw, most telling first; ``names`` is what values are called."""
    made = [_of_optimizer(found, names), _of_gradient(found, names), _of_values(found, names)]
    return [way for way in made if way is not None and any(stop.range is not None for stop in way.stops)]


def _of_values(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    readers = found.readers.get(failure.value, ()) if failure.value is not None else ()
    origin = failure.call_index if failure.call_index is not None else next(iter(readers), None)
    if origin is None or found.program.calls[origin].is_optimizer_step:
        return None
    start, path = _path_to(found, origin)
    is_input_bad = failure.call_index is None
    first = [Stop(names[start], found.inputs.get(start), is_origin=is_input_bad)] if start is not None else []
    stops = [_stop(found, index, names, is_origin=index == failure.call_index) for index in path]
    kept, left_out = _shortened([*first, *stops])
    about = "From the inputs of the step to the origin, going back from each call by its least ordinary operand."
    return Way("The values", about, kept, left_out)


def _of_gradient(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    if not failure.is_derivative or failure.call_index is None or failure.kind.raises:
        return None
    path = _path_of_gradient(found, failure.call_index)
    stops = [
        _placed(Stop(f"gradient of {names[value]}", found.arrived[value]), found.program.calls[index])
        for index, value in reversed(path)
    ]
    if failure.value is not None:
        last = _stop(found, failure.call_index, names, is_origin=True)
        node = f"{failure.backward_node}: " if failure.backward_node else ""
        text = f"{node}gradient of {names.get(failure.value, 'its input')}"
        stops.append(last._replace(text=text, range=found.arrived.get(failure.value)))
    kept, left_out = _shortened(stops)
    about = "From the loss back to the call whose derivative is the origin."
    return Way("The gradient", about, kept, left_out)


def _of_optimizer(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    if not found.optimizer or failure.call_index is None or failure.value is None:
        return None
    name = names.get(failure.value, "parameter")
    words = {"parameter": f"{name} before the step", "gradient": f"gradient of {name}"}
    stops = [Stop(words.get(part, f"{part} of {name}"), known) for part, known in found.optimizer.items()]
    after = _stop(found, failure.call_index, names, is_origin=True)
    after = after._replace(text=f"{name} after the step", range=found.written(failure.call_index, failure.value))
    about = "What the step was given for this parameter, and what it made of it."
    return Way("The optimizer step", about, (*stops, after))


def _path_to(found: Survey, origin: int) -> tuple[int | None, list[int]]:
    """The input that the way starts from, ``None`` without any, and the calls on it, the origin last."""
    if found.failure.call_index is None:
        return found.failure.value, [origin]
    path = [origin]
    while True:
        index = path[0]
        operands = [(value, found.range_of(value, index)) for value in found.program.calls[index].input_refs()]
        known = [(value, seen) for value, seen in operands if seen is not None]
        if not known:
            return None, path
        bad = [pair for pair in known if pair[1].is_bad]
        makers = [(pair, found.writer(pair[0], index)) for pair in known]  # `torch.zeros` makes it out of nothing
        computed = [pair for pair, made in makers if made is not None and found.program.calls[made].input_refs()]
        value, _ = max(bad or computed or known, key=lambda pair: _oddness(pair[1]))
        before = found.writer(value, index)
        if before is None:
            return value, path
        path.insert(0, before)


def _oddness(found: Range) -> tuple[bool, bool, float]:
    """The distance of a range from ordinary numbers: not finite, of floats, and decades from 1.

    The smallest of many ordinary numbers is small: one of a thousand is three decades below the others, and more.
    """
    high = [abs(math.log10(found.high))] if found.high else []
    usual = 1 + math.log10(max(1, math.prod(found.shape)))
    least = [abs(math.log10(found.least)) - usual] if found.least else []
    zero = [100.0] if found.high == 0 else []
    return found.is_bad, found.is_float, max([*high, *least, *zero], default=0.0)


def _path_of_gradient(found: Survey, origin: int) -> list[tuple[int, int]]:
    path: list[tuple[int, int]] = []
    index: int | None = origin
    while index is not None:
        given = [value for value in found.program.calls[index].output_refs() if value in found.arrived]
        if not given:
            break
        value = max(given, key=lambda value: _oddness(found.arrived[value]))
        path.append((index, value))
        index = _next_reader(found, value, index)
    return path


def _next_reader(found: Survey, value: int, after: int) -> int | None:
    """The call that reads a value and has the least ordinary gradient."""
    readers = []
    for index in found.readers.get(value, ()):
        outputs = found.program.calls[index].output_refs()
        given = [_oddness(found.arrived[output]) for output in outputs if output in found.arrived]
        if index > after and value not in outputs and given:
            readers.append((index, max(given)))
    return max(readers, key=lambda pair: pair[1])[0] if readers else None


def _shortened(stops: list[Stop]) -> tuple[list[Stop], int]:
    """The first stop and those nearest to the origin, which is the last, and how many are left out between them."""
    left_out = len(stops) - MAX_BEFORE if len(stops) > MAX_BEFORE + WORTH_LEAVING else 0
    return [*stops[:1], *stops[1 + left_out :]], left_out


def _stop(found: Survey, index: int, names: Mapping[int, str], *, is_origin: bool = False) -> Stop:
    call = found.program.calls[index]
    made = [seen for value in written_by(call, found.failure) if (seen := found.written(index, value))]
    worst = max(made, key=_oddness, default=None)
    text = call_text(call, names)
    if len(text) > MAX_CALL:  # such as a call with hundreds of operands
        text = f"{text[: MAX_CALL * 3 // 4]} … {text[-MAX_CALL // 4 :]}"
    return _placed(Stop(text, worst, is_origin=is_origin), call)


def _placed(stop: Stop, call: Call) -> Stop:
    site = call.site
    if site is not None:
        stop = stop._replace(place=site.place, code=site.code.strip())
    return stop._replace(module=label_of(call) or "")


LINES_AROUND = 3
CALLS_BEFORE = 4


class SourceLine(NamedTuple):
    """A line of the user's source that the snapshot holds."""

    number: int
    code: str
    is_origin: bool


class ShownCall(NamedTuple):
    """A call with the range of what it returned, or an operand of the origin with its range."""

    text: str
    range: str
    is_origin: bool = False


def source_lines(snapshot: Snapshot) -> list[SourceLine]:
    """The origin's line among its neighbours, as far as calls of the same function tell them."""
    site = snapshot.failure.site
    if site is None:
        return []
    noted = {
        note.line + offset: code
        for note in snapshot.program.modules.values()
        if note.file == site.file
        for offset, code in enumerate(note.source.splitlines())
    }
    sites = (call.site for call in snapshot.program.calls if call.site is not None)
    called = {one.line: one.code for one in sites if (one.file, one.function) == (site.file, site.function)}
    known = {**noted, **called, site.line: site.code}
    near = range(site.line - LINES_AROUND, site.line + LINES_AROUND + 1)
    return [SourceLine(number, known[number], number == site.line) for number in near if known.get(number, "").strip()]


def steps(snapshot: Snapshot) -> list[ShownCall]:
    """The operands of the origin, the calls before it, and the origin itself, measured in one run of the program.

    Empty where there is no origin, or where the program cannot be run up to it here.
    """
    program, failure = snapshot.program, snapshot.failure
    if failure.call_index is None:
        return []
    shown = range(max(0, failure.call_index - CALLS_BEFORE), failure.call_index + 1)
    found, names = survey(snapshot, shown=shown), labels(program)
    if found.optimizer:
        return [ShownCall(stop.text, range_text(stop.range), stop.is_origin) for stop in ways(found, names)[0].stops]
    if not found.operands:
        return []
    written = {index: written_by(program.calls[index], failure) for index in shown}
    inside = {value for values in written.values() for value in values}
    rows = [ShownCall(names[value], range_text(seen)) for value, seen in found.operands.items() if value not in inside]
    for index, values in written.items():
        ranges = "; ".join(range_text(found.written(index, value)) for value in values)
        rows.append(ShownCall(call_text(program.calls[index], names), ranges, index == failure.call_index))
    if failure.is_derivative and failure.value in found.arrived:
        gradient = range_text(found.arrived[failure.value])
        rows.append(ShownCall(f"gradient of {names[failure.value]}", gradient, is_origin=True))
    return rows
