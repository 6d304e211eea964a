"""torch's graph minifier, driven as its users drive it: a graph, its inputs, and a check, obvious or strict.

The obvious check is that the output is not finite. The strict one is close to what reprokit itself asks for: the first
call that makes a NaN out of none is the same function as in the whole graph, and no input is a NaN.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.fx_minifier import minifier
from torch.utils import _pytree as pytree

Tensors = Sequence[torch.Tensor]
Check = Callable[[fx.GraphModule, Tensors], bool]


class Clock:
    """Seconds since it was made: of the clock on the wall, and of the processor, with those of ended children."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), sum(os.times()[:4])

    def read(self) -> dict[str, float]:
        """Both by their names in a row."""
        wall, cpu = self._started
        return {"seconds": time.perf_counter() - wall, "cpu_seconds": sum(os.times()[:4]) - cpu}


@dataclass(frozen=True)
class Minified:
    """What the minifier made of a graph.

    ``is_same``: the result passes the strict check. ``fails_as_printed``: it fails with the inputs that the minifier
    prints, all ones. ``note`` is what it said when it gave no result.
    """

    checks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    calls: int | None = None
    elements: int | None = None
    is_same: bool = False
    fails_as_printed: bool = False
    note: str | None = None


class _Functions(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        """Layers are traced into, down to the functions they call."""
        return False


def graph_of(model: nn.Module, batch: Tensors) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The model's forward pass as a graph whose inputs are the batch and the parameters."""
    graph = _Functions().trace(model)
    inputs = list(batch)
    lifted: dict[str, fx.Node] = {}
    after = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if node.target not in lifted:
                with graph.inserting_after(after):
                    after = lifted[node.target] = graph.placeholder(node.target.replace(".", "_"))
                inputs.append(model.get_parameter(node.target).detach())
            node.replace_all_uses_with(lifted[node.target])
            graph.erase_node(node)
    return fx.GraphModule(nn.Module(), graph), inputs


def num_calls(graph: fx.Graph) -> int:
    """Nodes that call something."""
    return sum(node.op.startswith("call_") for node in graph.nodes)


def is_not_finite(module: fx.GraphModule, inputs: Tensors) -> bool:
    """The obvious check."""
    return any(not bool(out.isfinite().all()) for out in _tensors(module(*inputs)))


def same_origin(module: fx.GraphModule, inputs: Tensors) -> Check:
    """The strict check for a graph that fails."""
    wanted = origin(module, inputs)
    assert wanted is not None, "the graph makes no NaN"

    def check(candidate: fx.GraphModule, given: Tensors) -> bool:
        return not any(map(_has_nan, given)) and origin(candidate, given) == wanted

    return check


def origin(module: fx.GraphModule, inputs: Tensors) -> str | None:
    """The function that first makes a NaN out of none."""
    watch = _Origin(module)
    watch.run(*inputs)
    return watch.found


class _Origin(fx.Interpreter):
    found: str | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; note it when it is the first whose result alone holds a NaN."""
        result = super().run_node(n)
        if self.found is None and n.op.startswith("call_") and any(map(_has_nan, _tensors(result))):
            read = [self.env[node] for node in n.all_input_nodes]
            if not any(map(_has_nan, _tensors(read))):
                self.found = n._pretty_print_target(n.target)
        return result


def minify(module: fx.GraphModule, inputs: Tensors, check: Check, strict: Check) -> Minified:
    """Run the minifier, which talks a lot, and count what it asks."""
    checks = 0

    def counted(candidate: fx.GraphModule, given: Tensors) -> bool:
        nonlocal checks
        checks += 1
        return check(candidate, given)

    clock = Clock()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found, tensors = minifier(module, list(inputs), counted, dump_state=_say_nothing)
    except Exception as error:
        return Minified(checks=checks, **clock.read(), note=f"{type(error).__name__}: {error}")
    seconds = clock.read()
    printed = [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    return Minified(
        checks=checks,
        **seconds,
        calls=num_calls(found.graph),
        elements=sum(tensor.numel() for tensor in tensors),
        is_same=strict(found, tensors),
        fails_as_printed=check(found, printed),
    )


def _say_nothing(module: fx.GraphModule, inputs: Tensors) -> None:
    """In place of the minifier's habit of printing every graph on the way."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())
