"""The observer of a run: what its calls read and left behind, and the gradients that arrived at results.

A `Trace` applies one measure to all of these: the ways in which a value is bad, its largest magnitude, its range, its
dtype, or a copy. No tensor is kept alive by it, unless the measure is a copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from reprokit import native, torch_private
from reprokit.program.dataflow import copy_of, node_of
from reprokit.program.functions import GRAD_READ, hidden_writes, is_in_place
from reprokit.program.interpreter import Outcome, Tensors, run
from reprokit.program.ir import Call, Program, iter_refs

T = TypeVar("T")
MOST_COPIED = 1 << 22  # elements, 16 MiB of float32: a search has several processes that copy


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without a graph, as a measure."""
    return copy_of(native.detach(tensor))


@dataclass
class Trace(Generic[T]):
    """What one run of a program saw. What the ``measure`` gives ``None`` for is left out.

    A call leaves something behind in its results, and in values that share memory with what it wrote into.
    """

    program: Program
    measure: Callable[[torch.Tensor], T | None]
    calls: Container[int] | None = None  # those that are measured, all if ``None``
    gradients_of: Callable[[torch.Tensor], T | None] | None = None
    reads: dict[int, dict[int, T]] = field(default_factory=dict)  # by call and value: what the call was given
    writes: dict[int, dict[int, T]] = field(default_factory=dict)  # what it left behind
    gradients: dict[tuple[int, int], list[T]] = field(default_factory=dict)  # in order, with a measure of them
    arrivals: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # of the last: call, rising number
    outcome: Outcome = field(default_factory=Outcome)
    _running: int = -1
    _num_arrived: int = 0
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _storages: dict[int, set[int]] = field(default_factory=dict)
    _known: dict[int, tuple[int, T | None]] = field(default_factory=dict)

    def run(self, tensors: Tensors, keep: frozenset[int] = frozenset(), only: Collection[int] | None = None) -> Outcome:
        """Run the program under observation; ``keep`` and ``only`` as in `interpreter.run`."""
        self.outcome = run(self.program, tensors, observer=self, keep=keep, only=only)
        return self.outcome

    def writer(self, value: int, before: int) -> int | None:
        """The index of the last call before ``before`` that wrote this value (or memory it shares)."""
        writers = self._writers.get(value, [])
        place = bisect_left(writers, before)
        return writers[place - 1] if place else None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what the call reads."""
        self._running = index
        if self.calls is None or index in self.calls:
            self.reads[index] = self._measured(dict.fromkeys(call.input_refs()), values)
        else:
            self._note_memory(call.input_refs(), values)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what the call wrote, and wait for the gradients of its results."""
        written = self._written(call, values)
        for value in written:
            if value in values:
                self._writers.setdefault(value, []).append(index)
        if self.calls is not None and index not in self.calls:
            self._note_memory(written, values)
            return
        self.writes[index] = self._measured(written, values)
        if self.gradients_of is not None:
            for value in call.output_refs():
                if value in values and node_of(values[value]) is not None:
                    self._wait_for_gradients(index, value, values[value])

    def _wait_for_gradients(self, index: int, value: int, tensor: torch.Tensor) -> None:
        native.register_hook(tensor, lambda gradient: self._arrive(index, value, gradient))  # type: ignore[no-untyped-call]

    def _arrive(self, index: int, value: int, gradient: torch.Tensor) -> None:
        found = self.gradients_of(gradient) if self.gradients_of is not None else None
        if found is not None:
            self.gradients.setdefault((index, value), []).append(found)
            self._num_arrived += 1
            self.arrivals[index, value] = self._running, self._num_arrived

    def _measured(self, wanted: Collection[int], values: Mapping[int, torch.Tensor]) -> dict[int, T]:
        self._note_memory(wanted, values)
        found = {value: self._of(value, values[value]) for value in wanted if value in values}
        return {value: measured for value, measured in found.items() if measured is not None}

    def _written(self, call: Call, values: Mapping[int, torch.Tensor]) -> dict[int, None]:
        """Outputs, and for in-place calls every value that shares memory with the target."""
        # A ``.grad`` that was measured already, such as a bad one: what made it so came before
        is_known = call.target == GRAD_READ and any(
            self._known.get(v, (0, None))[1] is not None for v in call.output_refs()
        )
        written = {} if is_known else dict.fromkeys(call.output_refs())
        if call.is_optimizer_step:
            written.update(dict.fromkeys(call.input_refs()))
        for ref in iter_refs(hidden_writes(call.target, call.args, call.kwargs)):
            self._known.pop(ref.value, None)  # its version does not tell
            written[ref.value] = None
        if is_in_place(call.target):
            for target in call.input_refs()[:1]:
                memory = _memory(values[target]) if target in values else 0
                known = {value for value in self._storages.get(memory, ()) if value in values}
                # Freed memory may belong to others by now.
                shared = {value for value in known if _memory(values[value]) == memory}
                shared.update({target} if target in values else ())
                written.update(dict.fromkeys(sorted(shared)))
                for value in shared:
                    self._known.pop(value, None)  # ``.data`` has a version of its own
        return written

    def _note_memory(self, wanted: Collection[int], values: Mapping[int, torch.Tensor]) -> None:
        for value in wanted:
            memory = _memory(values[value]) if value in values else 0
            if memory:
                self._storages.setdefault(memory, set()).add(value)

    def _of(self, value: int, tensor: torch.Tensor) -> T | None:
        """The measure, taken once until the tensor is written."""
        if native.is_inference(tensor):
            return self.measure(tensor)
        if value not in self._known or self._known[value][0] != torch_private.version(tensor):
            self._known[value] = torch_private.version(tensor), self.measure(tensor)
        return self._known[value][1]


class Copies(Trace[torch.Tensor]):
    """Copies of what some calls read and wrote, for questions that come after the run.

    Not all calls that may be asked about are: ``is_complete`` becomes False, and nothing more is copied, where they
    hold more than ``MOST_COPIED`` elements.
    """

    def __init__(self, program: Program, calls: Container[int]) -> None:
        super().__init__(program, self._copied_within_limit, calls)
        self._num_left = MOST_COPIED

    @property
    def is_complete(self) -> bool:
        """True if all calls were copied that the run came to."""
        return self._num_left >= 0

    def _copied_within_limit(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self._num_left >= 0:
            self._num_left -= native.numel(tensor)
        return copied(tensor) if self._num_left >= 0 else None


def _memory(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage, 0 when it has none."""
    return native.untyped_storage(tensor).data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0
