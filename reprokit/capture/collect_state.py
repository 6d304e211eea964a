"""Collects the state that a step began with: parameters, buffers and optimizers, for `reprokit export`.

Called while the live state is that of the step's beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from reprokit.capture.roots import unwrapped
from reprokit.capture.world import DEFAULT_STATE_BYTES, options_of
from reprokit.errors import pass_on
from reprokit.snapshot.format import OptimizerGroup, StateBefore, is_state_value, storable

Owner = TypeVar("Owner")
Kept = TypeVar("Kept")


def collect_state(
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    whole: Mapping[int, torch.Tensor],
) -> tuple[StateBefore, dict[int, torch.Tensor]]:
    """Copy the state of root modules and optimizers; also the copies by the ``id`` of the live tensor.

    ``names`` are by ``id``, for those that need one. No more is copied than a capture may hold as its past.
    """
    copies = _Copies(whole)
    found = StateBefore()
    with_state = [module for module in modules if any(True for _ in chain(module.parameters(), module.buffers()))]
    found.modules.update(_each(with_state, names, lambda module: _module_state(module, copies), found.left_out))
    found.optimizers.update(_each(optimizers, names, lambda owner: _optimizer_state(owner, copies), found.left_out))
    return found, copies.made


def _each(
    owners: Sequence[Owner], names: Mapping[int, str], copy: Callable[[Owner], Kept], left_out: list[str]
) -> Iterator[tuple[str, Kept]]:
    """What is kept of each owner, with its name where there are several."""
    for owner in owners:
        cls = type(owner).__name__
        try:
            yield names.get(id(owner), cls) if len(owners) > 1 else "", copy(owner)
        except Exception as error:  # such as one from a state dict of the user's own
            pass_on(error)
            left_out.append(f"the state of `{cls}`: {error}".partition("\n")[0])


class _Copies:
    """Copies on the CPU; raises `ValueError` beyond the bytes that are allowed."""

    def __init__(self, whole: Mapping[int, torch.Tensor]) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self._whole = whole
        self._room = DEFAULT_STATE_BYTES

    def of(self, value: Any) -> Any:
        """A value as it can be stored; a tensor that was copied before is the same tensor again."""
        if not isinstance(value, torch.Tensor):
            return value
        value = self._whole.get(id(value), value)
        copy = self.made.get(id(value))
        if copy is None:
            self._room -= value.numel() * value.element_size()
            if self._room < 0:
                raise ValueError(f"it takes over {DEFAULT_STATE_BYTES // 2**30} GiB")
            copy = self.made[id(value)] = storable(value).clone(memory_format=torch.preserve_format)
        return copy


def _module_state(module: torch.nn.Module, copies: _Copies) -> dict[str, torch.Tensor]:
    inner = unwrapped(module)
    live = chain(inner.named_parameters(remove_duplicate=False), inner.named_buffers(remove_duplicate=False))
    by_name = dict(live)
    state = inner.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ValueError(f"`{odd[0]}` is no tensor")
    return {name: copies.of(by_name.get(name, value)) for name, value in state.items()}


def _optimizer_state(optimizer: torch.optim.Optimizer, copies: _Copies) -> list[OptimizerGroup]:
    found = []
    for group, options in zip(optimizer.param_groups, options_of(optimizer), strict=True):
        parts = [options, *(dict(optimizer.state.get(parameter, {})) for parameter in group["params"])]
        odd = [name for part in parts for name, value in part.items() if not is_state_value(value)]
        if odd:
            raise ValueError(f"`{odd[0]}` is no plain value")
        copied = [{name: copies.of(value) for name, value in part.items()} for part in parts]
        found.append(OptimizerGroup(copied[0], copied[1:]))
    return found
