"""Calls of `torch.func` transforms and of scripted functions by the loop, each noted as one call of the step.

What runs inside is not noted: its tensors are transformed ones. A replay calls the transform again, with the variables
that its function reads (of enclosing functions and of modules of Python) as they were.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch._functorch import apis, eager_transforms

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry, generator_states, versions_of
from reprokit.capture.record.frames import first_user_frame
from reprokit.capture.record.structure import iter_tensors
from reprokit.capture.record.tape import Tape
from reprokit.capture.record.tensor_names import note_unfollowed
from reprokit.program.sites import kind_of_file
from reprokit.program.trace import current_mode

_peek_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state  # of `torch.jit.trace`
RUNS = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
)
MAKES = ("jacrev", "jacfwd")  # functions that make a function, which is then called
DERIVES = (  # they return a result and the function of its derivative
    (eager_transforms, "_vjp_with_argnums"),
    (torch.func, "linearize"),
)
Place = tuple[Any, str]  # a cell with an empty name, or the variables of a module of Python and a name in them


class TransformCalls:
    """Performs calls of transforms and notes those of the loop itself."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what runs a transform: torch's ``target``, given a function and its arguments."""
        self._tape.has_transform = True
        owner = eager_transforms if hasattr(eager_transforms, target.__name__) else apis
        return self._perform(functools.partial(_latest, owner, target.__name__), target, args, kwargs)

    def make(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a transformed function whose calls are noted."""
        made = target(*args, **kwargs)

        @functools.wraps(made)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            self._tape.has_transform = True
            return self._perform(made, made, args, kwargs)

        return transformed

    def derive(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what returns results and a derivative, neither of which is noted: what comes out of them is no data."""
        made = target(*args, **kwargs)
        tape = self._tape
        if not tape.is_outermost or _peek_transforms() is not None:
            return made
        result, function, *rest = made
        tape.guard(note_unfollowed, (result, rest))

        @functools.wraps(function)
        def derivative(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if tape.is_outermost:
                tape.guard(note_unfollowed, found)
            return found

        return (result, derivative, *rest)

    def run_scripted(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what `torch.jit` has compiled: torch's ``target``, given a function or method and its arguments."""
        function, *given = args
        again = functools.partial(_latest, type(function), "__call__", function)
        return self._perform(again, functools.partial(target, function), tuple(given), kwargs)

    def _perform(self, again: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape
        if not tape.is_outermost or _peek_transforms() is not None or _tracing_state() is not None:
            return target(*args, **kwargs)
        entry = tape.guard(self._begin, again, target, args, kwargs, sys._getframe(2))
        output = tape.call_aside(entry, target, args, kwargs)
        if entry is not None:
            entry.output = output
            tape.guard(tape.running.add, entry)
        return output

    def _begin(self, again: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Entry:
        tape = self._tape
        tape.begin_forward()
        user = first_user_frame(frame)
        found = list(_read_by((target, args, kwargs)))
        for _, value in found:
            if isinstance(value, torch.nn.Module):
                tape.roots.meet(value)
        values = [value for _, value in found]
        where = ("", user.f_code, user.f_lasti)
        entry = Entry(kinds.TRANSFORM, again, (args, kwargs, values), {}, current_mode(), None, *where)
        entry.versions = versions_of(entry.args, {})
        entry.rng = generator_states(entry.versions)
        entry.settings = [place for place, _ in found]
        return entry


def play(target: Callable[..., Any], args: tuple[Any, dict[str, Any], list[Any]], places: list[Place]) -> Any:
    """Call a transform with other values in the variables that its function reads."""
    given, kwargs, values = args
    before = [_value_at(place) for place in places]
    try:
        for place, value in zip(places, values, strict=True):
            _put(place, value)
        return target(*given, **kwargs)
    finally:
        for place, value in zip(places, before, strict=True):
            _put(place, value)


def _latest(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _value_at(place: Place) -> Any:
    home, name = place
    return home[name] if name else home.cell_contents


def _put(place: Place, value: Any) -> None:
    home, name = place
    if name:
        home[name] = value
    else:
        home.cell_contents = value


def _read_by(value: Any) -> Iterator[tuple[Place, Any]]:
    """The variables with tensors or modules that functions in ``value`` read, each with what it holds."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
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
        elif isinstance(value, FunctionType):
            for place, held in _variables_of(value):
                if isinstance(held, torch.nn.Module) or next(iter_tensors(held), None) is not None:
                    yield place, held
                elif isinstance(held, (FunctionType, functools.partial)) or hasattr(held, "__func__"):
                    waiting.append(held)


def _variables_of(function: FunctionType) -> Iterator[tuple[Place, Any]]:
    for cell in function.__closure__ or ():
        if isinstance(cell, CellType):
            try:
                yield (cell, ""), cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
    if kind_of_file(function.__code__.co_filename) == "user":
        known = function.__globals__
        names = dict.fromkeys(_names_in(function.__code__))
        yield from (((known, name), known[name]) for name in names if name in known)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_in(part)
