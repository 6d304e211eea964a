"""Names as the user knows them: of the tensors a program starts from, and of modules and optimizers.

Tensors: state-dict names, argument names, variables. Modules and optimizers, only where there are several and a reader
has to tell them apart: variables, attributes, items of containers, submodules.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from reprokit import members
from reprokit.capture.structure import is_a, iter_leaves, iter_tensors
from reprokit.capture.tape import Number, Op
from reprokit.errors import ignored_errors, is_stand_in
from reprokit.program.dataflow import node_of
from reprokit.program.sites import kind_of_file, make_site, parts
from reprokit.program.trace import InputName
from reprokit.words import item_name, user_path

_MAX_FRAMES = 30
_MOST = 64  # items of a container
_PLAIN_NAMES = frozenset({"input", "args", "kwargs"})


_unfollowed: dict[int, weakref.ref[torch.Tensor]] = {}


def note_unfollowed(value: Any) -> None:
    """Remember that tensors came out of a call that is not noted, so that they are not taken for data."""
    for tensor in iter_tensors(value):
        key = id(tensor)
        _unfollowed[key] = weakref.ref(tensor, lambda _, key=key: _unfollowed.pop(key, None))  # type: ignore[misc]


def is_unfollowed(tensor: torch.Tensor) -> bool:
    """True if a tensor came out of such a call."""
    known = _unfollowed.get(id(tensor))
    return known is not None and known() is tensor


Named = tuple[str, Any]


class Names:
    """Knows the tensors behind some calls by identity, and by their numbers on the tape. The first name wins.

    ``alive`` are the tensors with numbers that are still there. The largest of the ``modules`` names its parameters and
    buffers, behind its name among the ``roots`` if it has one; ``stand_ins`` are named like what has their ``id``. Then
    come arguments by the parameters of a forward, variables of the user's functions that run in ``frame``, names of
    what ``later`` calls of the same lines were given, and variables where a call is written.
    """

    def __init__(
        self,
        alive: Mapping[Number, torch.Tensor],
        modules: Sequence[torch.nn.Module],
        roots: Mapping[int, str],
        stand_ins: Mapping[int, torch.Tensor],
        ops: Sequence[Op],
        frame: FrameType | None,
        later: Sequence[Op],
    ) -> None:
        self._alive = alive
        self._known: dict[object, InputName] = {}  # by the ``id`` of the tensor, by its number if that has gone
        for module in sorted(modules, key=lambda root: -len(members.parameters(root))):
            root = f"{roots[id(module)]}." if id(module) in roots else ""
            for name, parameter in members.named_parameters(module):
                self._add(parameter, InputName(root + user_path(name), "parameter"))
            for name, buffer in members.named_buffers(module):
                self._add(buffer, InputName(root + user_path(name), "buffer"))
        for key, tensor in stand_ins.items():
            if key in self._known:
                self._known[id(tensor)] = self._known[key]
        arguments = [_arguments(op) for op in ops]
        for name, value in itertools.chain(*arguments):
            if name not in _PLAIN_NAMES:
                self._add_values(name, value)
        for running in _user_frames(frame):
            for name, value in list(running.f_locals.items()):
                if is_a(value, (torch.Tensor, list, tuple, dict)) and not name.startswith("_"):
                    self._add_values(name, value)
        known = {}
        for place, number in _places(later):
            named = self.describe(number, alive[number]) if number in alive else None
            if named is not None and named.role == "batch":
                known[place] = named
        for place, number in _places(ops):
            if place in known:
                self._add(number, known[place])
        for op, given in zip(ops, arguments, strict=True):
            for name, value in (*_variables(op), *given):
                self._add_values(name, value)

    def describe(self, number: Number | None, tensor: torch.Tensor) -> InputName | None:
        """The name and role of a tensor, or ``None``."""
        found = self._known.get(id(tensor)) or self._known.get((number,))
        node = node_of(tensor) if found is None else None
        if node is not None:  # what a custom autograd function returned
            return InputName(f"{node.name().removesuffix('Backward')}_output", "opaque")
        return found

    def _add(self, key: Number | torch.Tensor, origin: InputName) -> None:
        tensor = self._alive.get(key) if isinstance(key, Number) else key
        self._known.setdefault((key,) if tensor is None else id(tensor), origin)

    def _add_values(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            named = [(item_name(name, str(key)), item) for key, item in list(value.items())[:_MOST]]
            named = [(key, item) for key, item in named if isinstance(item, (torch.Tensor, Number))]
        else:
            found: Iterator[Any] = itertools.chain(iter_tensors(value), iter_leaves(value, Number))
            named = [(name, item) for item in itertools.islice(found, _MOST)]
        for key, item in named:
            self._add(item, InputName(key))


def _arguments(op: Op) -> list[Named]:
    """The arguments of a root module by the parameters of its forward."""
    if isinstance(op.target, torch.nn.Module):
        with contextlib.suppress(TypeError, ValueError):
            return list(inspect.signature(op.target.forward).bind(*op.args, **op.kwargs).arguments.items())
    return []


def _variables(op: Op) -> list[Named]:
    """The variables that a root module is given where its call is written."""
    if not isinstance(op.target, torch.nn.Module) or op.code is None:
        return []
    calls = (part for part in parts(make_site(op.code, op.instruction)) if isinstance(part, ast.Call))
    given = next((call.args for call in calls), [])
    pairs = zip(given, op.args, strict=False) if len(given) == len(op.args) else ()
    return [(argument.id, value) for argument, value in pairs if isinstance(argument, ast.Name)]


def _places(ops: Sequence[Op]) -> Iterator[tuple[object, Number]]:
    for op in ops:
        yield from (((op.code, op.instruction, op.target, place), number) for place, number in enumerate(op.ins))


def root_names(roots: Sequence[torch.nn.Module], frame: FrameType | None) -> dict[int, str]:
    """Names by ``id`` of those root modules that paths or classes alone would mix up.

    That is so for those with parameters if there are several, and for those that share a class. A part of another root,
    which the loop calls by itself too, is named as that part.
    """
    parts = {id(part) for root in roots for part in members.modules(root) if part is not root}
    roots = [root for root in roots if id(root) not in parts]
    own = [root for root in roots if members.parameters(root)]
    classes = [type(root).__name__ for root in roots]
    alike = [root for root in roots if classes.count(type(root).__name__) > 1]
    wanted = {id(root): root for root in (*(own if len(own) > 1 else ()), *alike)}
    return names_of(list(wanted.values()), frame)


def parameter_names(modules: Sequence[torch.nn.Module], frame: FrameType | None) -> dict[int, str]:
    """State-dict names of all parameters by ``id``, behind the root's name where there are several roots."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    modules = [m.module if isinstance(m, wrapper) else m for m in modules]
    roots = root_names(modules, frame)
    named = ((roots.get(id(m)), name, p) for m in modules for name, p in members.named_parameters(m))
    return {id(parameter): f"{root}.{name}" if root else name for root, name, parameter in named}


def names_of(owners: Sequence[object], frame: FrameType | None) -> dict[int, str]:
    """A name for each, by ``id``; no two have the same. Without a variable it is the class, numbered if need be."""
    wanted = {id(owner) for owner in owners}
    found: dict[int, str] = {}
    taken: set[str] = set()
    with ignored_errors():  # that an object of the user's raises: a missing name loses no snapshot
        for name, value in _named(frame) if owners else ():
            if id(value) in wanted and id(value) not in found and name not in taken:
                found[id(value)] = name
                taken.add(name)
    for owner in owners:
        if id(owner) not in found:
            cls = type(owner).__name__
            numbered = (f"{cls}{number}" for number in itertools.count(2))
            found[id(owner)] = next(name for name in itertools.chain([cls], numbered) if name not in taken)
            taken.add(found[id(owner)])
    return found


def _named(frame: FrameType | None) -> Iterator[Named]:
    """The objects that the user's running functions reach by a name, best name first: those at the script's level.

    Those are there also when the script has ended.
    """
    script = vars(sys.modules["__main__"])
    spaces = [script, *(running.f_locals for running in reversed(_user_frames(frame)))]
    named: list[Named] = [item for space in spaces for item in list(space.items())]
    for _, value in list(named):
        is_plain = not is_a(value, (type, ModuleType, torch.nn.Module)) and type(value).__dictoffset__ != 0
        named += list(vars(value).items()) if is_plain and not callable(value) else []
    direct = [(name, value) for name, value in named if name != "self" and not name.startswith("_")]
    yield from direct
    for name, value in direct:  # entries of a list or a dict; a class of the user's would run code of the user's
        if type(value) is dict:
            items = itertools.islice(value.items(), _MOST)
            yield from ((key, item) for key, item in items if isinstance(key, str))
        elif type(value) in (list, tuple):
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value[:_MOST]))
    for name, value in named:
        if is_a(value, torch.nn.Module):
            prefix = "" if name == "self" else f"{name}."
            yield from ((f"{prefix}{path}", part) for path, part in members.named_modules(value) if path)


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return [one for one in found if kind_of_file(one.f_code.co_filename) == "user" and not is_stand_in(one.f_code)]
