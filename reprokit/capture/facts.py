"""Facts about a torch function, computed once for each: its name, if it writes, if it is random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program import functions
from reprokit.program.ir import AUTOGRAD_BACKWARD


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a torch function; ``function`` is the original, without the wrapper of a capture.

    ``is_special``: it may be random, write, or make a tensor of numbers only.
    """

    function: Callable[..., Any]
    name: str
    is_in_place: bool
    is_differentiation: bool
    is_random: bool
    is_special: bool
    is_indexing: bool


def facts_of(func: Callable[..., Any]) -> Facts:
    """The facts of a function, found once."""
    facts = _FACTS.get(func)
    return facts if facts is not None else _find_facts(func)


def _find_facts(func: Callable[..., Any]) -> Facts:
    function = func
    if func not in _DIFFERENTIATION and getattr(func, "__wrapped__", None) in _DIFFERENTIATION:
        function = func.__wrapped__  # type: ignore[attr-defined]
    name = functions.name_of(function) or (AUTOGRAD_BACKWARD if function in _DIFFERENTIATION else "")
    is_in_place, is_random = functions.is_in_place(name), functions.is_random(name)
    is_special = not name or is_in_place or is_random or functions.is_factory(name) or name in functions.GRAD_WRITES
    is_differentiation = function in _DIFFERENTIATION
    is_indexing = function in _INDEXING
    facts = Facts(function, name, is_in_place, is_differentiation, is_random, is_special, is_indexing)
    if name and function is func:
        _FACTS[func] = facts
    return facts


_FACTS: dict[Callable[..., Any], Facts] = {}
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_DIFFERENTIATION = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})

# Functions that change nothing and tell the loop something; those that also make it wait for the device.
_SILENT_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "item",
    "tolist",
    "numpy",
    "stride",
    "element_size",
    "data_ptr",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_pinned",
    "is_signed",
    "storage_offset",
    "untyped_storage",
    "__len__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__complex__",
    "__repr__",
    "__format__",
    "__hash__",
    "__contains__",
    "__reduce_ex__",
    "__deepcopy__",
    "register_hook",
    "retain_grad",
]
_SILENT_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "ndim",
    "is_cuda",
    "is_cpu",
    "grad_fn",
    "is_nested",
    "is_sparse",
    "layout",
    "itemsize",
    "nbytes",
    "names",
    "output_nr",
    "_version",
    "_base",
    "is_meta",
    "is_quantized",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "retains_grad",
    "_backward_hooks",
]
READS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__bool__", "numpy", "tolist")
)
SILENT = frozenset(
    [getattr(torch.Tensor, name) for name in _SILENT_METHODS]
    + [
        getattr(torch.Tensor, name).__get__
        for name in _SILENT_ATTRIBUTES
        if hasattr(getattr(torch.Tensor, name, None), "__get__")
    ]
    + [torch._C._set_grad_enabled]  # of `torch.no_grad`, whose end nothing may come before
)
