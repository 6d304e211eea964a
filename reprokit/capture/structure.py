"""Tensors, or the numbers that stand for them, inside of nested structures: tuples, dicts, dataclasses, distributions,
and any other object with attributes."""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
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
    slice,
    weakref.ref,  # such as a `Number`
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
    cls = type(value)
    if issubclass(cls, kind):
        yield value
    elif cls not in ATOMS and depth <= _MAX_DEPTH and not issubclass(cls, _LEAVES):
        for item in value if cls in _PLAIN else dict.values(value) if cls is dict else _parts(value):
            if issubclass(type(item), kind):
                yield item
            elif type(item) not in ATOMS:
                yield from iter_leaves(item, kind, depth + 1)


def map_leaves(value: Any, kind: type[Leaf], change: Callable[[Leaf], Any], depth: int = 0) -> Any:
    """``value`` with every object of a ``kind`` changed; containers that hold a changed one are copied, everything else
    is shared."""
    cls = type(value)
    if issubclass(cls, kind):
        return change(value)
    if cls in ATOMS or depth > _MAX_DEPTH or issubclass(cls, _LEAVES):
        return value
    parts = value if cls in _PLAIN else _parts(value)
    new = [
        change(item)
        if issubclass(type(item), kind)
        else item
        if type(item) in ATOMS
        else map_leaves(item, kind, change, depth + 1)
        for item in parts
    ]
    if all(map(operator.is_, new, parts)):
        return value
    if cls in _PLAIN:
        return cls(new)
    return _with_parts(value, dict(zip(map(id, parts), new, strict=True)))


# -- what an object stores: read and written without its own methods, which may load a field, count calls, or draw ----


def _parts(value: Any) -> list[Any]:
    """The items of a list, tuple or dict, and the attributes of it or of another object that are no items.

    Outputs of transformers store each field as an item and as an attribute. An object made by other C code than
    Python's own containers has no parts: nothing of it can be copied here.
    """
    if type(value) is dict:
        return list(value.values())
    if _maker(type(value)) is None:
        return []
    items, fields = _items(value), [field for _, field in _fields(value)]
    stored = set(map(id, items))
    return items + [field for field in fields if id(field) not in stored]


def _with_parts(value: Any, changed: dict[int, Any]) -> Any:
    """A copy of an object with others of the `_parts`, by the ``id`` of the old ones."""
    cls, items = type(value), [changed[id(item)] for item in _items(value)]
    make: Any = _maker(cls)
    new = make(cls, items) if issubclass(cls, tuple) else make(cls)
    if issubclass(cls, list):
        list.extend(new, items)
    elif issubclass(cls, dict):
        if any(map(_has_own_hash, dict.keys(value))):
            return value
        put: Any = OrderedDict.__setitem__ if issubclass(cls, OrderedDict) else dict.__setitem__
        for key, item in zip(dict.keys(value), items, strict=True):
            put(new, key, item)
    for name, field in _fields(value):
        if isinstance(name, str):
            space_of(new)[name] = changed[id(field)]
        else:
            name.__set__(new, changed[id(field)])
    return new


def _items(value: Any) -> list[Any]:
    for kind, read in ((dict, dict.values), (list, list.__iter__), (tuple, tuple.__iter__)):
        if issubclass(type(value), kind):
            return list(read(value))
    return []


def _fields(value: Any) -> Iterator[tuple[Any, Any]]:
    """The attributes of an object: their names, or the descriptors of its slots, and values."""
    yield from list(dict.items(space_of(value)))
    for base in _classes(type(value)):
        for slot in _namespace(base).values():
            if type(slot) is MemberDescriptorType and slot.__name__ != "__dict__":
                with contextlib.suppress(AttributeError):  # one that has no value yet
                    yield slot, slot.__get__(value)


def space_of(value: Any) -> dict[str, Any]:
    """The ``__dict__`` of an object, empty if it has none; not what a class of the user's says that it is."""
    for base in _classes(type(value)):
        found = _namespace(base).get("__dict__")
        if type(found) is GetSetDescriptorType or type(found) is MemberDescriptorType:
            space: dict[str, Any] = found.__get__(value)
            return space
    return {}


def _maker(cls: type) -> Any:
    """The function in C that makes objects of a class, ``None`` unless it is one of Python's containers."""
    for base in _classes(cls):
        made_by = _namespace(base).get("__new__")
        if type(made_by) is BuiltinFunctionType:
            return made_by if base in _MADE_HERE else None
    return None


def _has_own_hash(key: Any) -> bool:
    """True for a key of a dict that cannot be copied without a call of a ``__hash__`` of the user's."""
    if type(key) is tuple:
        return any(map(_has_own_hash, key))
    return type(type(key).__hash__) is FunctionType and not issubclass(type(key), (Enum, torch.Tensor))


_MADE_HERE = (object, dict, list, tuple, SimpleNamespace)
_PLAIN = frozenset({list, tuple, *(kind for kind in vars(torch.return_types).values() if isinstance(kind, type))})
_classes: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
_namespace: Callable[[type], dict[str, Any]] = vars(type)["__dict__"].__get__


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
    if type(index) is tuple:
        return tuple(_own_index(item) for item in index)
    is_array = type(index).__module__ == "numpy"
    return list(list.__iter__(index)) if issubclass(type(index), list) else copy.copy(index) if is_array else index


def is_leaf(tensor: torch.Tensor) -> bool:
    """True if a tensor is a leaf that needs gradients; a view that torch declared invalid is not."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view made without grad whose base was written with grad
        return False
