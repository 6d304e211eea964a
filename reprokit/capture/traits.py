"""Traits about a torch function, computed once for each: its name, if it writes, if it is random, if it is noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reprokit import torch_private
from reprokit.program import functions
from reprokit.program.ir import AUTOGRAD_BACKWARD


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits about a torch function; ``function`` is the original, without the wrapper of a capture.

    ``is_plain``: it makes new tensors of tensors, without random numbers. ``is_silent``: it is never noted; if it
    ``is_attribute`` it only gets one, which never warns; if it ``is_read`` it tells the loop a value.
    ``reads_values``: no gradient flows through it. ``may_write``: it writes into
    what it is given, or may be asked to by ``inplace``.
    """

    function: Callable[..., Any]
    name: str
    is_in_place: bool
    is_differentiation: bool
    is_random: bool
    is_plain: bool
    is_indexing: bool
    is_silent: bool
    is_attribute: bool
    is_read: bool
    writes_data: bool
    reads_values: bool
    may_write: bool


def facts_of(func: Callable[..., Any]) -> Traits:
    """The facts of a function, found once."""
    if func in FACTS:
        return FACTS[func]
    function = func
    if func not in _DIFFERENTIATION and getattr(func, "__wrapped__", None) in _DIFFERENTIATION:
        function = func.__wrapped__  # type: ignore[attr-defined]
    name = functions.name_of(function) or (AUTOGRAD_BACKWARD if function in _DIFFERENTIATION else "")
    is_in_place, is_random = functions.is_in_place(name), functions.is_random(name)
    is_silent = func in _SILENT or (isinstance(func, OPERATORS) and _is_of_torch(func))
    is_special = is_random or functions.is_factory(name) or name in functions.GRAD_WRITES | functions.DATA_WRITES
    is_differentiation = function in _DIFFERENTIATION
    may_write = is_in_place or functions.takes_inplace(name)
    facts = Traits(
        function,
        name,
        is_in_place,
        is_differentiation,
        is_random,
        is_plain=bool(name)
        and not (is_special or is_differentiation or is_silent or may_write or func is torch.Tensor.__iter__),
        is_indexing=function in _INDEXING,
        is_silent=is_silent,
        is_attribute=func in _ATTRIBUTES,
        is_read=func in _READS,
        writes_data=name in functions.DATA_WRITES,
        reads_values=name in VALUE_READS,
        may_write=may_write,
    )
    if is_silent or (name and function is func):
        FACTS[func] = facts
    return facts


UNKNOWN = Traits(lambda: None, "", *11 * [False])  # of a function whose own facts could not be found
VALUE_READS = frozenset({"torch.Tensor.detach", "torch.Tensor.data.__get__"})
FACTS: dict[Callable[..., Any], Traits] = {}
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_DIFFERENTIATION = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
# Namespaces of `torch.ops` whose operators torch itself calls, such as the marks that its profiler leaves.
_OF_TORCH = frozenset(
    ["aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor", "fsdp", "higher_order", "inductor",
     "quantized", "rngprims", "symm_mem"]
)  # fmt: skip


def _is_of_torch(operator: Any) -> bool:
    return operator.__module__.rpartition(".")[2] in _OF_TORCH


# Functions that change nothing and tell the loop something; those that also make it wait for the device.
_SILENT_METHODS = [
    "size", "dim", "numel", "nelement", "item", "tolist", "numpy", "stride", "element_size", "data_ptr", "get_device",
    "is_floating_point", "is_complex", "is_contiguous", "is_pinned", "is_signed", "storage_offset", "untyped_storage",
    "__len__", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__repr__", "__format__", "__hash__",
    "__contains__", "__reduce_ex__", "__deepcopy__", "register_hook", "retain_grad",
]  # fmt: skip
_SILENT_ATTRIBUTES = [
    "shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "is_cuda", "is_cpu", "grad_fn", "is_nested",
    "is_sparse", "layout", "itemsize", "nbytes", "names", "output_nr", "_version", "_base", "is_meta", "is_quantized",
    "is_mkldnn", "is_mps", "is_xpu", "retains_grad", "_backward_hooks",
]  # fmt: skip
_READS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__bool__", "numpy", "tolist")
)
_ATTRIBUTES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in _SILENT_ATTRIBUTES
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
)
_SILENT = frozenset(
    [getattr(torch.Tensor, name) for name in _SILENT_METHODS]
    + [*_ATTRIBUTES]
    + [torch_private.set_grad_enabled]  # of `torch.no_grad`, whose end nothing may come before
)
