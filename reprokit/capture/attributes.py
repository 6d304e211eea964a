"""Plain attributes of root modules, as each step had them: numbers, strings, flags and ``requires_grad``.

They decide what a forward does (``training``, a dropout's ``p``, a flag of the user's), so a step of the past is played
with its own. A call of a root compares them by identity, without Python code per attribute, and notes them anew only
after a change. Values of other kinds are left alone.
"""

from __future__ import annotations

import contextlib
import enum
import time
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from reprokit.capture.entry import Entry
from reprokit.capture.structure import ATOMS

_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_IMMUTABLE = (enum.Enum, FunctionType, BuiltinFunctionType, type)
_SHARE = 0.003  # of the training time, for noting changes; as much as copies of the state may take
_CHEAP = 2e-5  # seconds for a look at one root that are always granted
_ALLOWANCE = 0.01  # seconds for noting changes that are always granted
_LONGEST = 16  # items of a tuple
_requires_grad = attrgetter("requires_grad")


class _Layout:
    """Where the attributes of a root are. Parallel lists: ``spaces`` are the ``__dict__`` of its modules and of the
    settings they hold, ``names`` the plain attributes in each, ``known`` all names in each. ``others`` are ids of
    values that are not plain."""

    __slots__ = ("getters", "known", "names", "others", "parameters", "size", "spaces")

    def __init__(self, root: torch.nn.Module) -> None:
        self.spaces: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        self.known: list[frozenset[str]] = []
        self.others: dict[tuple[int, str], int] = {}
        self.parameters = list(root.parameters())
        spaces = {id(module): vars(module) for module in root.modules()}
        for space in list(spaces.values()):
            spaces.update((id(held), fields) for held in space.values() if (fields := _fields_of(held)))
        for space in spaces.values():
            names = [name for name in space if name not in _OF_TORCH]
            plain = [name for name in names if _is_plain(space[name])]
            if plain:
                self.others.update(((len(self.spaces), name), id(space[name])) for name in names if name not in plain)
                self.spaces.append(space)
                self.names.append((plain[0], *plain))  # with a single name a getter would not return a tuple
                self.known.append(frozenset(space))
        self.getters = [itemgetter(*names) for names in self.names]
        self.size = sum(map(len, self.spaces))

    def read(self) -> tuple[Any, ...] | None:
        """The values of now, ``None`` if attributes were added or taken away."""
        try:
            values = tuple(chain.from_iterable(map(call, self.getters, self.spaces)))
        except KeyError:
            return None
        flags = map(_requires_grad, self.parameters)
        return (*values, *flags) if sum(map(len, self.spaces)) == self.size else None


@dataclass(frozen=True, slots=True)
class Noted:
    """The plain attributes of a root and of every module inside it at one moment."""

    layout: _Layout
    values: tuple[Any, ...]

    def is_now(self) -> bool:
        """True if no attribute was set to another value, added or deleted since."""
        layout = self.layout
        found = chain.from_iterable(map(call, layout.getters, layout.spaces))
        flags = map(_requires_grad, layout.parameters)
        try:
            return all(map(is_, chain(found, flags), self.values)) and sum(map(len, layout.spaces)) == layout.size
        except KeyError:
            return False

    def put_back(self) -> None:
        """Give the modules these attributes, without their ``__setattr__``."""
        values = iter(self.values)
        for space, names, known in zip(self.layout.spaces, self.layout.names, self.layout.known, strict=True):
            for name in space.keys() - known:
                del space[name]
            space.update(zip(names, values, strict=False))
        _set_flags(zip(self.layout.parameters, values, strict=False))

    def changed_others(self) -> list[str]:
        """The names of attributes that are not plain and were set to something else since."""
        spaces = self.layout.spaces
        return [name for (number, name), key in self.layout.others.items() if id(spaces[number].get(name)) != key]


class AttributeWatch:
    """Notes the attributes of the roots it has met, as long as that is cheap."""

    def __init__(self) -> None:
        self._noted: dict[int, Noted] = {}
        self._since = time.perf_counter()
        self._spent = 0.0

    def meet(self, root: torch.nn.Module) -> None:
        """Note the attributes of a root that is about to be called for the first time."""
        self._noted.pop(id(root), None)
        layout = _Layout(root)
        values = layout.read()
        if values is not None:
            self._noted[id(root)] = Noted(layout, values)

    def note(self, root: torch.nn.Module) -> Noted | None:
        """The attributes of now, the same object as before if none has changed; ``None`` if they are not noted."""
        noted = self._noted.get(id(root))
        return noted if noted is None or noted.is_now() else self._renewed(root, noted)

    def begin_anew(self, roots: Iterable[torch.nn.Module], step_seconds: float) -> None:
        """A copy of the state was taken: look at all modules again, not at those that would slow every step down."""
        self._noted.clear()
        self._since, self._spent = time.perf_counter(), 0.0
        for root in roots:
            self.meet(root)
            cost = min(self._time_of_note(root) for _ in range(2))
            if cost > max(_CHEAP, _SHARE * step_seconds):
                self._noted.pop(id(root), None)

    def _time_of_note(self, root: torch.nn.Module) -> float:
        started = time.thread_time()
        self.note(root)
        return time.thread_time() - started

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._noted.clear()

    def _renewed(self, root: torch.nn.Module, noted: Noted) -> Noted | None:
        started = time.thread_time()
        if self._spent > _ALLOWANCE + _SHARE * (time.perf_counter() - self._since):
            del self._noted[id(root)]
            return None
        values = noted.layout.read()
        if values is None or not all(map(_is_plain, values)):
            self.meet(root)
        else:
            self._noted[id(root)] = Noted(noted.layout, values)
        self._spent += time.thread_time() - started
        return self._noted.get(id(root))


def put_first_back(entries: Iterable[Entry]) -> None:
    """Give the root modules the attributes that they had in their first calls among ``entries``."""
    first: dict[int, Noted] = {}
    for entry in entries:
        if entry.kind == "module" and entry.settings is not None:
            first.setdefault(id(entry.target), entry.settings)
    for noted in first.values():
        noted.put_back()


@contextlib.contextmanager
def attributes_kept(roots: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Whatever runs inside, modules have the attributes, parameters and buffers of before afterwards.

    Lists, dicts and sets in attributes, at any depth, have the same items again, and tensors the same values.
    """
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    flags = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters(False)]
    containers = _containers_of(modules)
    tensors = list(_tensors_in(containers, {id(buffer) for module in modules for buffer in module.buffers(False)}))
    before = [(container, container.copy()) for container in containers]
    contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with _unsafe_preserve_version_counter(tuple(tensors)):
            yield
    finally:
        for container, content in before:
            if len(container) != len(content) or not all(map(is_, _items(container), _items(content))):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, content in contents:
            tensor.data.copy_(content)
        _set_flags(flags)


_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_MOST_BYTES = 2**26  # of tensors in attributes, which are copied in case that a replay writes them


def _containers_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The ``__dict__`` of modules and of the settings they hold, and every container in one of them."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [vars(module) for module in modules]
    while waiting:
        container = waiting.pop()
        if id(container) not in found:
            found[id(container)] = container
            waiting += [value for value in _values(container) if type(value) in _CONTAINERS]
            if isinstance(container, dict):
                waiting += [fields for value in container.values() if (fields := _fields_of(value))]
    return list(found.values())


def _tensors_in(containers: Iterable[Any], found: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in containers that a forward may write in place, up to a limit; not those ``found`` already."""
    left = _MOST_BYTES
    for value in chain.from_iterable(map(_values, containers)):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.grad_fn is None
        if is_plain and id(value) not in found and not value.is_inference():
            found.add(id(value))
            left -= value.numel() * value.element_size()
            if left < 0:
                return
            yield value


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _items(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def _set_flags(flags: Iterable[tuple[torch.Tensor, bool]]) -> None:
    with torch._C.DisableTorchFunction():
        for parameter, flag in flags:
            if parameter.requires_grad != flag and parameter.is_leaf:
                parameter.requires_grad_(flag)


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that holds settings, such as a dataclass; ``None`` for any other."""
    is_settings = isinstance(value, (SimpleNamespace, Namespace)) or is_dataclass(type(value))
    return getattr(value, "__dict__", None) if is_settings else None


def _is_plain(value: Any) -> bool:
    """True for values that cannot change themselves and hold no memory."""
    if type(value) is tuple or type(value) is torch.Size:
        return len(value) <= _LONGEST and all(type(item) in ATOMS for item in value)
    return type(value) in ATOMS or isinstance(value, _IMMUTABLE)
