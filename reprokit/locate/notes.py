"""Notes taken while a program runs: in which ways every value was bad before and after each call.

The notes are small (sets of words, and places for bad values only); no tensor is kept alive by them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from reprokit.locate.failure import Failure, kind_of, module_of
from reprokit.locate.ways import NAN, Badness, examine, ways_of
from reprokit.program.functions import GRAD_READ, display_name, hidden_writes, is_in_place
from reprokit.program.interpreter import Observer, Outcome, Tensors, run
from reprokit.program.ir import Call, Phase, Program, iter_refs

Ways = frozenset[str]


@dataclass(frozen=True, slots=True)
class BadValue:
    """A bad value that ends a run at call number ``index``. ``is_gradient``: the ``.grad`` of the value is bad."""

    value: int
    way: str
    index: int
    is_gradient: bool = False


def phase_of(call: Call) -> Phase:
    """The phase in which the result of a call fails."""
    return Phase.BACKWARD if call.is_differentiation else Phase.OPTIMIZER if call.is_optimizer_step else call.phase


def starts_of(call: Call) -> list[int]:
    """The value numbers that a differentiation starts from."""
    starts = call.args[0] if call.args else call.kwargs.get("tensors", call.kwargs.get("outputs"))
    return [ref.value for ref in iter_refs(starts)]


def failure_of_call(program: Program, index: int, phase: Phase, way: str, **more: Any) -> Failure:
    """The failure whose origin is call number ``index``; ``more`` are further fields."""
    call = program.calls[index]
    fields = {"kind": kind_of(way), "call": display_name(call.target), "module": module_of(call), "site": call.site}
    operand = _operand(call, phase, more.get("value"))
    return Failure(phase=phase, way=way, call_index=index, operand=operand, **fields | more)


def _operand(call: Call, phase: Phase, value: int | None) -> str | None:
    """Where ``value`` stands in the arguments; ``None`` for a result, and for the arguments of a second derivative."""
    is_result = phase is Phase.FORWARD and value in call.output_refs()
    if value is None or is_result or call.is_differentiation or phase is Phase.OPTIMIZER:
        return None
    arguments = [*enumerate(call.args), *call.kwargs.items()]
    places = ((f"{name}", n, ref) for name, item in arguments for n, ref in enumerate(iter_refs(item)))
    return next((f"{name}.{n}" if n else name for name, n, ref in places if ref.value == value), None)


class _Stop(Exception):
    """Ends the run once the watch has seen enough."""


@dataclass
class Notes:
    """An observer. ``watch`` is asked around every call; the first thing it finds ends the run.

    The run goes on, without notes, until each loss in ``wanted`` (value numbers) has started a backward call; copies
    of them are in ``losses``. ``inner`` observes the same run. ``outcome`` is that of a run which came to its end, with
    the values in ``keep``.
    """

    program: Program
    watch: Callable[..., BadValue | None] = lambda *_, **__: None
    wanted: Set[int] = frozenset()
    inner: Observer | None = None
    keep: Set[int] = frozenset()
    outcome: Outcome = field(default_factory=Outcome)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    reads: dict[int, dict[int, Ways]] = field(default_factory=dict)
    writes: dict[int, dict[int, Ways]] = field(default_factory=dict)
    places: dict[tuple[int | None, int], Badness] = field(default_factory=dict)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    found: BadValue | None = None
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _storages: dict[int, set[int]] = field(default_factory=dict)
    _known: dict[int, tuple[int, Ways]] = field(default_factory=dict)
    _inputs: set[int] = field(default_factory=set)

    def run(self, tensors: Tensors) -> Outcome:
        """Run the program, taking notes; ends early when the watch finds something."""
        self._inputs = {item.value for item in self.program.inputs}
        kept = [ref.value for ref in self.program.outputs]  # a write through a view is seen on what is alive
        kept += [item.value for item in self.program.inputs if item.role in ("parameter", "buffer")]
        kept += [value for call in self.program.calls if call.target == GRAD_READ for value in call.output_refs()]
        with contextlib.suppress(_Stop):
            self.outcome = run(self.program, tensors, observer=self, keep=frozenset(kept) | self.keep)
        return self.outcome

    def writer(self, value: int, before: int) -> int | None:
        """The index of the last call before ``before`` that wrote this value (or memory it shares)."""
        written = [index for index in self._writers.get(value, ()) if index < before]
        return written[-1] if written else None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the ways of the inputs, and ask the watch."""
        if call.is_differentiation:
            wanted = (value for value in call.input_refs() if value in self.wanted and value in values)
            self.losses.update((value, values[value].detach().clone()) for value in wanted)
        if self.found is not None:
            self._end()
            return
        if self.inner is not None:
            self.inner.before(index, call, values)
        flags = {}
        for value in call.input_refs():
            tensor = values.get(value)
            if tensor is None:
                continue
            self._note_memory(value, tensor)
            ways = self._ways(value, tensor)
            if ways:
                flags[value] = ways
                if value in self._inputs and not self._writers.get(value):
                    self.places.setdefault((None, value), examine(tensor))
            if value in self._inputs and tensor.requires_grad and tensor.is_leaf:
                self.leaves[value] = tensor
        self.reads[index] = flags
        self._ask(index, call, values, after=False)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the ways of what the call wrote, and ask the watch."""
        if self.found is not None:
            return
        if self.inner is not None:
            self.inner.after(index, call, values)
        flags = {}
        may_be_origin = not any(NAN in ways for ways in self.reads[index].values())  # a NaN is followed further back
        for value in self._written(call, values):
            tensor = values.get(value)
            if tensor is None:
                continue
            self._writers.setdefault(value, []).append(index)
            self._note_memory(value, tensor)
            ways = self._ways(value, tensor)
            if ways:
                flags[value] = ways
                if may_be_origin:
                    self.places[index, value] = examine(tensor)
        self.writes[index] = flags
        self._ask(index, call, values, after=True)

    def _ask(self, index: int, call: Call, values: Mapping[int, torch.Tensor], *, after: bool) -> None:
        self.found = self.watch(self, index, call, values, after=after)
        if self.found is not None:
            self._end()

    def _end(self) -> None:
        if self.wanted <= self.losses.keys():
            raise _Stop

    def _written(self, call: Call, values: Mapping[int, torch.Tensor]) -> list[int]:
        """Outputs, and for in-place calls every value that shares memory with the target."""
        written = {} if self._is_bad_again(call) else dict.fromkeys(call.output_refs())
        if call.is_optimizer_step:
            written.update(dict.fromkeys(call.input_refs()))
        for ref in iter_refs(hidden_writes(call.target, call.args, call.kwargs)):
            self._known.pop(ref.value, None)  # its version does not tell
            written[ref.value] = None
        if is_in_place(call.target):
            for target in call.input_refs()[:1]:
                tensor = values.get(target)
                shared = self._storages.get(_memory(tensor), {target}) if tensor is not None else ()
                written.update(dict.fromkeys(sorted(shared)))
                for value in shared:
                    self._known.pop(value, None)  # ``.data`` has a version of its own
        return list(written)

    def _is_bad_again(self, call: Call) -> bool:
        """True if the call reads a ``.grad`` that was bad when it was last seen: what made it bad came before."""
        return call.target == GRAD_READ and any(self._known.get(value, (0, ()))[1] for value in call.output_refs())

    def _note_memory(self, value: int, tensor: torch.Tensor) -> None:
        memory = _memory(tensor)
        if memory:
            self._storages.setdefault(memory, set()).add(value)

    def _ways(self, value: int, tensor: torch.Tensor) -> Ways:
        if tensor.is_inference():
            return ways_of(tensor)
        version = tensor._version
        known = self._known.get(value)
        if known is None or known[0] != version:
            known = (version, ways_of(tensor))
            self._known[value] = known
        return known[1]


def _memory(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage, 0 when it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()
