"""The state of a training from before the step that failed, and the state dicts made of it.

State dicts hold tensors and plain values, so that `torch.load(..., weights_only=True)` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reprokit.grammar import Line, Name
from reprokit.snapshot.rng import PlainTensor

StateValue = PlainTensor | float | bool | tuple[float | bool, ...] | Line | None


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A parameter group: its options, and the state of each of its parameters in their order."""

    options: dict[Name, StateValue] = field(default_factory=dict)
    state: list[dict[Name, StateValue]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateBefore:
    """The state dicts of root modules and the groups of optimizers, by name where there are several, else under ``""``.

    ``left_out`` says what could not be kept.
    """

    modules: dict[Name, dict[Name, PlainTensor]] = field(default_factory=dict)
    optimizers: dict[Name, list[OptimizerGroup]] = field(default_factory=dict)
    left_out: list[Line] = field(default_factory=list)

    def model(self) -> dict[str, Any]:
        """The state dict of the root module; of several roots a dict of state dicts by name."""
        return _only(self.modules)

    def optimizer(self) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes; of several optimizers a dict of these by name."""
        return _only({name: _state_dict(groups) for name, groups in self.optimizers.items()})


def is_state_value(value: Any) -> bool:
    """True if a value can be stored: tensors, numbers, words, and tuples of numbers."""
    if isinstance(value, tuple):
        return all(type(item) in (int, float, bool) for item in value)
    return type(value) in (int, float, bool, str, type(None)) or isinstance(value, torch.Tensor)


def _only(named: Mapping[str, Any]) -> dict[str, Any]:
    return dict(next(iter(named.values()))) if list(named) == [""] else dict(named)


def _state_dict(groups: list[OptimizerGroup]) -> dict[str, Any]:
    """The numbering is that of `torch.optim.Optimizer.state_dict`: parameters in the order of the groups."""
    state: dict[int, Any] = {}
    described = []
    start = 0
    for group in groups:
        state |= {start + place: dict(values) for place, values in enumerate(group.state) if values}
        end = start + len(group.state)
        described.append({**group.options, "params": list(range(start, end))})
        start = end
    return {"state": state, "param_groups": described}
