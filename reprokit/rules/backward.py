"""Exceptions of a backward pass: the call whose derivative raised, and what has become of the values that it needs.

The program is run again with hooks before each autograd node: the last node that began is the one that raised. A value
that a call has saved was written if its version counter has moved; which calls did that shows a second run. Two graphs
share what the last call behind both of them has made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from reprokit.locate.failure import label_of
from reprokit.locate.notes import starts_of
from reprokit.program.dataflow import Node, NodeOwners, node_of, reachable, values_behind
from reprokit.program.functions import display_name
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Program
from reprokit.program.sites import variables
from reprokit.rules.predicates import raises
from reprokit.rules.rule import Numbers
from reprokit.rules.scene import Scene
from reprokit.words import listed

_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")


@dataclass
class _Watch:
    """An observer of the run of a program up to the backward call at ``index``, which raises.

    ``graphs`` are the nodes of each backward call, ``last`` is the node that began last. Of the values of call number
    ``near`` the version is kept, and the later calls that have changed it (``writers``); ``saved`` is the memory that
    this call has saved.
    """

    index: int
    near: int | None = None
    owners: NodeOwners = field(default_factory=NodeOwners)
    graphs: dict[int, set[Node]] = field(default_factory=dict)
    last: Node | None = None
    held: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    _hooks: Any = None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        if call.is_differentiation:
            starts = [values[value] for value in starts_of(call) if value in values]
            self.graphs[index] = set(reachable(map(node_of, starts)))
        for node in self.graphs[index] if index == self.index else ():
            node.register_prehook(lambda *_, node=node: setattr(self, "last", node))
        if index == self.near:
            self._hold(call.input_refs(), values)
            self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
            self._hooks.__enter__()

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        if index == self.near:
            self._hooks.__exit__()
            self._hold(call.output_refs(), values)
        if not call.is_differentiation:
            self.owners.own_outputs(index, call, values)
        for value, (tensor, version) in self.held.items():
            if tensor._version != version:
                self.held[value] = tensor, tensor._version
                self.writers.setdefault(value, []).append(index)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.add(_memory_of(tensor))
        return tensor

    def _hold(self, wanted: Collection[int], values: Mapping[int, torch.Tensor]) -> None:
        found = {value: values[value] for value in wanted if value in values and not values[value].is_inference()}
        self.held.update((value, (tensor, tensor._version)) for value, tensor in found.items())


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _watched(scene: Scene, near: int | None = None) -> _Watch:
    watch = _Watch(scene.index, near)
    run(scene.program, scene.tensors, observer=watch)
    return watch


def written_since(scene: Scene) -> Numbers | None:
    """The value that a call has saved for the backward pass, and the calls that have written into it since."""
    found = raises("modified by an inplace operation")(scene)
    if found is None:
        return None
    calls, message = scene.program.calls, found["exception"]
    first = _watched(scene)
    owner = first.owners.owner(first.last)
    if owner is None:
        return {"seen": message}
    watch = _watched(scene, owner)
    saved = [value for value in watch.writers if _memory_of(watch.held[value][0]) in watch.saved]
    shape = re.search(r"Tensor \[([\d, ]*)\]", message)
    sizes = sorted(map(int, re.findall(r"\d+", shape[1]))) if shape is not None else []
    alike = [value for value in saved if sorted(watch.held[value][0].shape) == sizes] or saved
    if not alike:
        return {"seen": message}
    name, writers = name_of(scene.program, alike[0], scene.index), watch.writers[alike[0]]
    by = listed([*dict.fromkeys(place_of(calls[index]) for index in writers)])
    now = _VERSIONS.search(message)
    versions = f" (version {now[2]} when it was saved, {now[1]} now)" if now is not None else ""
    kept = f"{name} was saved for the backward pass by {place_of(calls[owner])}"
    return {"seen": f"{kept}, and written since by {by}{versions}"}


def freed_before(scene: Scene) -> Numbers | None:
    """The value that leads to a graph which an earlier backward pass has freed, and that pass."""
    found = raises("backward through the graph a second time")(scene)
    if found is None:
        return None
    calls, watch, index = scene.program.calls, _watched(scene), scene.index
    graph = watch.graphs[index]
    freed = next((n for n, other in reversed(watch.graphs.items()) if n < index and watch.last in other), None)
    if freed is None:
        return {"seen": found["exception"]}
    shared = max(n for node in graph & watch.graphs[freed] if (n := watch.owners.owner(node)) is not None)
    behind = values_behind(calls, starts_of(calls[index]), index)
    value = next((value for value in calls[shared].output_refs() if value in behind), None)
    made, number = place_of(calls[shared]), scene.number
    passes = [n for n in watch.graphs if calls[n].site == calls[index].site]
    ago = sum(shared < n < index for n in passes) if calls[freed].site == calls[index].site else 0
    of_step = f" of step {number - ago}" if number is not None and ago else " of an earlier step" if ago else ""
    name = f"{name_of(scene.program, value, index)}{of_step}, made by {made}," if value is not None else made
    start = name_of(scene.program, starts_of(calls[freed])[0], freed)
    by = f"the backward pass of {start}" + (f" ({site.place})" if (site := calls[freed].site) is not None else "")
    return {"seen": f"{name} is {'used again' if ago else 'part of both graphs'}, and {by} has freed its graph"}


def name_of(program: Program, value: int, before: int) -> str:
    """A value as the user knows it: its input, its variable, or the call that made it."""
    known = {item.value: item.name for item in program.inputs} | variables(program.calls[:before])
    if value in known:
        return f"`{known[value]}`"
    maker = next(call for call in program.calls if value in call.output_refs())
    return f"the result of {place_of(maker)}"


def place_of(call: Call) -> str:
    """``Adam.step` (train.py:12)`` in backticks, with the module where there is one."""
    name = display_name(call.target).removeprefix("torch.optim.").removeprefix("torch.")
    inside = f" in `{label_of(call)}`" if call.scope else ""
    return f"`{name}`{inside}" + (f" ({call.site.place})" if call.site is not None else "")
