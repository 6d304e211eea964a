"""One observed run of a program: ranges of all values and gradients, and the places where the bad tensor is bad.

Only ranges are kept, so the run needs hardly more memory than the program itself. Values are measured when they are
written, because a call in place changes them later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.domains import DOMAINS, Domain
from reprokit.locate.failure import Failure
from reprokit.locate.ranges import Range, ends_of, measure
from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, local_part
from reprokit.program.dataflow import calls_after, needed_calls
from reprokit.program.interpreter import determinism, run
from reprokit.program.ir import OPAQUE, Call, Program, Ref
from reprokit.shrink.exact import written_by as written_values
from reprokit.snapshot.format import Snapshot

MAX_ROWS, MAX_COLUMNS = 24, 64
_MOST_INDEXES = 6  # that are worth listing


@dataclass(frozen=True, slots=True)
class Positions:
    """A tensor's bad elements. The last dimension runs over the columns of ``cells``, all others over its rows.

    A cell is ``nan``, ``+inf``, ``-inf`` or empty, and stands for as many neighbours as it takes to fit; it is
    bad when any of them is, and ``nan`` before anything else. ``size`` is the number of rows and columns that stand
    behind it.
    """

    name: str
    shape: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]
    size: tuple[int, int]
    counts: dict[str, int]
    pattern: str

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
    pattern = pattern_of(masks[NAN] | masks[PLUS] | masks[MINUS])
    found = {way: count for way, count in counts.items() if count}
    return Positions(name, tuple(tensor.shape), cells, (rows, columns), found, pattern)


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
class Survey:
    """Ranges and places measured in one run.

    ``written`` holds the range of a value after a call, by (index, value); ``inputs`` the range of what the program was
    given, when it was first read; ``gradients`` what the backward passes sent to a value, ``leaf_gradients`` what the
    step left in ``.grad`` of a leaf. ``operands`` is what the
    origin read, ``optimizer`` what an optimizer's step had for the parameter it ruined. ``positions`` is about the bad
    tensor. ``writers`` and ``readers`` list for every value the calls that write and read it, in order. ``error`` ended
    the run before its time.
    """

    program: Program
    failure: Failure
    name: str = ""
    written: dict[tuple[int, int], Range] = field(default_factory=dict)
    inputs: dict[int, Range] = field(default_factory=dict)
    gradients: dict[int, Range] = field(default_factory=dict)
    leaf_gradients: dict[int, Range] = field(default_factory=dict)
    operands: dict[int, Range] = field(default_factory=dict)
    optimizer: dict[str, Range] = field(default_factory=dict)
    positions: Positions | None = None
    writers: dict[int, list[int]] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    error: Exception | None = None

    def __post_init__(self) -> None:
        for index, call in enumerate(self.program.calls):
            if call.target != OPAQUE:
                for value in call.input_refs():
                    self.readers.setdefault(value, []).append(index)
                for value in written_by(call, self.failure):
                    self.writers.setdefault(value, []).append(index)

    def writer(self, value: int, before: int) -> int | None:
        """The last call before number ``before`` that wrote this value."""
        return next((index for index in reversed(self.writers.get(value, [])) if index < before), None)

    def range_of(self, value: int, before: int) -> Range | None:
        """The range of a value when call number ``before`` reads it."""
        index = self.writer(value, before)
        return self.written.get((index, value)) if index is not None else self.inputs.get(value)


def survey(
    snapshot: Snapshot, name: str = "", shown: Iterable[int] | None = None, *, histograms: bool = False
) -> Survey:
    """Run the captured step once and measure it, as far as it can be run here; ``name`` is that of the bad tensor.

    ``shown`` are the calls whose operands, results and gradients matter beside those of the origin, ``None`` for all:
    only these run, with what they depend on, and means and deviations are left out. ``histograms``: measure these too.
    """
    only = needed_calls(snapshot.program.calls, {*shown, *ends(snapshot)}) if shown is not None else None
    found = Survey(snapshot.program, snapshot.failure, name)
    range_of = partial(measure, moments=shown is None, histogram=histograms)
    with determinism(snapshot.settings), warnings.catch_warnings(action="ignore"):
        try:
            outcome = run(
                snapshot.program,
                snapshot.tensors,
                observer=_Watch(found, range_of),
                keep=frozenset(),
                only=only,
            )
        except Exception as error:  # what else is known is worth showing whatever this machine lacks
            found.error = error
        else:
            found.error = outcome.error if outcome.error_call != snapshot.failure.call_index else None
            if shown is None:
                found.leaf_gradients = {value: range_of(gradient) for value, gradient in outcome.gradients.items()}
    return found


def ends(snapshot: Snapshot) -> set[int]:
    """The origin, and the backward passes that may have made its bad gradient."""
    calls, failure = snapshot.program.calls, snapshot.failure
    if failure.call_index is None:
        return {len(calls) - 1}
    after = calls_after(calls, failure.call_index) if failure.is_derivative else []
    return {failure.call_index, *(index for index in after if calls[index].is_differentiation)}


class _Watch:
    def __init__(self, found: Survey, range_of: Callable[[torch.Tensor], Range]) -> None:
        self._found = found
        self._measure = range_of
        self._inputs = {item.value for item in found.program.inputs if item.role != "rng"}
        self._states = {item.value for item in found.program.inputs if item.role == "rng"}
        self._hooked: set[int] = set()

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure inputs when they are first read, and what the origin reads."""
        found = self._found
        for value in call.input_refs():
            if value in values and value in self._inputs and value not in found.inputs:
                found.inputs[value] = self._measure(values[value])
                self._hook(value, values[value])
        if index != found.failure.call_index:
            return
        if call.is_optimizer_step:
            found.optimizer = _of_parameter(call, found.failure.value, values)
        else:
            given = (value for value in call.input_refs() if value in values and value not in self._states)
            found.operands = {value: self._measure(values[value]) for value in given}
            if any(p.test == "below" for p in DOMAINS.get(short_name(call), Domain()).forward):
                self._add_ends(index, values)

    def _add_ends(self, index: int, values: Mapping[int, torch.Tensor]) -> None:
        """Measure the signs of what the origin reads, where they may be the cause, such as of a logarithm."""
        found = self._found
        for value, operand in found.operands.items():
            known = found.operands[value] = replace(operand, ends=ends_of(values[value]))
            writer = found.writer(value, index)
            if writer is not None:
                found.written[writer, value] = known
            else:
                found.inputs[value] = known

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what a call wrote."""
        found = self._found
        for value in written_by(call, found.failure):
            if value in values:
                found.written[index, value] = self._measure(values[value])
                self._hook(value, values[value])
        failure = found.failure
        bad = values.get(failure.value) if failure.value is not None else None
        if index == failure.call_index and not failure.is_derivative and bad is not None:
            found.positions = positions_of(bad, found.name)

    def _hook(self, value: int, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and value not in self._hooked:
            self._hooked.add(value)
            tensor.register_hook(self._recorder(value))  # type: ignore[no-untyped-call]

    def _recorder(self, value: int) -> Callable[[torch.Tensor], None]:
        found, measured = self._found, self._measure

        def record(gradient: torch.Tensor) -> None:
            known = found.gradients.get(value)
            if known is not None and known.is_bad:
                return
            found.gradients[value] = measured(gradient)
            if found.failure.is_derivative and value == found.failure.value and found.positions is None:
                found.positions = positions_of(gradient, found.name)

        return record


def written_by(call: Call, failure: Failure) -> tuple[int, ...]:
    """The values that a call writes, of an optimizer's parameters only the one that it ruined."""
    if call.is_optimizer_step:
        return (failure.value,) if failure.value in call.input_refs() else ()
    return written_values(call)


def _of_parameter(call: Call, parameter: int | None, values: Mapping[int, torch.Tensor]) -> dict[str, Range]:
    kwargs = call.kwargs
    for params, grads, states in zip(kwargs["params"], kwargs["grads"], kwargs["state"], strict=True):
        for ref, grad, state in zip(params, grads, states, strict=True):
            if ref.value != parameter:
                continue
            held = values[ref.value]
            given = values[grad.value] if isinstance(grad, Ref) else held.grad
            named = {"parameter": held, "gradient": given}
            named.update({name: values[part.value] for name, part in state.items() if isinstance(part, Ref)})
            return {name: measure(tensor) for name, tensor in named.items() if tensor is not None}
    return {}
