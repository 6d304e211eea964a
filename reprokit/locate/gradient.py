"""Blame inside a backward pass: the first autograd node whose incoming gradient is fine and whose outgoing one is not.

Every node is owned by one call of the program. The bad gradient is followed from the leaf where it was seen against the
flow of gradients, over the edges that really carried bad values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reprokit.locate.failure import Failure, kind_of
from reprokit.locate.notes import BadValue, failure_of_call
from reprokit.locate.ways import CLEAN, NAN, Ways, ways_of
from reprokit.program.dataflow import Edge, Node, NodeOwners, edge_of, is_accumulation, reachable
from reprokit.program.functions import GRAD_WRITES
from reprokit.program.interpreter import Tensors, run
from reprokit.program.ir import Call, Phase, Program, iter_refs


@dataclass(slots=True)
class _Passage:
    """A pass through a node: badness of the gradients that came in and went out, and its order."""

    order: int
    incoming: bool
    outgoing: list[Ways | None]


Senders = dict[Node, dict[int, list[tuple[Node, int]]]]  # who sends bad gradients to a node, by its slots


class _Stop(Exception):
    """Ends the run after the differentiation in question."""


@dataclass
class GradientWatch:
    """An observer that looks into one differentiation call; the run ends there if it ``stops``."""

    program: Program
    index: int
    stops: bool = False
    owners: NodeOwners = field(default_factory=NodeOwners)
    passages: dict[Node, _Passage] = field(default_factory=dict)
    edges: dict[int, dict[int, Edge]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Remember where the inputs' gradients would flow; hook the graph at the call in question."""
        self.edges[index] = {
            value: edge
            for value in call.input_refs()
            if value in values and (edge := edge_of(values[value])) is not None
        }
        if index == self.index:
            starts = [edge[0] for edge in self.edges[index].values()]
            for node in itertools.filterfalse(is_accumulation, reachable(starts)):
                self._handles.append(node.register_hook(self._recorder(node)))

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Own the new nodes; stop after the call in question."""
        if index == self.index:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            if self.stops:
                raise _Stop
            return
        self.owners.own_outputs(index, call, values)

    @functools.cached_property
    def senders(self) -> Senders:
        """Who sends bad gradients to a node, once the call is over."""
        found: Senders = {}
        for node, passage in self.passages.items():
            for slot, edge in enumerate(node.next_functions):
                if slot < len(passage.outgoing) and passage.outgoing[slot]:
                    found.setdefault(edge[0], {}).setdefault(edge[1], []).append((node, slot))
        return found

    def _recorder(self, node: Node) -> Callable[..., None]:
        def record(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
            incoming = any(g is not None and ways_of(g) for g in grad_outputs)
            outgoing = [ways_of(g) if g is not None else None for g in grad_inputs]
            self.passages[node] = _Passage(len(self.passages), incoming, outgoing)

        return record


@dataclass(frozen=True, slots=True)
class Blame:
    """The origin of a bad gradient. ``was_given``: the differentiation was given it bad to start with."""

    failure: Failure
    was_given: bool
    watch: GradientWatch

    @property
    def differentiated(self) -> frozenset[int]:
        """The calls whose derivative was taken."""
        owners = map(self.watch.owners.owner, self.watch.passages)
        return frozenset(index for index in owners if index is not None)

    def at(self, index: int) -> Failure | None:
        """The failure of call number ``index``, if a node of its own turned a finite gradient into NaN."""
        for node, passage in self.watch.passages.items():
            if self.watch.owners.owner(node) == index and not passage.incoming:
                for slot, ways in enumerate(passage.outgoing):
                    if ways is not None and NAN in ways:
                        return _failure(self.watch.program, self.watch, node, node, slot)
        return None


def blame_gradient(program: Program, tensors: Tensors, found: BadValue, seen: object = None) -> Blame:
    """The origin of a bad gradient that was seen after differentiation call ``found.index``.

    ``found.value`` is the leaf with the bad ``.grad``, or the result of ``torch.autograd.grad`` that is bad. Runs the
    program, unless ``seen`` is a `GradientWatch` of that call in an earlier run.
    """
    if isinstance(seen, GradientWatch) and seen.index == found.index:
        watch = seen
    else:
        watch = GradientWatch(program, found.index, stops=True)
        with contextlib.suppress(_Stop):
            run(program, tensors, observer=watch)
    target = _target_edge(program, watch, found)
    crossing = _follow(watch, target) if target is not None else None
    if crossing is None:
        return Blame(_unexplained(program, watch, found), False, watch)
    node, slot, origin = crossing
    return Blame(_failure(program, watch, origin, node, slot), watch.passages[origin].incoming, watch)


def _target_edge(program: Program, watch: GradientWatch, found: BadValue) -> Edge | None:
    """The edge whose gradient was seen to be bad."""
    call = program.calls[found.index]
    wanted = found.value
    if call.target == "torch.autograd.grad":
        results = [ref.value for ref in iter_refs(call.outputs)]
        inputs = [ref.value for ref in iter_refs(call.args[1] if len(call.args) > 1 else call.kwargs["inputs"])]
        if wanted in results and len(results) == len(inputs):
            wanted = inputs[results.index(wanted)]
    for edges in watch.edges.values():
        if wanted in edges:
            return edges[wanted]
    return None


def _follow(watch: GradientWatch, target: Edge) -> tuple[Node, int, Node] | None:
    """From a bad edge back to the origin: (node and slot where the origin's call was left, the origin node)."""
    origins = _origins(watch, watch.senders, target)
    return min(origins, key=lambda item: watch.passages[item[2]].order) if origins else None


def _origins(watch: GradientWatch, senders: Senders, target: Edge) -> list[tuple[Node, int, Node]]:
    found: list[tuple[Node, int, Node]] = []
    seen: set[Node] = set()
    stack = [(node, slot, node) for node, slot in senders.get(target[0], {}).get(target[1], ())]
    while stack:
        exit_node, exit_slot, node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        sources = [pair for _, pairs in sorted(senders.get(node, {}).items()) for pair in pairs]
        if not watch.passages[node].incoming or not sources:
            found.append((exit_node, exit_slot, node))
            continue
        for source, slot in sources:
            same_call = watch.owners.owner(source) == watch.owners.owner(node)
            stack.append((exit_node, exit_slot, source) if same_call else (source, slot, source))
    return found


def _failure(program: Program, watch: GradientWatch, origin: Node, node: Node, slot: int) -> Failure:
    ways = watch.passages[node].outgoing[slot] or CLEAN
    way = NAN if NAN in ways else min(ways)
    index = watch.owners.owner(origin)
    if index is None:
        return Failure(Phase.BACKWARD, kind_of(way), way, backward_node=origin.name())
    edge = node.next_functions[slot]
    value = next((v for v, known in watch.edges[index].items() if known == (edge[0], edge[1])), None)
    return failure_of_call(
        program,
        index,
        Phase.BACKWARD,
        way,
        backward_node=origin.name(),
        value=value,
        element=ways.first[way],
        num_bad=ways.count[way],
        num_elements=ways.num_elements,
    )


def _unexplained(program: Program, watch: GradientWatch, found: BadValue) -> Failure:
    """No node made it: finite contributions overflowed where they were added up, or the gradient was given bad."""
    for index, edges in watch.edges.items():
        call = program.calls[index]
        if found.value in edges and index != found.index and call.target not in GRAD_WRITES:
            node = "AccumulateGrad"
            return failure_of_call(program, index, Phase.BACKWARD, found.way, backward_node=node, value=found.value)
    return Failure(Phase.BACKWARD, kind_of(found.way), found.way, backward_node="AccumulateGrad")
