"""Real arguments of a call as a program holds them: plain data, torch's constants by name, tensors by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from reprokit.program.ir import Device, Ref, Slice, Symbol


class CannotRecord(TypeError):
    """An argument that a program cannot hold."""


def encode(value: Any, ref_of: Callable[[torch.Tensor], Ref]) -> Any:
    """Arguments as a program holds them, tensors by ``ref_of``; raises `CannotRecord`."""
    if isinstance(value, torch.Tensor):
        return ref_of(value)
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Symbol(str(value))
    if isinstance(value, torch.device):
        return Device(str(value))
    if isinstance(value, slice):
        return Slice(*(encode(part, ref_of) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return tuple(encode(item, ref_of) for item in value)
    if isinstance(value, list):
        return [encode(item, ref_of) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item, ref_of) for key, item in value.items()}
    if isinstance(value, type) and value in (bool, int, float):
        return Symbol({bool: "torch.bool", int: "torch.int64", float: "torch.float64"}[value])
    # NumPy scalars, enums and number-like objects as plain numbers and texts
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise CannotRecord(f"a program cannot hold a `{type(value).__name__}`")


def with_indexes(value: Any) -> Any:
    """The argument of `__getitem__`, with NumPy arrays as the tensors that torch makes of them."""
    if isinstance(value, tuple):
        return tuple(with_indexes(item) for item in value)
    if type(value).__module__ != "numpy" or getattr(value, "ndim", 0) == 0 or value.dtype.kind not in "biu":
        return value
    index = torch.tensor(value)
    return index if index.dtype in (torch.bool, torch.uint8) else index.long()
