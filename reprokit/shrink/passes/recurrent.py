"""Recurrent layers: one sequence instead of a packed batch, and one layer in one direction instead of several.

The weights of all layers and directions are one list, so none of this is a matter of slicing. A deeper layer gets what
the layers below hand it, which one run tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit.program.functions import function_named
from reprokit.program.ir import AUTOGRAD_BACKWARD, Call, Ref, iter_refs
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.probe import RECURRENT, is_safe
from reprokit.shrink.problem import Problem

_MAX_TRIED = 8  # the likeliest layers and sequences come first


def simplify_recurrent(problem: Problem) -> None:
    """Take what can go out of every recurrent layer."""
    for index in range(len(problem.best.program.calls)):
        layer = _layer_at(problem.best, index)
        if layer is not None and layer.batch_sizes is not None:
            rows = problem.failure.element if problem.failure.value == layer.output else None
            _first(problem, layer.single_sequences(rows[0] if rows else 0), "one sequence")
        layer = _layer_at(problem.best, index)
        if layer is not None and layer.num_cells > 1:
            _first(problem, layer.fewer_cells(), "fewer layers or directions")


def _first(problem: Problem, candidates: Iterator[Candidate], change: str) -> bool:
    tried = (candidate for candidate, _ in zip(candidates, range(_MAX_TRIED), strict=False))
    return any(problem.consider(candidate, change) for candidate in tried)


def _layer_at(candidate: Candidate, index: int) -> _Layer | None:
    """The recurrent layer at this call, if all it reads are inputs of the program that nothing else reads."""
    call = candidate.program.calls[index] if index < len(candidate.program.calls) else None
    if call is None or call.target not in RECURRENT or not is_safe(candidate.program, candidate.shapes):
        return None
    read = call.input_refs()
    elsewhere = {value for other in candidate.program.calls if other is not call for value in other.input_refs()}
    place = next((place for place in (2, 3) if place < len(call.args) and isinstance(call.args[place], list)), None)
    is_alone = all(value in candidate.tensors and value not in elsewhere for value in read)
    is_plain = isinstance(call.args[0], Ref) and len(call.args) == 9 and not call.kwargs
    return _Layer(candidate, index, place) if place is not None and is_alone and is_plain else None


@dataclass(frozen=True, slots=True)
class _Layer:
    """A call of `torch.lstm` and its like; ``place`` is where its weights stand among the arguments."""

    candidate: Candidate
    index: int
    place: int

    @property
    def call(self) -> Call:
        """The call."""
        return self.candidate.program.calls[self.index]

    @property
    def batch_sizes(self) -> Ref | None:
        """How many sequences are still running at each step, for packed ones."""
        return self.call.args[1] if self.place == 3 else None

    @property
    def output(self) -> int:
        """The value number of the output of all steps."""
        return self.call.output_refs()[0]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return int(self.call.args[self.place + 2])

    @property
    def num_directions(self) -> int:
        """1 or 2."""
        return 1 + bool(self.call.args[self.place + 5])

    @property
    def num_cells(self) -> int:
        """Layers times directions."""
        return self.num_layers * self.num_directions

    @property
    def time_axis(self) -> int:
        """The dimension of the input along which the steps lie."""
        is_batch_first = self.batch_sizes is None and bool(self.call.args[-1])
        return int(is_batch_first and self._tensor(self.call.args[0]).dim() == 3)

    def single_sequences(self, row: int) -> Iterator[Candidate]:
        """Each sequence of a packed batch by itself, the one that ``row`` belongs to first."""
        assert self.batch_sizes is not None
        sizes = [int(size) for size in self._tensor(self.batch_sizes)]
        starts = [sum(sizes[:step]) for step in range(len(sizes))]
        first = next((row - start for start, size in zip(starts, sizes, strict=True) if row < start + size), 0)
        for number in sorted(range(max(sizes, default=0)), key=lambda number: (number != first, number)):
            kept = [start + number for start, size in zip(starts, sizes, strict=True) if size > number]
            rows = torch.tensor(kept)
            tensors = {self.call.args[0].value: self._tensor(self.call.args[0])[rows].unsqueeze(1)}
            for ref in self._states():
                tensors[ref.value] = self._tensor(ref)[:, number : number + 1]
            for output, gradient in self._gradients():
                given = self._tensor(gradient)
                is_state = output != self.output
                tensors[gradient.value] = given[:, number : number + 1] if is_state else given[rows].unsqueeze(1)
            args = (self.call.args[0], *self.call.args[2:], False)
            yield self._changed(args, tensors)

    def fewer_cells(self) -> Iterator[Candidate]:
        """Each layer in each direction by itself, the first that gives something bad first; then all layers in one
        direction, and one layer less at either end."""
        layers, directions = range(self.num_layers), range(self.num_directions)
        outputs = [self._output_of(layer) for layer in layers]
        is_good = {cell: self._is_good(outputs[cell[0]], cell[1]) for cell in itertools.product(layers, directions)}
        order = sorted(is_good, key=is_good.__getitem__)
        kept: list[tuple[range, tuple[int, ...]]] = [(range(layer, layer + 1), (half,)) for layer, half in order]
        kept += [(layers, (direction,)) for direction in directions]
        kept += [(layers[1:], tuple(directions)), (layers[:-1], tuple(directions))]
        for some_layers, some_directions in kept:
            is_whole = some_layers == layers and len(some_directions) == len(directions)
            is_reversed = some_directions == (1,)
            below = outputs[some_layers.start - 1] if some_layers.start else self._tensor(self.call.args[0])
            is_usable = not some_layers.start or bool(below.isfinite().all())
            if is_usable and not is_whole and some_layers and not (is_reversed and self.batch_sizes is not None):
                yield self._only(some_layers, some_directions, below)

    def _only(self, layers: range, directions: tuple[int, ...], below: torch.Tensor) -> Candidate:
        """Some layers in some directions, on top of what is below them."""
        cells = [layer * self.num_directions + direction for layer in layers for direction in directions]
        is_reversed, is_halved = directions == (1,), len(directions) < self.num_directions
        weights = self.call.args[self.place]
        each = len(weights) // self.num_cells
        tensors = {self.call.args[0].value: below.flip(self.time_axis) if is_reversed else below}
        for cell in cells[1:] if is_halved else ():
            first = weights[cell * each]  # it reads both directions of the layer below
            tensors[first.value] = self._tensor(first).chunk(self.num_directions, dim=1)[directions[0]]
        for ref in self._states():
            tensors[ref.value] = self._tensor(ref)[cells]
        for output, gradient in self._gradients():
            given = self._tensor(gradient)
            if output != self.output:
                tensors[gradient.value] = given[cells]
            elif is_halved:
                half = given.chunk(self.num_directions, dim=-1)[directions[0]]
                tensors[gradient.value] = half.flip(self.time_axis) if is_reversed else half
        args = list(self.call.args)
        args[self.place] = [ref for cell in cells for ref in weights[cell * each : (cell + 1) * each]]
        args[self.place + 2] = len(layers)
        args[self.place + 5] = len(directions) == 2
        return self._changed(tuple(args), tensors)

    def _output_of(self, layer: int) -> torch.Tensor:
        """What the layers up to this one give, without dropout between them."""
        cells = (layer + 1) * self.num_directions
        weights = self.call.args[self.place]
        args = list(self.call.args)
        args[self.place] = weights[: cells * (len(weights) // self.num_cells)]
        args[self.place + 2] = layer + 1
        args[self.place + 3] = 0.0
        states = {ref.value: self._tensor(ref)[:cells] for ref in self._states()}

        def resolve(value: Any) -> Any:
            if isinstance(value, Ref):
                return states.get(value.value, self._tensor(value))
            return type(value)(resolve(item) for item in value) if isinstance(value, (list, tuple)) else value

        with torch.no_grad():
            found: torch.Tensor = function_named(self.call.target)(*resolve(args))[0]
        return found

    def _is_good(self, output: torch.Tensor, direction: int) -> bool:
        return bool(output.chunk(self.num_directions, dim=-1)[direction].isfinite().all())

    def _states(self) -> list[Ref]:
        return list(iter_refs(self.call.args[self.place - 1]))

    def _gradients(self) -> Iterator[tuple[int, Ref]]:
        """The outputs that are differentiated, each with the gradient that it is given."""
        last = self.candidate.program.calls[-1]
        if last.target == AUTOGRAD_BACKWARD and len(last.args) > 1:
            for output, gradient in zip(iter_refs(last.args[0]), iter_refs(last.args[1]), strict=False):
                if output.value in self.call.output_refs():
                    yield output.value, gradient

    def _tensor(self, ref: Ref) -> torch.Tensor:
        return self.candidate.tensors[ref.value]

    def _changed(self, args: tuple[Any, ...], tensors: dict[int, torch.Tensor]) -> Candidate:
        calls = list(self.candidate.program.calls)
        calls[self.index] = replace(self.call, args=args)
        program = replace(self.candidate.program, calls=tuple(calls))
        contiguous = {value: tensor.detach().contiguous() for value, tensor in tensors.items()}
        return replace(self.candidate, program=program).with_tensors(contiguous).pruned()
