"""Steps of the past in numbers that training did not compute: gradient norm, update, share of zeros in gradients, and
numbers of every layer for the story.

They are measured while the steps are played, so they cost nothing until somebody asks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from reprokit.capture.calls import Backward, Clip, OptimizerStep, Unscale
from reprokit.capture.structure import iter_leaves, iter_tensors
from reprokit.capture.tape import Mark, Number, Op
from reprokit.locate.quantity import norm_of, share_of_zeros, update_of
from reprokit.locate.ranges import Range, measure
from reprokit.series.story import LayerNumbers
from reprokit.series.timeline import parameters_of
from reprokit.words import user_path

_READS_GRADIENTS = (Clip, OptimizerStep)


@dataclass
class MeasuredStep:
    """A step that was played. ``optimizer`` is the ``id`` of the one that made its update. ``zeros`` are the shares of
    zeros in gradients, by the ``id`` of the parameter, ``None`` for one that is trained and has no gradient."""

    mark: Mark
    optimizer: int | None = None
    norm: float | None = None
    update: float | None = None
    zeros: dict[int, float | None] = field(default_factory=dict)


class OutOfTime(Exception):
    """Steps were played for as long as was granted."""


class StepMeter:
    """Measures every step that a rewind plays; ``steps`` has them in order.

    With ``seconds`` of CPU time it raises `OutOfTime` at the first step that begins later, after ``least`` steps.
    """

    def __init__(self, alive: Mapping[Number, torch.Tensor], *, seconds: float | None = None, least: int = 0) -> None:
        self._alive = alive
        self._least = least
        self._ends = None if seconds is None else time.process_time() + seconds
        self.steps: list[MeasuredStep] = []
        self._before: list[torch.Tensor] = []

    def before(self, mark: Mark, op: Op) -> None:
        """Measure gradients where they are complete and not yet clipped, and remember parameters."""
        if not self.steps or self.steps[-1].mark is not mark:
            if self._ends is not None and len(self.steps) >= self._least and time.process_time() > self._ends:
                raise OutOfTime
            self.steps.append(MeasuredStep(mark))
        measured = self.steps[-1]
        if op.kind not in _READS_GRADIENTS:
            return
        with torch.no_grad():
            if measured.norm is None:
                parameters = self._given_to(op)
                pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
                measured.norm = norm_of(gradient for _, gradient in pairs)
                measured.zeros = {id(p): None for p in parameters if p.grad is None and p.requires_grad}
                measured.zeros.update((id(parameter), share_of_zeros(gradient)) for parameter, gradient in pairs)
            if op.kind is OptimizerStep:
                measured.optimizer = id(op.target)
                self._before = [parameter.detach().clone() for parameter in parameters_of(op.target)]

    def after(self, op: Op) -> None:
        """Measure the update of an optimizer."""
        if op.kind is OptimizerStep:
            with torch.no_grad():
                now = [parameter.detach() for parameter in parameters_of(op.target)]
                self.steps[-1].update = update_of(self._before, now)
            self._before = []

    def _given_to(self, op: Op) -> list[torch.Tensor]:
        if op.kind is OptimizerStep:
            return list(parameters_of(op.target))
        given = op.args[0] if op.args else op.kwargs.get("parameters", ())
        found = [self._alive[n] for n in iter_leaves(given, Number) if n in self._alive]
        return [*found, *iter_tensors(given)]


class LayerMeter:
    """Measures ``layers``, which have names in the order of the model, while it is `watching`."""

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self._names = {id(layer): name for name, layer in layers.items()}
        parameters = {name: list(layer.parameters(recurse=False)) for name, layer in layers.items()}
        self._parameters = {name: found for name, found in parameters.items() if found}
        self._before: dict[str, list[torch.Tensor]] = {}
        self._forget()

    def _forget(self) -> None:
        self._outputs: dict[str, list[Range]] = {}
        self._gradients: dict[str, float] = {}
        self._updates: dict[str, float] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure outputs of layers in here."""
        handle = register_module_forward_hook(self._see_output)
        try:
            yield
        finally:
            handle.remove()

    def _see_output(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and not torch.compiler.is_compiling():
            with torch.no_grad():
                found = [measure(tensor) for tensor in iter_tensors(output) if tensor.is_floating_point()]
            self._outputs.setdefault(name, []).extend(found)

    def before(self, mark: Mark, op: Op) -> None:
        """Remember the weights that an update begins with."""
        if op.kind is OptimizerStep:
            self._before = {name: [p.detach().clone() for p in own] for name, own in self._parameters.items()}

    def after(self, op: Op) -> None:
        """Measure gradients where they are complete, and the change of the weights."""
        before, self._before = self._before, {}
        with torch.no_grad():
            if op.kind in (Backward, Unscale):
                grads = {name: [p.grad for p in own if p.grad is not None] for name, own in self._parameters.items()}
                self._gradients.update((name, norm_of(found) or 0.0) for name, found in grads.items() if found)
            for name, weights in before.items():
                update = update_of(weights, [parameter.detach() for parameter in self._parameters[name]])
                if update is not None:
                    self._updates[name] = update

    def take(self, step: int) -> list[LayerNumbers]:
        """The numbers since the last call, as those of ``step``."""
        rows = []
        for name in self._names.values():
            outputs = self._outputs.get(name, [])
            row = LayerNumbers(
                step,
                name,
                self._gradients.get(name),
                self._updates.get(name),
                _largest(outputs),
                _share_of_zeros(outputs),
            )
            if any(number is not None for number in (row.gradient, row.update, row.activation)):
                rows.append(row)
        self._forget()
        return rows


def layers_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers of a model with their paths."""
    for path, module in root.named_modules():
        if next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None:
            yield user_path(path), module


def _largest(outputs: Iterable[Range]) -> float | None:
    if any(found.num_nan for found in outputs):
        return math.nan
    return max((math.inf if found.num_inf else found.high or 0.0 for found in outputs), default=None)


def _share_of_zeros(outputs: Iterable[Range]) -> float | None:
    sizes = [(math.prod(found.shape), found.zeros) for found in outputs if found.zeros is not None]
    total = sum(size for size, _ in sizes)
    return sum(size * share for size, share in sizes) / total if total else None
