"""Which call owns which autograd node, so that a nan or inf gradient is traced to a line of the program.

After every call the graph behind its outputs is walked back until it meets nodes that an earlier call owns; the new
ones belong to this call. Nodes are kept alive here, because autograd's Python objects are otherwise recreated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from reprokit.program.functions import all_written
from reprokit.program.ir import Call, iter_refs

Node = Any  # torch.autograd.graph.Node
Edge = tuple[Node, int]


class NodeOwners:
    """Maps autograd nodes to indexes of calls. Invariant: a node keeps the first owner it was given."""

    def __init__(self) -> None:
        self._owner: dict[Node, int] = {}

    def own_outputs(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Give the new nodes behind the outputs of call number ``index`` to it."""
        places = iter_refs(all_written(call.target, call.args, call.kwargs))
        written = [values[value] for value in (*call.output_refs(), *(ref.value for ref in places)) if value in values]
        stack = [tensor.grad_fn for tensor in written if tensor.requires_grad and tensor.grad_fn is not None]
        while stack:
            node = stack.pop()
            if node in self._owner or is_accumulation(node):
                continue
            self._owner[node] = index
            stack.extend(following for following, _ in node.next_functions if following is not None)

    def owner(self, node: Node) -> int | None:
        """The index of the call that owns the node, or ``None``."""
        return self._owner.get(node)


def is_accumulation(node: Node) -> bool:
    """True if the node adds into the ``.grad`` of a leaf."""
    return hasattr(node, "variable")


def edge_of(tensor: torch.Tensor) -> Edge | None:
    """Where gradients of this tensor flow to: its node and slot, or ``None`` when it needs none."""
    if not tensor.requires_grad:
        return None
    try:
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    except AssertionError:  # a view of a parameter that was made without gradients: `requires_grad`, but no node
        return None
    return edge.node, edge.output_nr


def reachable(nodes: Iterable[Node]) -> Iterator[Node]:
    """Every node behind ``nodes``, each once."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)
