"""The variables that a function of the user's reads: of enclosing functions, modules of Python, and the object that it
is a method of. A replay puts back what they held."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from reprokit import torch_private
from reprokit.capture.structure import ATOMS, iter_tensors
from reprokit.program.sites import kind_of_file

_MOST = 1000  # values of a call's arguments that are looked at: some tenths of a millisecond
Place = tuple[Any, str]  # a cell with an empty name, or the variables of a module of Python and a name in them


def play_with(target: Callable[..., Any], args: tuple[Any, dict[str, Any], list[Any]], places: list[Place]) -> Any:
    """Call a function with other values in the variables that it reads."""
    given, kwargs, values = args
    before = [_value_at(place) for place in places]
    try:
        for place, value in zip(places, values, strict=True):
            _put(place, value)
        return target(*given, **kwargs)
    finally:
        for place, value in zip(places, before, strict=True):
            _put(place, value)


def _value_at(place: Place) -> Any:
    home, name = place
    return home[name] if name else home.cell_contents


def _put(place: Place, value: Any) -> None:
    home, name = place
    if name:
        home[name] = value
    else:
        home.cell_contents = value


def read_by(value: Any) -> Iterator[tuple[Place, Any]]:
    """The variables with tensors or modules that functions in ``value`` read, each with what it holds."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or _is_own(value):
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif hasattr(value, "__self__") and hasattr(value, "__func__"):
            waiting.append(value.__func__)
            held, code = value.__self__, getattr(value.__func__, "__code__", None)
            attributes = _attributes_of(held, names_in(code)) if code is not None else iter(())
            found = iter([(({"self": held}, "self"), held)]) if _is_owner(held) else attributes
            yield from ((place, part) for place, part in found if _is_state(part))
        elif torch_private.uncompiled(value) is not None:
            waiting.append(torch_private.uncompiled(value))
        elif isinstance(value, FunctionType):
            for place, held in _variables_of(value):
                if _is_state(held):
                    yield place, held
                elif _is_function(held):
                    waiting.append(held)
                else:
                    names = names_in(value.__code__) if _is_of_user(held) else ()
                    parts = list(_attributes_of(held, names))
                    waiting += [part for _, part in parts if _is_function(part)]
                    owned = [(place, part) for place, part in parts if _is_owner(part)]
                    yield from owned or ([(place, held)] if any(True for _ in owners_in(held)) else [])


def _is_own(value: Any) -> bool:
    """True for a function of reprokit's, such as one around a transform, which reads the tape itself."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and kind_of_file(code.co_filename) == "own"


def owners_in(value: Any) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    """The modules and optimizers in containers and in objects of the user's, among the nearest `_MOST` values."""
    waiting, seen = deque([value]), set[int]()
    for _ in range(_MOST):
        if not waiting:
            return
        value = waiting.popleft()
        if type(value) in ATOMS or isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if _is_owner(value):
            yield value
        elif isinstance(value, (list, tuple)):
            waiting.extend(value[:_MOST])
        elif isinstance(value, dict):
            waiting.extend(islice(value.values(), _MOST))
        elif isinstance(value, SimpleNamespace) or (type(value).__module__ != "builtins" and _is_of_user(value)):
            waiting.extend(vars(value).values())


def _is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, functools.partial)) or hasattr(value, "__func__")


def _is_owner(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def _is_state(value: Any) -> bool:
    return _is_owner(value) or next(iter_tensors(value), None) is not None


def _is_of_user(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    return hasattr(value, "__dict__") and kind_of_file(getattr(module, "__file__", None) or "") == "user"


def _attributes_of(owner: Any, names: Iterable[str]) -> Iterator[tuple[Place, Any]]:
    known = getattr(owner, "__dict__", {})
    yield from (((known, name), known[name]) for name in dict.fromkeys(names) if name in known)


def _variables_of(function: FunctionType) -> Iterator[tuple[Place, Any]]:
    for cell in function.__closure__ or ():
        if isinstance(cell, CellType):
            try:
                yield (cell, ""), cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
    if kind_of_file(function.__code__.co_filename) == "user":
        known = function.__globals__
        names = dict.fromkeys(names_in(function.__code__))
        yield from (((known, name), known[name]) for name in names if name in known)


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function reads, and those inside of it."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from names_in(part)
