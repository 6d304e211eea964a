"""Plain attributes of root modules and of the user's own optimizers, as each step had them: numbers, strings, flags and
``requires_grad``.

They decide what a forward or an update does (``training``, a dropout's ``p``, a count of steps), so a step of the past
is played with its own. A call of a root or a step of an optimizer compares them by identity, without Python code per
attribute, and notes them anew only after a change. Values of other kinds are left alone.
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from reprokit import members, native, torch_private
from reprokit.capture.generators import own_restored
from reprokit.capture.structure import ATOMS, is_a, iter_tensors, space_of
from reprokit.program.dataflow import node_of
from reprokit.program.sites import kind_of_file

Owner = torch.nn.Module | torch.optim.Optimizer

_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_IMMUTABLE = (enum.Enum, FunctionType, BuiltinFunctionType, type)
_LONGEST = 16  # items of a tuple
_requires_grad = attrgetter("requires_grad")


class _Layout:
    """The plain attributes of an owner and their last values. Parallel lists: ``spaces`` are the ``__dict__`` of
    a root's modules, or of an optimizer, and of the settings they hold, ``names`` the plain attributes in each,
    ``known`` all names in each."""

    __slots__ = ("getters", "known", "last", "names", "parameters", "size", "spaces")

    def __init__(self, owner: Owner) -> None:
        self.spaces: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        self.known: list[frozenset[str]] = []
        self.parameters = [*members.parameters(owner)] if isinstance(owner, torch.nn.Module) else []
        parts: list[Any] = [*members.modules(owner)] if isinstance(owner, torch.nn.Module) else [owner]
        spaces = {id(part): space_of(part) for part in parts}
        for space in list(spaces.values()):
            spaces.update((id(held), fields) for held in space.values() if (fields := _fields_of(held)))
        for space in spaces.values():
            plain = [name for name in space if name not in _OF_TORCH and _is_plain(space[name])]
            if plain:
                self.spaces.append(space)
                self.names.append((plain[0], *plain))  # with a single name a getter would not return a tuple
                self.known.append(frozenset(space))
        self.getters = [itemgetter(*names) for names in self.names]
        self.size = sum(map(len, self.spaces))
        self.last = Noted(self, tuple(self.read()))

    def read(self) -> Iterator[Any]:
        """The values of now; raises `KeyError` if an attribute was deleted."""
        flags = map(_requires_grad, self.parameters)
        return chain(chain.from_iterable(map(call, self.getters, self.spaces)), flags)


@dataclass(frozen=True, slots=True)
class Noted:
    """The plain attributes of an optimizer, or of a root and of every module inside it, at one moment."""

    layout: _Layout
    values: tuple[Any, ...]

    def items(self) -> Iterator[tuple[tuple[dict[str, Any], str], Any]]:
        """The attributes, each by the ``__dict__`` that it is in and its name."""
        values = iter(self.values)
        for space, names in zip(self.layout.spaces, self.layout.names, strict=True):
            yield from (((space, name), value) for name, value in zip(names, values, strict=False))

    def with_values(self, changes: Mapping[tuple[int, str], Any]) -> Noted:
        """The same with other values for attributes, each by the ``id`` of the ``__dict__`` that it is in and name."""
        found = [changes.get((id(space), name), value) for (space, name), value in self.items()]
        return Noted(self.layout, (*found, *self.values[len(found) :]))

    def put_back(self) -> None:
        """Give the owners these attributes, without their ``__setattr__``."""
        values = iter(self.values)
        for space, names, known in zip(self.layout.spaces, self.layout.names, self.layout.known, strict=True):
            for name in space.keys() - known:
                del space[name]
            space.update(zip(names, values, strict=False))
        _set_flags(zip(self.layout.parameters, values, strict=False))


class AttributeWatch:
    """Notes the attributes of the roots and optimizers it has met."""

    def __init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}

    def meet(self, owner: Owner) -> None:
        """Note the attributes of a root or optimizer that is about to be used for the first time.

        Torch's own optimizers keep everything in their state and options.
        """
        if not (isinstance(owner, torch.optim.Optimizer) and is_of_torch(owner)):
            self._layouts[id(owner)] = _Layout(owner)

    def note(self, owner: Owner) -> Noted | None:
        """The attributes of now, the same object as before if none has changed; ``None`` if they are not noted."""
        layout = self._layouts.get(id(owner))
        if layout is None:
            return None
        last, is_same_size = layout.last, sum(map(len, layout.spaces)) == layout.size
        try:
            if is_same_size and all(map(is_, layout.read(), last.values)):
                return last
            values = tuple(layout.read())
        except KeyError:
            is_same_size, values = False, ()
        if is_same_size and all(map(_is_plain, values)):
            layout.last = Noted(layout, values)
        else:  # attributes were added or taken away, or hold something else
            layout = self._layouts[id(owner)] = _Layout(owner)
        return layout.last

    def begin_anew(self, owners: Iterable[Owner]) -> None:
        """A copy of the state was taken: look at all owners again."""
        self._layouts.clear()
        for owner in owners:
            self.meet(owner)

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._layouts.clear()


@contextlib.contextmanager
def attributes_kept(roots: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Whatever runs inside, modules have the attributes, parameters and buffers of before afterwards; the user's own
    optimizers have their attributes.

    Lists, dicts and sets in attributes, at any depth, have the same items again, and tensors the same values; so do
    those of an object in an attribute, such as one that counts.
    """
    modules = members.parts(roots)
    own = [optimizer for optimizer in optimizers if not is_of_torch(optimizer)]
    flags = [(parameter, parameter.requires_grad) for module in modules for parameter in members.own_parameters(module)]
    held = [value for module in modules for value in members.space_of_module(module).values()]
    objects = {id(value): value for value in held if _is_of_user(value)}
    containers = Containers([*modules, *own, *objects.values()])
    state = {id(buffer) for module in modules for buffer in members.own_buffers(module)}  # which is put back elsewhere
    state.update(id(tensor) for optimizer in own for tensor in iter_tensors([*optimizer.state.values()]))
    tensors = []
    num_bytes = 0
    for tensor in _tensors_in(containers.all, state):
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            num_bytes += native.numel(tensor) * native.element_size(tensor)
            tensors += [tensor] if num_bytes <= _MOST_BYTES else []
    contents = [(tensor, native.clone(native.detach(tensor))) for tensor in tensors]
    try:
        values = chain.from_iterable(map(_values, containers.all))
        with torch_private.preserve_versions(tensors), own_restored(values):
            yield
    finally:
        containers.give_back()
        for tensor, content in contents:
            native.copy_(tensor.data, content)
        _set_flags(flags)


_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_MOST_ITEMS = 10_000  # of a container that is looked through at each copy of the state
_MOST_BYTES = 2**26  # of tensors in attributes, which are copied in case that a replay writes them


class Containers:
    """The containers of owners with the items that each has at one moment."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self.all = _containers_of(owners)
        self._items = [container.copy() for container in self.all]

    def give_back(self) -> None:
        """Go back to it."""
        for container, content in zip(self.all, self._items, strict=True):
            if len(container) != len(content) or not all(map(is_, _items(container), _items(content))):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _containers_of(owners: Iterable[Any], most_items: float = math.inf) -> list[Any]:
    """The ``__dict__`` of owners, and of the settings and optimizers they hold, and every container in one of them
    that has at most ``most_items``."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [space_of(owner) for owner in owners]
    while waiting:
        container = waiting.pop()
        if id(container) not in found and len(container) <= most_items:
            found[id(container)] = container
            if ATOMS.issuperset(map(type, _values(container))):
                continue
            waiting += [value for value in _values(container) if type(value) in _CONTAINERS]
            if isinstance(container, dict):
                waiting += [fields for value in container.values() if (fields := _fields_of(value))]
                waiting += [space_of(value) for value in container.values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values())


def tensors_held(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors without a graph in the attributes of an optimizer, its state and options included.

    Not those in a container of more than `_MOST_ITEMS` items.
    """
    return _tensors_in(_containers_of([optimizer], _MOST_ITEMS), set())


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """True if the class of an optimizer is one of torch's."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_of_user(value: Any) -> bool:
    """True for an object of a class in the user's code; one of a library may have threads that change it meanwhile."""
    if not type(value).__dictoffset__ or is_a(value, (type, ModuleType)):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return isinstance(file, str) and kind_of_file(file) == "user"


def _tensors_in(containers: Iterable[Any], found: set[int]) -> Iterator[torch.Tensor]:
    """The tensors without a graph in containers and in tuples there; not those ``found`` already."""
    for value in chain.from_iterable(map(_values, containers)):
        for tensor in iter_tensors(value) if is_a(value, (torch.Tensor, tuple)) else ():
            if id(tensor) not in found and node_of(tensor) is None and not native.is_inference(tensor):
                found.add(id(tensor))
                yield tensor


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _items(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def _set_flags(flags: Iterable[tuple[torch.Tensor, bool]]) -> None:
    with native.DisableTorchFunction():
        for parameter, flag in flags:
            if parameter.requires_grad != flag and parameter.is_leaf:
                native.requires_grad_(parameter, flag)


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that holds settings, such as a dataclass; ``None`` for any other."""
    is_settings = is_a(value, (SimpleNamespace, Namespace)) or is_dataclass(type(value))
    return space_of(value) if is_settings else None


def _is_plain(value: Any) -> bool:
    """True for values that cannot change themselves and hold no memory."""
    if type(value) is tuple or type(value) is torch.Size:
        return len(value) <= _LONGEST and all(type(item) in ATOMS for item in value)
    return type(value) in ATOMS or is_a(value, _IMMUTABLE)
