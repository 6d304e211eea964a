"""Modules as they were before their parameters were spread over processes, for a replay in one of them.

For `fully_shard`: whole parameters take the places of the spread ones, hooks that would talk
to other processes are taken out, and the casts of a mixed-precision policy become plain calls of the step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reprokit.capture.rewind.replayer import code_of
from reprokit.capture.run.ranks import Slot, Unanswered, unit_parameters

_DISTRIBUTED = os.path.join("torch", "distributed", "")
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")  # namespaces of operators
_TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_state_dict_pre_hooks", "_state_dict_hooks"),
)
Place = tuple[torch.nn.Module, str]


@contextlib.contextmanager
def unsharded(
    roots: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    slots: Iterable[Slot],
    whole: Mapping[int, torch.Tensor],
) -> Iterator[dict[int, torch.Tensor]]:
    """Run with ``whole`` parameters (by the ``id`` of the spread ones); yields what stands for what, by ``id``."""
    parts = list({id(part): part for root in roots for part in root.modules()}.values())
    units: list[Any] = [part for part in parts if hasattr(part, "_get_fsdp_state")]
    slots = list(slots)
    spread = {id(slot.parameter): slot.parameter for slot in slots}
    plain = {key: torch.nn.Parameter(whole[key], requires_grad=p.requires_grad) for key, p in spread.items()}
    places = {(id(slot.part), slot.name): plain[id(slot.parameter)] for slot in slots}
    gathered = [known for unit in units for known in unit_parameters(unit) if hasattr(known, "_unsharded_param")]
    stand_ins: dict[int, torch.Tensor] = {
        **plain,  # and those that the loop sees between forward and backward
        **{id(k._unsharded_param): places[id(k._module_info.module), k._module_info.param_name] for k in gathered},
    }
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                stack.callback(group.update, params=group["params"])
                group["params"] = [stand_ins.get(id(parameter), parameter) for parameter in group["params"]]
        for slot in slots:
            stack.callback(_put, slot.part, slot.name, slot.part._parameters[slot.name])
            _put(slot.part, slot.name, plain[id(slot.parameter)])
        for table in [getattr(part, name) for part in parts for name in _TABLES]:
            stack.callback(table.update, dict(table))
            stack.callback(table.clear)
            for key, hook in list(table.items()):
                if _DISTRIBUTED in getattr(code_of(hook), "co_filename", ""):
                    del table[key]
        for unit in units:
            _add_casts(unit, places)
            stack.callback(setattr, unit, "__class__", type(unit))
            unit.__class__ = type(unit).__mro__[unit._orig_cls_mro_index]
        stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
        yield stand_ins


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives: the other processes do not take part in the replay, so one would wait for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVE:
            raise Unanswered(f"it calls `{func.__name__}`, for which all processes are needed")
        return func(*args, **(kwargs or {}))


def _add_casts(unit: Any, places: Mapping[tuple[int, str], torch.Tensor]) -> None:
    """The casts of a unit's policy: parameters and inputs before its forward, outputs behind it."""
    state = unit._get_fsdp_state()
    cast: list[tuple[Place, torch.dtype]] = []
    for spread in unit_parameters(unit):
        info = spread._module_info
        owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        cast += [(owner, spread.param_dtype) for owner in owners if spread.param_dtype is not None]

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        for (part, name), dtype in cast:
            _put(part, name, places[id(part), name].to(dtype))
        return state._cast_forward_inputs(args, kwargs)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        for (part, name), _ in cast:
            _put(part, name, places[id(part), name])
        return state._cast_output_dtype(output)

    unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.register_forward_hook(after)


def _put(part: torch.nn.Module, name: str, tensor: Any) -> None:
    """Register a parameter, or a cast of one; recurrent layers have a second list of theirs."""
    part._parameters[name] = tensor
    names = getattr(part, "_flat_weights_names", ())
    if name in names:
        part._flat_weights[names.index(name)] = tensor  # type: ignore[operator]
