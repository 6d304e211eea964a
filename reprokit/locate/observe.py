"""Looking at a step: the one run of a program that makes the scene of its failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.scene import Branch, Scene, Seen, Step
from reprokit.locate.ways import largest_finite
from reprokit.program.ir import Call, Program, Ref, map_leaves
from reprokit.program.run import bind_arguments, run
from reprokit.series import failing_series


def observe(step: Step) -> Scene:
    """The scene of a step's failure, from one run."""
    scene = Scene(step.program, step.tensors, step.failure, failing_series(step.timeline), step.settings)
    run(_needed(step), step.tensors, observer=_Watch(scene))
    scene.branches = [branch for branch in scene.branches if scene.leads_to_loss(branch.call)]
    return scene


def _needed(step: Step) -> Program:
    """The program; up to its last call in a forward pass, where the failure is in one too."""
    origin, calls = step.failure.call_index, step.program.calls
    if origin is None or step.failure.phase != "forward" or step.failure.is_derivative:
        return step.program
    last = max((index for index, call in enumerate(calls) if call.phase == "forward"), default=origin)
    return replace(step.program, calls=calls[: max(origin, last) + 1], outputs=())


class _Watch:
    """Observes the run for a scene."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._near = _near(scene)
        self._downstream: set[int] = set()

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what the calls near the origin are given."""
        if index in self._near:
            args, kwargs = map_leaves(bind_arguments(call, values), _copied)
            self._scene.seen[index] = Seen(call, args, kwargs)
        if self._downstream.intersection(call.input_refs()):
            self._note_branch(call, values)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note peaks, and results near the origin."""
        made = {value: values[value] for value in call.output_refs() if value in values}
        if index in self._near:
            self._scene.seen[index].results.update(map_leaves(made, _copied))
        is_origin = index == self._scene.failure.call_index
        if is_origin or (self._downstream.intersection(call.input_refs()) and not call.name.endswith("_like")):
            self._downstream.update(made)
        peak = _peak(made.values())
        if peak is not None:
            self._scene.peaks[index] = peak

    def _note_branch(self, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        for kept in _kept(call, values, self._downstream):
            self._scene.branches.append(Branch(call, kept.detach().clone()))


def _near(scene: Scene) -> set[int]:
    """The origin, and the calls that its arguments come from."""
    index, call = scene.failure.call_index, scene.call
    if index is None or call is None:
        return set()
    found = {index}
    if not call.is_optimizer_step:
        found.update(number for number, _ in scene.makers_of((call.args, dict(call.kwargs)), index, 2))
    return found


def _kept(call: Call, values: Mapping[int, torch.Tensor], downstream: set[int]) -> Iterator[torch.Tensor]:
    """Where a call keeps elements of a value that is downstream of the origin, if it is one that drops some."""

    def is_downstream(argument: Any) -> bool:
        return isinstance(argument, Ref) and argument.value in downstream

    def real(argument: Any) -> Any:
        return values.get(argument.value) if isinstance(argument, Ref) else argument

    name, args = short_name(call), [*call.args, *call.kwargs.values()]
    if name == "where" and len(args) == 3:
        chosen, condition, other = (
            (args[0], args[1], args[2]) if "Tensor" in call.target else (args[1], args[0], args[2])
        )
        mask = real(condition)
        if isinstance(mask, torch.Tensor):
            if is_downstream(chosen):
                yield mask.bool()
            if is_downstream(other):
                yield ~mask.bool()
    elif name == "masked_fill" and len(args) >= 3 and is_downstream(args[0]):
        yield ~real(args[1]).bool()
    elif name == "mul" and len(args) == 2:
        for one, other in (args, args[::-1]):
            factor = real(other)
            if is_downstream(one) and isinstance(factor, torch.Tensor) and bool((factor == 0).any()):
                yield factor != 0
    elif call.name == "__getitem__" and is_downstream(args[0]):
        mask = real(args[1])
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
            yield mask


def _peak(tensors: Iterable[torch.Tensor]) -> float | None:
    """The largest finite magnitude, ``None`` where there are no floats."""
    peaks = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
            peaks.append(largest_finite(tensor))
    return max(peaks, default=None)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
