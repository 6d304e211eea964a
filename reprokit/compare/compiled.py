"""A program compiled: every stretch of plain calls in one mode becomes one graph, the rest runs eagerly between.

Backward passes go through what the compiler made of the graphs; optimizer steps and random calls run as they are, so
that other random numbers are no difference. The reference of a comparison is the program itself.
"""

from __future__ import annotations

import functools
import operator
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

from reprokit import native, torch_private
from reprokit.errors import UsageError
from reprokit.own_work import ignored_warnings
from reprokit.program.dataflow import copy_of
from reprokit.program.functions import function_named
from reprokit.program.interpreter import Modes, Outcome, assign, bind_arguments, execute, run
from reprokit.program.ir import OPAQUE, ZERO_GRAD, Call, Program, Ref
from reprokit.program.sites import kind_of_file
from reprokit.program.step import HasProgram

DEFAULT = "inductor"  # of `torch.compile`
_METHOD = "torch.Tensor."
Backend: TypeAlias = str | Callable[..., Any]


class CompiledProgram:
    """A program whose stretches are compiled when they first run, and kept for later runs."""

    def __init__(self, program: Program, keep: frozenset[int], backend: Backend) -> None:
        self._program, self._keep = program, keep
        self._stretches: list[tuple[Call, _Stretch | None]] = []
        calls = [call for call in program.calls if call.target != OPAQUE]
        groups = groupby(enumerate(calls), key=lambda item: item[1].mode if _is_compilable(item[1]) else item[0])
        later = set(keep)
        for stretch in reversed([[call for _, call in group] for _, group in groups]):
            compiled = _Stretch.of(stretch, later, backend) if _is_compilable(stretch[0]) else None
            self._stretches.insert(0, (stretch[0], compiled))
            later.update(value for call in stretch for value in call.input_refs())

    def run(self, tensors: Mapping[int, torch.Tensor]) -> Outcome:
        """Run on copies, like `program.run.run`, but raise what a call raises."""
        values = {item.value: copy_of(native.detach(tensors[item.value])) for item in self._program.inputs}
        for item in self._program.inputs:
            native.requires_grad_(values[item.value], item.requires_grad)
        outcome = Outcome(inputs=dict(values))
        with Modes() as modes:
            for call, compiled in self._stretches:
                modes.enter(call.mode, values[call.mode.rng.value] if call.mode.rng is not None else None)
                if compiled is not None:
                    results = compiled.function(*(values[value] for value in compiled.given))
                    values.update(zip(compiled.wanted, results, strict=True))
                else:
                    assign(call.outputs, execute(call, *bind_arguments(call, values)), values)
        outcome.values = {value: values[value] for value in self._keep if value in values}
        outcome.gradients = {
            v: t.grad for v, t in outcome.inputs.items() if t.is_leaf and t.requires_grad and t.grad is not None
        }
        return outcome


def run_compiled(step: HasProgram, keep: frozenset[int], backend: Backend) -> Outcome:
    """Compile and run once."""
    return CompiledProgram(step.program, keep, backend).run(step.tensors)


def _is_compilable(call: Call) -> bool:
    is_special = call.is_differentiation or call.is_optimizer_step or call.target == ZERO_GRAD
    is_method_without_self = call.target.startswith(_METHOD) and not call.args
    return not (is_special or is_method_without_self or call.mode.rng is not None or call.name == "__set__")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A compiled function of the values ``given`` that returns the values ``wanted``, which are read ``later``."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    given: list[int]
    wanted: list[int]

    @classmethod
    def of(cls, calls: Sequence[Call], later: set[int], backend: Backend) -> _Stretch:
        made, given = dict[int, None](), dict[int, None]()
        for call in calls:
            given.update(dict.fromkeys(value for value in call.input_refs() if value not in made))
            made.update(dict.fromkeys(call.output_refs()))
        wanted = [value for value in made if value in later]
        function = torch.compile(_own_code(_graph(calls, list(given), wanted)), backend=backend, dynamic=False)
        return cls(function, list(given), wanted)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another one, with code of its own: what is compiled of it goes when it goes, and what the
    user has compiled stays."""

    def stretch(*values: Any) -> Any:
        return function(*values)

    stretch.__code__ = stretch.__code__.replace(co_name=f"stretch_{next(_numbers)}")
    return stretch


_numbers = count()


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
            _bind(part, node.graph.call_function(operator.getitem, (node, place)), nodes)
    elif isinstance(outputs, dict):
        for key, part in outputs.items():
            _bind(part, node.graph.call_function(operator.getitem, (node, key)), nodes)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The same calls compiled; eager is the reference."""

    backend: str  # ``FILE.py:FUNCTION`` for one of the user's own
    source: Path | Callable[..., Any] | None = None  # that file, or the function itself in the process that has it

    @property
    def name(self) -> str:
        """``compile:inductor``."""
        return f"compile:{self.backend}"

    @property
    def compiler(self) -> Backend:
        """What `torch.compile` is given; a file of the user's is run for it."""
        if isinstance(self.source, Path):
            found: Backend = variable_of(str(self.source), self.backend.rpartition(":")[2])
            return found
        return self.source if self.source is not None else self.backend

    @property
    def simpler(self) -> Compiled:
        """The compiler that does the first half of what this one does, and takes a tenth of the time."""
        return Compiled("aot_eager") if self.backend == DEFAULT else self

    def require(self) -> None:
        """Compile something small."""
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes of its own would outlive this one
        if self.source is None and ".py:" in self.backend:
            file, _, function = self.backend.rpartition(":")
            raise UsageError(
                f"the compiler is the function `{function}` of `{file}`, which opening a file never runs",
                hint=f"give it as `--check mismatch:compile:FOLDER/{self.backend}`",
            )
        try:
            with ignored_warnings():
                torch.compile(_own_code(lambda x: x + 1), backend=self.compiler)(native.zeros(2))
        except Exception as error:  # a backend may fail in as many ways as there are compilers
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f'`torch.compile(backend="{self.backend}")` does not work on this machine: {reason}',
                hint="install a C++ compiler, or compare with `mismatch:compile:aot_eager`; "
                "a compiler of your own is named as `mismatch:compile:FILE.py:FUNCTION`",
            ) from None

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """Compiled, and eager."""
        return run_compiled(step, keep, self.compiler), run(step.program, step.tensors, keep=keep)


def registered(name: str) -> Callable[..., Any] | None:
    """The function that the user has registered as a compiler under a name; ``None`` for one of torch or a library."""
    registry: Any = sys.modules.get(torch_private.BACKENDS)
    found = getattr(registry, torch_private.BACKEND_TABLE, {}).get(name)
    code = getattr(found, "__code__", None)
    return found if code is not None and kind_of_file(code.co_filename) == "user" else None


@functools.cache
def variable_of(file: str, name: str) -> Any:
    """A function of a file of the user's, from running the file once beside its neighbours; raises what that raises."""
    folder = str(Path(file).parent)
    sys.path.insert(0, folder)
    try:
        found: Any = runpy.run_path(file)[name]
        return found
    finally:
        sys.path.remove(folder)
