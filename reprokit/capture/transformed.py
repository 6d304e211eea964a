"""Calls of `torch.func` transforms, scripted and compiled functions by the loop, each noted as one call of the step.

What runs inside is not noted: its tensors are transformed ones, or a compiler's. A replay calls the function again,
with the variables that it reads (of enclosing functions, modules of Python and the object it is a method of) as they
were.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from threading import get_ident
from types import CellType, CodeType, FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from reprokit import torch_private
from reprokit.capture.callers import first_user_frame
from reprokit.capture.names import note_unfollowed
from reprokit.capture.structure import ATOMS, iter_tensors
from reprokit.program.sites import kind_of_file
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.recorder import Recorder

_peek_transforms = torch_private.peek_transforms
_is_wrapped = torch_private.is_wrapped
_tracing_state = torch_private.tracing_state  # of `torch.jit.trace`
RUNS = (
    (torch_private.apis, "vmap_impl"),
    (torch_private.eager_transforms, "grad_impl"),
    (torch_private.eager_transforms, "grad_and_value_impl"),
    (torch_private.eager_transforms, "_jvp_with_argnums"),
)
MAKES = ("jacrev", "jacfwd")  # functions that make a function, which is then called
PULLS = "_vjp_with_argnums"  # it returns a result and the function of its derivative
_MOST = 1000  # values of a call's arguments that are looked at: some tenths of a millisecond
Place = tuple[Any, str]  # a cell with an empty name, or the variables of a module of Python and a name in them


class TransformCalls:
    """Performs calls of transforms and notes those of the loop itself."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what runs a transform: torch's ``target``, given a function and its arguments."""
        recorder, name, is_noted = self._recorder, target.__name__, self._is_noted
        recorder.has_transform = True
        if is_noted:
            recorder.guard(recorder.begin_forward)
        recorder.guard(self._note_differentiated, name, args)
        transforms = torch_private.eager_transforms
        owner = transforms if hasattr(transforms, name) else torch_private.apis
        output = self._perform(functools.partial(_latest, owner, name), target, args, kwargs)
        if is_noted and name == "grad_and_value_impl":
            value = output[1]
            recorder.guard(recorder.loop.note_loss, value[0] if isinstance(value, tuple) else value)
        return output

    def _note_differentiated(self, name: str, args: tuple[Any, ...]) -> None:
        """Note the tensors by which a transform differentiates; inside of a `vmap` those that are not rows."""
        if get_ident() != self._recorder.thread:
            return
        if name == "grad_and_value_impl":
            by = torch_private.eager_transforms._slice_argnums(args[3], args[1], as_tuple=False)
        elif name == "_jvp_with_argnums":
            by = args[1]
        else:
            return
        plain = [tensor for tensor in tree_leaves(by) if isinstance(tensor, torch.Tensor) and not _is_wrapped(tensor)]
        self._recorder.loop.note_differentiated(plain)

    def make(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a transformed function whose calls are noted."""
        made = target(*args, **kwargs)

        @functools.wraps(made)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            self._recorder.has_transform = True
            return self._perform(made, made, args, kwargs)

        return transformed

    def pull(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `torch.func.vjp`, and note the calls of the function that it returns: each replay pulls with its own."""
        self._recorder.has_transform = True
        latest: list[Any] = []

        def again(*args: Any, **kwargs: Any) -> Any:
            made = getattr(torch_private.eager_transforms, target.__name__)(*args, **kwargs)
            latest[:] = made[1:2]
            return made

        is_noted = self._is_noted
        made = self._perform(again, target, args, kwargs)
        if not is_noted:
            return made
        result, function, *rest = made
        outputs = list(iter_tensors((result, rest)))  # a replay of a pull needs that of the call before

        def pull_again(_: Any, *args: Any, **kwargs: Any) -> Any:
            return latest[0](*args, **kwargs)

        @functools.wraps(function)
        def pulled(*args: Any, **kwargs: Any) -> Any:
            def pull_now(_: Any, *args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            return self._perform(pull_again, pull_now, (outputs, *args), kwargs, reads=())

        return (result, pulled, *rest)

    def derive(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `torch.func.linearize`, neither of whose results is noted: what comes out of them is no data."""
        made = target(*args, **kwargs)
        if not self._is_noted:
            return made
        recorder = self._recorder
        result, function = made
        recorder.guard(note_unfollowed, result)

        @functools.wraps(function)
        def derivative(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if recorder.is_outermost:
                recorder.guard(note_unfollowed, found)
            return found

        return result, derivative

    def run_scripted(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what `torch.jit` has compiled: torch's ``target``, given a function or method and its arguments."""
        function, *given = args
        again = functools.partial(_latest, type(function), "__call__", function)
        return self._perform(again, functools.partial(target, function), tuple(given), kwargs)

    @property
    def _is_noted(self) -> bool:
        return self._recorder.is_outermost and _peek_transforms() is None and _tracing_state() is None

    def _perform(
        self,
        again: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: Any = None,
    ) -> Any:
        """Call ``target`` and note it; ``reads`` is the function whose variables a replay restores, if another one."""
        recorder = self._recorder
        if not self._is_noted:
            return target(*args, **kwargs)
        reads = target if reads is None else reads
        begun = recorder.guard(begin_call, recorder, again, reads, args, kwargs, sys._getframe(2))
        popped = recorder.step_aside()
        try:
            output = target(*args, **kwargs)
        except BaseException as error:
            if begun is not None:
                recorder.fail(error, begun)
            raise
        finally:
            recorder.step_back(popped)
        if begun is not None:
            recorder.guard(recorder.finish, begun, output)
        return output


def begin_call(
    recorder: Recorder, again: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
) -> tuple[Any, ...]:
    """The call of ``target`` that is about to run, for the recorder; ``again`` is called by a replay."""
    from reprokit.capture.calls import Transform, TransformNote
    from reprokit.capture.roots import generator_states

    recorder.begin_forward()
    user = first_user_frame(frame)
    found = list(_read_by((target, args, kwargs)))
    values = [value for _, value in found]
    for owner in owners_in((args, kwargs, values)):
        if isinstance(owner, torch.nn.Module):
            recorder.roots.meet(owner)
    given = recorder.tape.encode((args, kwargs, values))
    note = TransformNote([place for place, _ in found], generator_states(args, kwargs, values))
    return Transform, again, given, None, user.f_code, user.f_lasti, current_mode(), note


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
            held, code = value.__self__, getattr(value.__func__, "__code__", None)
            attributes = _attributes_of(held, names_in(code)) if code is not None else iter(())
            found = iter([(({"self": held}, "self"), held)]) if _is_owner(held) else attributes
            yield from ((place, part) for place, part in found if _is_state(part))
        elif hasattr(value, "_torchdynamo_orig_callable"):  # of a compiled function
            waiting.append(value._torchdynamo_orig_callable)
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
