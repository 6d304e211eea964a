"""Tensors, or the numbers that stand for them, inside of nested structures: tuples, dicts, dataclasses, distributions,
and any other object with attributes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch

from reprokit.errors import pass_on

Leaf = TypeVar("Leaf")
_MAX_DEPTH = 6
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})  # by exact type
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # the usual classes of tensors
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    torch.dtype,
    torch.device,
    torch.Generator,
    Enum,
)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance` for the variables of a script, by their real type.

    A proxy, such as Flask's `request`, raises where `isinstance` asks it for the class of what it stands for.
    """
    return issubclass(type(value), kinds)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``: one, some, or what `iter_tensors` finds."""
    kind = type(value)
    if kind in TENSORS:
        return [value]
    if (kind is list or kind is tuple) and TENSORS.issuperset(map(type, value)):
        return list(value)
    return list(iter_leaves(value, torch.Tensor))


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in an order that depends on its structure only."""
    return iter_leaves(value, torch.Tensor)


def iter_leaves(value: Any, kind: type[Leaf], depth: int = 0) -> Iterator[Leaf]:
    """Every object of a ``kind`` in ``value``, in an order that depends on its structure only."""
    if isinstance(value, kind):
        yield value
    elif type(value) in ATOMS or isinstance(value, _LEAVES) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, kind):
                yield item
            elif type(item) not in ATOMS:
                yield from iter_leaves(item, kind, depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_leaves(item, kind, depth + 1)
    elif hasattr(value, "__dict__"):
        for item in list(vars(value).values()):
            yield from iter_leaves(item, kind, depth + 1)


def map_leaves(value: Any, kind: type[Leaf], change: Callable[[Leaf], Any], depth: int = 0) -> Any:
    """``value`` with every object of a ``kind`` changed; containers that hold a changed one are copied, everything else
    is shared."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in ATOMS or isinstance(value, _LEAVES) or depth > _MAX_DEPTH:
        return value
    if isinstance(value, (list, tuple)):
        new = [
            change(item)
            if isinstance(item, kind)
            else item
            if type(item) in ATOMS
            else map_leaves(item, kind, change, depth + 1)
            for item in value
        ]
        if all(map(operator.is_, new, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            made: Any = tuple.__new__  # a `PackedSequence` looks at its items when it is made
            return made(type(value), new)
        return type(value)(new)
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not hasattr(value, "__dict__"):
        return value
    items: Any = value if is_mapping else vars(value)
    changed = {key: map_leaves(item, kind, change, depth + 1) for key, item in items.items()}
    if all(changed[key] is items[key] for key in changed):
        return value
    if type(value) is dict:
        return changed
    duplicate: Any = copy.copy(value)
    if is_mapping:
        for key, item in changed.items():
            duplicate[key] = item
    else:
        vars(duplicate).update(changed)
    return duplicate


def repeatable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with lists in place of iterators, which can be read only once."""
    given = tuple([value if value.__class__ in ATOMS else _as_list(value) for value in args])
    if ATOMS.issuperset(map(type, kwargs.values())):
        return given, kwargs
    return given, {name: _as_list(value) for name, value in kwargs.items()}


def _as_list(value: Any) -> Any:
    """A list of an iterator's items, or the iterator again if it raises: an error of the user's is torch's to meet."""
    if not hasattr(type(value), "__next__"):
        return value
    items: list[Any] = []
    try:
        items.extend(value)
    except Exception as error:
        pass_on(error)
        raised = error

        def again() -> Iterator[Any]:
            yield from items
            raise raised

        return again()
    return items


def with_own_index(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `__getitem__` or `__setitem__` with copies of the lists and NumPy arrays in the index.

    A loop may shuffle such an index in place after the call; no version counter shows that.
    """
    return (args[0], _own_index(args[1]), *args[2:]) if len(args) > 1 else args


def _own_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_own_index(item) for item in index)
    return copy.copy(index) if isinstance(index, list) or type(index).__module__ == "numpy" else index


def is_leaf(tensor: torch.Tensor) -> bool:
    """True if a tensor is a leaf that needs gradients; a view that torch declared invalid is not."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view made without grad whose base was written with grad
        return False
