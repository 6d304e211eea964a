"""What a program is compared with: itself in float64, itself compiled, itself on the other kind of device.

Each reference runs a candidate twice, as it is and in the other way, on the same inputs. Random calls run as they were
recorded in both, on inputs cast for them, because another dtype or device draws other numbers. Compiled, every stretch
of plain calls in one mode becomes one graph; backward passes, optimizer steps and random calls run eagerly between.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import fx

from reprokit.errors import UsageError
from reprokit.program.functions import function_named
from reprokit.program.interpreter import Modes, Outcome, assign, bind_arguments, execute, run
from reprokit.program.ir import (
    OPAQUE,
    ZERO_GRAD,
    Call,
    Device,
    Mode,
    Program,
    Ref,
    Symbol,
    iter_refs,
    map_leaves,
    substitute,
)
from reprokit.program.memory import copy_of
from reprokit.shrink.candidate import Candidate

_METHOD = "torch.Tensor."
_REAL = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_COMPLEX = frozenset({"complex32", "complex64", "complex128", "cfloat", "cdouble"})
_CASTS = {
    torch.float16: "torch.Tensor.half",
    torch.bfloat16: "torch.Tensor.bfloat16",
    torch.float32: "torch.Tensor.float",
    torch.float64: "torch.Tensor.double",
}


class CompiledProgram:
    """A program whose stretches are compiled when they first run, and kept for later runs."""

    def __init__(self, program: Program, keep: frozenset[int], backend: str) -> None:
        self._program, self._keep, self._backend = program, keep, backend
        calls = [call for call in program.calls if call.target != OPAQUE]
        groups = groupby(enumerate(calls), key=lambda item: item[1].mode if _is_compilable(item[1]) else item[0])
        self._stretches = [[call for _, call in group] for _, group in groups]
        self._compiled: dict[int, _CompiledStretch] = {}

    def run(self, tensors: Mapping[int, torch.Tensor]) -> Outcome:
        """Run on copies, like `program.run.run`, but raise what a call raises."""
        values = {item.value: copy_of(tensors[item.value].detach()) for item in self._program.inputs}
        for item in self._program.inputs:
            values[item.value].requires_grad_(item.requires_grad)
        outcome = Outcome(inputs=dict(values))
        with Modes() as modes:
            for number, stretch in enumerate(self._stretches):
                mode = stretch[0].mode
                modes.enter(mode, values[mode.rng.value] if mode.rng is not None else None)
                if _is_compilable(stretch[0]):
                    self._run_stretch(number, values)
                else:
                    assign(stretch[0].outputs, execute(stretch[0], *bind_arguments(stretch[0], values)), values)
        outcome.values = {value: values[value] for value in self._keep if value in values}
        outcome.gradients = {
            v: t.grad for v, t in outcome.inputs.items() if t.is_leaf and t.requires_grad and t.grad is not None
        }
        return outcome

    def _run_stretch(self, number: int, values: dict[int, torch.Tensor]) -> None:
        if number not in self._compiled:
            later = {v for calls in self._stretches[number + 1 :] for call in calls for v in call.input_refs()}
            calls = self._stretches[number]
            self._compiled[number] = _CompiledStretch.of(calls, later | self._keep, values, self._backend)
        self._compiled[number].run(values)


def run_compiled(candidate: Candidate, keep: frozenset[int], backend: str) -> Outcome:
    """Compile and run once; the compiler forgets it afterwards."""
    try:
        return CompiledProgram(candidate.program, keep, backend).run(candidate.tensors)
    finally:
        torch._dynamo.reset()


def _is_compilable(call: Call) -> bool:
    is_special = call.is_differentiation or call.is_optimizer_step or call.target == ZERO_GRAD
    is_method_without_self = call.target.startswith(_METHOD) and not call.args
    return not (is_special or is_method_without_self or call.mode.rng is not None or call.name == "__set__")


@dataclass(frozen=True, slots=True)
class _CompiledStretch:
    """A compiled function of the values ``given`` that returns the values ``wanted``."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    given: list[int]
    wanted: list[int]

    @classmethod
    def of(
        cls, calls: Sequence[Call], later: set[int], values: Mapping[int, torch.Tensor], backend: str
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


def _graph(calls: Sequence[Call], given: list[int], wanted: list[int]) -> fx.GraphModule:
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


class Reference(Protocol):
    """Another way to run a program."""

    @property
    def name(self) -> str:
        """What follows ``mismatch:`` on the command line."""

    def require(self) -> None:
        """Raise `UsageError` when this machine cannot run it."""

    def pair(self, candidate: Candidate, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """What is under suspicion, and what it should equal."""


@dataclass(frozen=True, slots=True)
class Double:
    """The same calls in float64."""

    @property
    def name(self) -> str:
        """``fp64``."""
        return "fp64"

    def require(self) -> None:
        """Every machine can."""

    def pair(self, candidate: Candidate, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """As it is, and in float64."""
        actual = run(candidate.program, candidate.tensors, keep=keep)
        other = in_dtype(candidate, torch.float64)
        with default_dtype(torch.float64):
            return actual, run(other.program, other.tensors, keep=keep)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The same calls compiled; eager is the reference."""

    backend: str

    @property
    def name(self) -> str:
        """``compile:inductor``."""
        return f"compile:{self.backend}"

    def require(self) -> None:
        """Compile something small."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.compile(_plus_one, backend=self.backend)(torch.zeros(2))
        except Exception as error:  # a backend may fail in as many ways as there are compilers
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f'`torch.compile(backend="{self.backend}")` does not work on this machine: {reason}',
                hint="install a C++ compiler, or compare with `mismatch:compile:aot_eager`",
            ) from None
        finally:
            torch._dynamo.reset()

    def pair(self, candidate: Candidate, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """Compiled, and eager."""
        return run_compiled(candidate, keep, self.backend), run(candidate.program, candidate.tensors, keep=keep)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """The same calls on CUDA when they ran on the CPU, and the other way round."""

    @property
    def name(self) -> str:
        """``cpu-cuda``."""
        return "cpu-cuda"

    def require(self) -> None:
        """Look for a GPU."""
        if not torch.cuda.is_available():
            raise UsageError("`mismatch:cpu-cuda` needs CUDA, and this torch sees none", hint="run it on a GPU machine")

    def pair(self, candidate: Candidate, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """On CUDA, and on the CPU."""
        first, second = (on_device(candidate, kind) for kind in ("cuda", "cpu"))
        return run(first.program, first.tensors, keep=keep), run(second.program, second.tensors, keep=keep)


def in_dtype(candidate: Candidate, dtype: torch.dtype) -> Candidate:
    """The candidate with everything that is a floating-point number in ``dtype``, and without autocast."""
    dtypes = _dtypes_read(candidate)

    def convert(leaf: Any) -> Any:
        return _converted_symbol(leaf, dtype) if isinstance(leaf, Symbol) else leaf

    def change(call: Call) -> Call:
        target = _CASTS[dtype] if call.target in _CASTS.values() else call.target
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), convert)
        return replace(call, target=target, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=()))

    def before(index: int, value: int) -> Symbol | None:
        read = dtypes.get((index, value))
        return Symbol(str(read)) if read is not None and read != _like(read, dtype) else None

    program = _converted(candidate.program, change, before, Symbol(str(dtype)))
    tensors = {value: tensor.to(_like(tensor.dtype, dtype)) for value, tensor in candidate.tensors.items()}
    return Candidate(program, tensors)


def on_device(candidate: Candidate, kind: str) -> Candidate:
    """The candidate on the CPU or on CUDA; generator states stay what they are."""
    states = {item.value for item in candidate.program.inputs if item.role == "rng"}
    device = Device(kind)

    def change(call: Call) -> Call:
        args, kwargs = map_leaves(
            (call.args, dict(call.kwargs)), lambda leaf: device if isinstance(leaf, Device) else leaf
        )
        autocast = tuple((kind, dtype) for _, dtype in call.mode.autocast[:1])
        return replace(call, args=args, kwargs=kwargs, mode=replace(call.mode, autocast=autocast))

    home = next((t.device.type for v, t in candidate.tensors.items() if v not in states), "cpu")
    program = _converted(candidate.program, change, lambda index, value: Device(home), device)
    tensors = {v: tensor if v in states else tensor.to(kind) for v, tensor in candidate.tensors.items()}
    return Candidate(program, tensors)


def _converted(
    program: Program,
    change: Callable[[Call], Call],
    before: Callable[[int, int], Symbol | Device | None],
    after: Symbol | Device,
) -> Program:
    """Every call changed; random calls stay, between casts of what they read and of what they return."""
    calls: list[Call] = []
    number = program.next_value()
    for index, call in enumerate(program.calls):
        if call.mode.rng is None:
            calls.append(change(call))
            continue
        casts: dict[int, Ref] = {}
        for value in dict.fromkeys(ref.value for ref in iter_refs((call.args, dict(call.kwargs)))):
            kind = before(index, value)
            if kind is not None:
                casts[value] = Ref(number)
                calls.append(_cast(Ref(value), kind, casts[value], call.mode))
                number += 1
        made = {value: Ref(number + place) for place, value in enumerate(call.output_refs())}
        number += len(made)
        args, kwargs = substitute(call.args, casts), substitute(dict(call.kwargs), casts)
        calls.append(replace(call, args=args, kwargs=kwargs, outputs=substitute(call.outputs, made)))
        calls += [_cast(raw, after, Ref(value), call.mode) for value, raw in made.items()]
    return replace(program, calls=tuple(calls))


def _cast(source: Ref, kind: Symbol | Device, target: Ref, mode: Mode) -> Call:
    return Call("torch.Tensor.to", (source, kind), outputs=target, mode=replace(mode, rng=None))


def _converted_symbol(symbol: Symbol, dtype: torch.dtype) -> Symbol:
    name = symbol.name.removeprefix("torch.")
    if name in _REAL | _COMPLEX:
        return Symbol(str(_like(getattr(torch, name), dtype)))
    return symbol


def _like(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a number of dtype ``found`` becomes. There is no complex bfloat16: complex64 stands for it."""
    if found.is_complex:
        return dtype.to_complex()
    return dtype if found.is_floating_point else found


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """An observer that notes the dtypes of what random calls read."""

    found: dict[tuple[int, int], torch.dtype]

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note dtypes."""
        if call.mode.rng is not None:
            self.found.update({(index, v): values[v].dtype for v in call.input_refs() if v != call.mode.rng.value})

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing more."""


def _dtypes_read(candidate: Candidate) -> dict[tuple[int, int], torch.dtype]:
    """The dtypes of what random calls read, by call and value."""
    watch = _Dtypes({})
    if any(call.mode.rng is not None for call in candidate.program.calls):
        run(candidate.program, candidate.tensors, observer=watch, keep=frozenset())
    return watch.found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1
