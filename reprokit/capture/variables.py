"""The variables that a function of the user's reads: of enclosing functions, modules of Python, and the object that it
is a method of. A replay puts back what they held."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from reprokit import torch_private
from reprokit.capture.structure import ATOMS, is_a, iter_tensors
from reprokit.program.sites import kind_of_file

_OWNERS = (torch.nn.Module, torch.optim.Optimizer)
_MOST = 1000  # values of a call's arguments that are looked at: some tenths of a millisecond
Place = tuple[Any, str]  # a cell with an empty name, or the variables of a module of Python and a name in them


def play_with(target: Callable[..., Any], args: tuple[Any, dict[str, Any], list[Any]], places: list[Place]) -> Any:
    """Call a function with other values in the variables that it reads."""
    given, kwargs, values = args
    before = [home[name] if name else home.cell_contents for home, name in places]
    try:
        for place, value in zip(places, values, strict=True):
            _put(place, value)
        return target(*given, **kwargs)
    finally:
        for place, value in zip(places, before, strict=True):
            _put(place, value)


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
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_a(value, functools.partial):
            waiting += [value.func, value.args, value.keywords]
        elif is_a(value, (list, tuple)):
            waiting += value
        elif is_a(value, dict):
            waiting += value.values()
        elif torch_private.uncompiled(value) is not None:
            waiting.append(torch_private.uncompiled(value))
        else:
            for place, held in _variables_of(value):
                if next(owners_in(held), None) is not None or next(iter_tensors(held), None) is not None:
                    yield place, held
                elif is_a(held, (FunctionType, MethodType, functools.partial)):
                    waiting.append(held)


def _variables_of(function: Any) -> Iterator[tuple[Place, Any]]:
    """Those of enclosing functions; of its module of Python and of the object it is a method of if it names them."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return
    kind = kind_of_file(code.co_filename)
    if kind == "own":  # such as a function around a transform, which reads the tape itself
        return
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield (cell, ""), cell.cell_contents
    homes = [function.__globals__] if kind == "user" else []
    owner = getattr(function, "__self__", None)
    if is_a(owner, _OWNERS):
        yield ({"self": owner}, "self"), owner
    elif type(owner).__dictoffset__:
        homes.append(vars(owner))
    names = list(dict.fromkeys(names_in(code)))
    yield from (((home, name), home[name]) for home in homes for name in names if name in home)


def owners_in(value: Any) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    """The modules and optimizers in containers and in objects of the user's, among the nearest `_MOST` values."""
    waiting, seen = deque([value]), set[int]()
    for _ in range(_MOST):
        if not waiting:
            return
        value = waiting.popleft()
        if type(value) in ATOMS or is_a(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_a(value, _OWNERS):
            yield value
        elif is_a(value, (list, tuple)):
            waiting.extend(value[:_MOST])
        elif is_a(value, dict):
            waiting.extend(islice(value.values(), _MOST))
        elif is_a(value, SimpleNamespace) or _is_of_user(value):
            waiting.extend(vars(value).values())


def _is_of_user(value: Any) -> bool:
    home = type(value).__module__
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return home != "builtins" and type(value).__dictoffset__ != 0 and kind_of_file(file) == "user"


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function reads, and those inside of it."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from names_in(part)
