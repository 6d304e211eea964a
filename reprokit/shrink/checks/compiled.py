"""Running a program with its calls compiled: every stretch of plain calls in one mode becomes one compiled graph.

Differentiation, optimizer steps and random calls run eagerly between them; gradients flow through compiled graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reprokit.program.functions import function_named
from reprokit.program.ir import OPAQUE, ZERO_GRAD, Call, Program, Ref
from reprokit.program.run import Modes, Outcome, assign, bind_arguments, execute
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.recording import copy_of

_METHOD = "torch.Tensor."


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring calls in one mode that are compiled together, or one call that is not compiled."""

    calls: tuple[Call, ...]
    is_compiled: bool


class CompiledProgram:
    """A program whose stretches are compiled when they first run, and kept for later runs."""

    def __init__(self, program: Program, keep: frozenset[int], backend: str) -> None:
        self._program, self._keep, self._backend = program, keep, backend
        self._stretches = list(_stretches(program))
        self._compiled: dict[int, _CompiledStretch] = {}

    def run(self, tensors: Mapping[int, torch.Tensor]) -> Outcome:
        """Run on copies, like `program.run.run`, but raise what a call raises."""
        values = {item.value: copy_of(tensors[item.value]) for item in self._program.inputs}
        for item in self._program.inputs:
            values[item.value].requires_grad_(item.requires_grad)
        outcome = Outcome(inputs=dict(values))
        with Modes() as modes:
            for number, stretch in enumerate(self._stretches):
                mode = stretch.calls[0].mode
                modes.enter(mode, values[mode.rng.value] if mode.rng is not None else None)
                if stretch.is_compiled:
                    self._run_stretch(number, values)
                else:
                    _run_call(stretch.calls[0], values)
        outcome.values = {value: values[value] for value in self._keep if value in values}
        outcome.gradients = {
            v: t.grad for v, t in outcome.inputs.items() if t.is_leaf and t.requires_grad and t.grad is not None
        }
        return outcome

    def _run_stretch(self, number: int, values: dict[int, torch.Tensor]) -> None:
        if number not in self._compiled:
            later = _read_later(self._stretches[number + 1 :], self._keep)
            calls = self._stretches[number].calls
            self._compiled[number] = _CompiledStretch.of(calls, later, values, self._backend)
        self._compiled[number].run(values)


def run_compiled(candidate: Candidate, keep: frozenset[int], backend: str) -> Outcome:
    """Compile and run once; the compiler forgets it afterwards."""
    try:
        return CompiledProgram(candidate.program, keep, backend).run(candidate.tensors)
    finally:
        torch._dynamo.reset()


def _stretches(program: Program) -> Iterator[_Stretch]:
    together: list[Call] = []
    for call in program.calls:
        if call.target == OPAQUE:
            continue
        if together and (not _is_compilable(call) or call.mode != together[0].mode):
            yield _Stretch(tuple(together), True)
            together = []
        if _is_compilable(call):
            together.append(call)
        else:
            yield _Stretch((call,), False)
    if together:
        yield _Stretch(tuple(together), True)


def _is_compilable(call: Call) -> bool:
    is_special = call.is_differentiation or call.is_optimizer_step or call.target == ZERO_GRAD
    is_method_without_self = call.target.startswith(_METHOD) and not call.args
    return not (is_special or is_method_without_self or call.mode.rng is not None or call.name == "__set__")


def _read_later(stretches: list[_Stretch], keep: frozenset[int]) -> set[int]:
    return {value for stretch in stretches for call in stretch.calls for value in call.input_refs()} | keep


def _run_call(call: Call, values: dict[int, torch.Tensor]) -> None:
    assign(call.outputs, execute(call, *bind_arguments(call, values)), values)


@dataclass(frozen=True, slots=True)
class _CompiledStretch:
    """A compiled function of the values ``given`` that returns the values ``wanted``."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    given: list[int]
    wanted: list[int]

    @classmethod
    def of(
        cls, calls: tuple[Call, ...], later: set[int], values: Mapping[int, torch.Tensor], backend: str
    ) -> _CompiledStretch:
        """Calls that return what is read later."""
        made = dict.fromkeys(value for call in calls for value in call.output_refs())
        given = [value for value in dict.fromkeys(v for call in calls for v in call.input_refs()) if value in values]
        wanted = [value for value in made if value in later]
        return cls(torch.compile(_graph(calls, given, wanted), backend=backend, dynamic=False), given, wanted)

    def run(self, values: dict[int, torch.Tensor]) -> None:
        """Run it on the values, and add what it returns."""
        results = self.function(*(values[value] for value in self.given))
        values.update(zip(self.wanted, results, strict=True))


def _graph(calls: tuple[Call, ...], given: list[int], wanted: list[int]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[int, Any] = {value: graph.placeholder(f"v{value}") for value in given}
    for call in calls:
        _bind(call.outputs, _node(graph, call, nodes), nodes)
    graph.output(tuple(nodes[value] for value in wanted))
    return fx.GraphModule(torch.nn.Module(), graph)


def _node(graph: fx.Graph, call: Call, nodes: Mapping[int, Any]) -> Any:
    args, kwargs = bind_arguments(call, nodes)
    if call.name == "__get__":
        return graph.call_function(getattr, (args[0], call.target.split(".")[-2]))
    if call.target.startswith(_METHOD):
        return graph.call_method(call.name, args, kwargs)
    return graph.call_function(function_named(call.target), args, kwargs)


def _bind(outputs: Any, node: Any, nodes: dict[int, Any]) -> None:
    """Name the parts of a result after the values of the same structure."""
    if isinstance(outputs, Ref):
        nodes[outputs.value] = node
    elif isinstance(outputs, (list, tuple)):
        for place, part in enumerate(outputs):
            _bind(part, _part(node, place), nodes)
    elif isinstance(outputs, dict):
        for key, part in outputs.items():
            _bind(part, _part(node, key), nodes)


def _part(node: Any, key: Any) -> Any:
    return node.graph.call_function(operator.getitem, (node, key))
