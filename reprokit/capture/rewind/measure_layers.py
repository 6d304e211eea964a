"""Numbers of every layer in a step that is played: outputs, gradients and the true change of the weights.

A layer is a module with parameters of its own, or one without children. Nothing is measured while training is healthy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.structure import iter_tensors
from reprokit.locate.quantity import norm_of, update_of
from reprokit.locate.ranges import Range, measure
from reprokit.story import LayerNumbers
from reprokit.words import user_path


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

    def before(self, step: PastStep, entry: Entry) -> None:
        """Remember the weights that an update begins with."""
        if entry.kind is kinds.OPTIMIZER:
            self._before = {name: [p.detach().clone() for p in own] for name, own in self._parameters.items()}

    def after(self, entry: Entry) -> None:
        """Measure gradients where they are complete, and the change of the weights."""
        before, self._before = self._before, {}
        with torch.no_grad():
            if entry.kind in (kinds.BACKWARD, kinds.UNSCALE):
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
