"""Exceptions of a backward pass: the call whose derivative raised, and what has become of the values that it needs.

The program is run again with hooks before each autograd node: the last node that began is the one that raised. A value
that a call has saved was written if its version counter has moved; which calls did that shows a second run. Two graphs
share what the last call behind both of them has made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import saved_tensors_hooks

from reprokit import native, torch_private
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


@dataclass
class _Watch:
    """An observer of a run up to the backward call at ``index``, which raises: the nodes of each backward call
    (``graphs``), and the node that began last. Of the values of call number ``near``: the later calls that have written
    them, by their versions, and the memory that the call has ``saved``."""

    index: int
    near: int | None = None
    owners: NodeOwners = field(default_factory=NodeOwners)
    graphs: dict[int, set[Node]] = field(default_factory=dict)
    last: Node | None = None
    held: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)

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
            if torch_private.version(tensor) != version:
                self.writers.setdefault(value, []).append(index)
        self._hold(self.held, {value: tensor for value, (tensor, _) in self.held.items()})

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.add(_memory_of(tensor))
        return tensor

    def _hold(self, wanted: Iterable[int], values: Mapping[int, torch.Tensor]) -> None:
        found = {value: values[value] for value in wanted if value in values and not native.is_inference(values[value])}
        self.held.update({value: (tensor, torch_private.version(tensor)) for value, tensor in found.items()})


def _memory_of(tensor: torch.Tensor) -> int:
    return native.untyped_storage(tensor).data_ptr() if tensor.layout is torch.strided else 0


def _watched(scene: Scene, near: int | None = None) -> _Watch:
    watch = _Watch(scene.index, near)
    run(scene.program, scene.tensors, observer=watch)
    return watch


_ADVICE = {  # by whether optimizers alone have written the value
    False: "Use the operation out of place (`h = h + 1`, not `h += 1`), or write into a copy (`h = h.clone()`).",
    True: "Call `step()` after the last backward pass through the old parameters, or run the forward pass again with "
    "the new ones: a GAN whose discriminator has stepped computes `D(fake)` once more for the generator's loss.",
}


def written_since(scene: Scene) -> Numbers | None:
    """The value that a call has saved for the backward pass, the calls that have written into it since, and advice."""
    found = raises("modified by an inplace operation")(scene)
    if found is None:
        return None
    calls, message, first = scene.program.calls, found["exception"], _watched(scene)
    owner = first.owners.owner(first.last)
    watch = _watched(scene, owner)
    shape = re.search(r"Tensor \[([\d, ]*)\]", message)
    sizes = sorted(map(int, re.findall(r"\d+", shape[1]))) if shape is not None else []
    saved = [value for value in watch.writers if _memory_of(watch.held[value][0]) in watch.saved]
    saved.sort(key=lambda value: sorted(watch.held[value][0].shape) != sizes)  # the message has the size of its own
    if owner is None or not saved:
        return {"seen": message, "advice": " ".join(_ADVICE.values())}
    writers = [calls[index] for index in watch.writers[saved[0]]]
    by = listed([*dict.fromkeys(map(place_of, writers))])
    now = re.search(r"is at version (\d+); expected version (\d+)", message)
    versions = f" (version {now[2]} when it was saved, {now[1]} now)" if now is not None else ""
    name, saver = name_of(scene.program, saved[0], scene.index), place_of(calls[owner])
    seen = f"{name} was saved for the backward pass by {saver}, and written since by {by}{versions}"
    return {"seen": seen, "advice": _ADVICE[all(call.is_optimizer_step for call in writers)]}


def freed_before(scene: Scene) -> Numbers | None:
    """The value that leads to a graph which an earlier backward pass has freed, and that pass."""
    found = raises("backward through the graph a second time")(scene)
    if found is None:
        return None
    program, calls, watch, index = scene.program, scene.program.calls, _watched(scene), scene.index
    freed = next((n for n, other in reversed(watch.graphs.items()) if n < index and watch.last in other), None)
    both = watch.graphs[index] & watch.graphs[freed] if freed is not None else ()
    shared = max((n for node in both if (n := watch.owners.owner(node)) is not None), default=None)
    if freed is None or shared is None:
        return {"seen": found["exception"]}
    ago = 0  # passes of the same line since
    if calls[freed].site == calls[index].site:
        ago = sum(shared < n < index for n in watch.graphs if calls[n].site == calls[index].site)
    name, used = _shared_words(scene, shared, ago), "used again" if ago else "part of both graphs"
    by = f"the backward pass of {name_of(program, starts_of(calls[freed])[0], freed)}{_line(calls[freed])}"
    return {"seen": f"{name} is {used}, and {by} has freed its graph"}


def _shared_words(scene: Scene, shared: int, ago: int) -> str:
    """What a call has made that leads to a freed graph, so many steps ago."""
    calls, index = scene.program.calls, scene.index
    behind = values_behind(calls, starts_of(calls[index]), index)
    value = next((value for value in calls[shared].output_refs() if value in behind), None)
    if value is None:
        return place_of(calls[shared])
    name = name_of(scene.program, value, index)
    if ago:
        step = f"step {scene.number - ago}" if scene.number is not None else "an earlier step"
        name = f"{name} of {step}"
    return f"{name}, made by {place_of(calls[shared])},"


def name_of(program: Program, value: int, before: int) -> str:
    """A value as the user knows it: its input, its variable, or the call that made it."""
    known = {item.value: item.name for item in program.inputs} | variables(program.calls[:before])
    maker = next((call for call in program.calls if value in call.output_refs()), None)
    return f"`{known[value]}`" if value in known or maker is None else f"the result of {place_of(maker)}"


def place_of(call: Call) -> str:
    """`` `Adam.step` in `head` (train.py:12) ``, as far as it is known."""
    name = display_name(call.target).removeprefix("torch.optim.").removeprefix("torch.")
    return f"`{name}`{f' in `{label_of(call)}`' if call.scope else ''}{_line(call)}"


def _line(call: Call) -> str:
    return f" ({call.site.place})" if call.site is not None else ""
