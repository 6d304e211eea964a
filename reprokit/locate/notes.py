"""Notes taken while a program runs: in which ways every value was bad before and after each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from reprokit import native
from reprokit.locate.failure import Failure, kind_of, module_of
from reprokit.locate.ways import Ways, ways_of
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.interpreter import Observer, Outcome, Tensors
from reprokit.program.ir import Call, Phase, Program, iter_refs
from reprokit.program.observe import Trace
from reprokit.progress import Progress


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


def writes_gradients(call: Call) -> bool:
    """True for a call between a backward pass and an update."""
    return call.phase is Phase.OPTIMIZER and call.target != GRAD_READ and not call.is_optimizer_step


def starts_of(call: Call) -> list[int]:
    """The value numbers that a differentiation starts from."""
    starts = call.args[0] if call.args else call.kwargs.get("tensors", call.kwargs.get("outputs"))
    return [ref.value for ref in iter_refs(starts)]


def failure_of_call(program: Program, index: int, phase: Phase, way: str, **more: Any) -> Failure:
    """The failure whose origin is call number ``index``; ``more`` are further fields."""
    call = program.calls[index]
    fields = {"kind": kind_of(way), "call": display_name(call.target), "module": module_of(call), "site": call.site}
    operand = operand_of(call, phase, more.get("value"))
    return Failure(phase=phase, way=way, call_index=index, operand=operand, **fields | more)


def operand_of(call: Call, phase: Phase, value: int | None) -> str | None:
    """Where ``value`` stands in the arguments; ``None`` for a result, and for the arguments of a second derivative."""
    is_result = phase is Phase.FORWARD and value in call.output_refs()
    if value is None or is_result or call.is_differentiation or phase is Phase.OPTIMIZER:
        return None
    arguments = [*enumerate(call.args), *call.kwargs.items()]
    places = ((f"{name}", n, ref) for name, item in arguments for n, ref in enumerate(iter_refs(item)))
    return next((f"{name}.{n}" if n else name for name, n, ref in places if ref.value == value), None)


class _Stop(Exception):
    """Ends the run once the watch has seen enough."""


Watch = Callable[..., BadValue | None]


class Notes(Trace[Ways]):
    """The ways in which every value was bad. ``watch`` is asked around every call; the first thing it finds ends the
    run.

    The run goes on, without notes, until each loss in ``wanted`` (value numbers) has started a backward call; copies
    of them are in ``losses``. ``inner`` and ``observer`` see the same run. ``leaves`` are the inputs that get
    gradients.
    """

    def __init__(
        self,
        program: Program,
        watch: Watch = lambda *_, **__: None,
        wanted: Set[int] = frozenset(),
        inner: Observer | None = None,
        progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(program, lambda tensor: ways_of(tensor) or None)
        self.losses: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.found: BadValue | None = None
        self.inner = inner
        self._observers = [one for one in (inner, observer) if one is not None]
        self._progress = progress
        self._watch, self._wanted = watch, wanted
        self._inputs = {item.value for item in program.inputs}
        self.grad_reads = [(index, call) for index, call in enumerate(program.calls) if call.target == GRAD_READ]

    def run(self, tensors: Tensors, keep: Set[int] = frozenset(), only: Collection[int] | None = None) -> Outcome:
        """Run the program, taking notes; ends early when the watch finds something."""
        kept = [ref.value for ref in self.program.outputs]  # a write through a view is seen on what is alive
        kept += [item.value for item in self.program.inputs if item.role in ("parameter", "buffer")]
        kept += [value for _, call in self.grad_reads for value in call.output_refs()]
        with contextlib.suppress(_Stop):
            super().run(tensors, frozenset(kept) | keep, only)
        return self.outcome

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the ways of the inputs, and ask the watch."""
        if self._progress is not None:
            self._progress.at(index, len(self.program.calls))
        if call.is_differentiation:
            wanted = (value for value in call.input_refs() if value in self._wanted and value in values)
            self.losses.update((value, native.clone(native.detach(values[value]))) for value in wanted)
        if self.found is not None:
            self._end()
            return
        for observer in self._observers:
            observer.before(index, call, values)
        super().before(index, call, values)
        for value in call.input_refs():
            if value in self._inputs and value in values and values[value].requires_grad and values[value].is_leaf:
                self.leaves[value] = values[value]
        self._ask(index, call, values, after=False)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the ways of what the call wrote, and ask the watch."""
        if self.found is not None:
            return
        for observer in self._observers:
            observer.after(index, call, values)
        super().after(index, call, values)
        self._ask(index, call, values, after=True)

    def _ask(self, index: int, call: Call, values: Mapping[int, torch.Tensor], *, after: bool) -> None:
        self.found = self._watch(self, index, call, values, after=after)
        if self.found is not None:
            self._end()

    def _end(self) -> None:
        if self._wanted <= self.losses.keys():
            raise _Stop
