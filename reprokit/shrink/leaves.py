"""Addresses inside the arguments of a call, and edits at them.

A path starts with 0 for positional and 1 for keyword arguments and goes down through lists, tuples, dicts and slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reprokit.locate.spelling import exact_signature_of, is_default, signature_of
from reprokit.program.ir import Call, Input, Ref, Slice, iter_refs

Path = tuple[Any, ...]
_PARTS = ("start", "stop", "step")
_INDEXES: dict[str, tuple[Path, ...]] = {
    **dict.fromkeys(("__getitem__", "__setitem__"), ((0, 1),)),
    **dict.fromkeys(("select", "narrow", "select_scatter"), ((0, 2), (1, "index"), (1, "start"))),
    "ctc_loss": ((0, 4), (1, "blank")),
}
_OPERANDS = ("x", "y", "z", "w")
_TELLING = frozenset({"weight", "bias", "target", "mask", "index", "indices", "running_mean", "running_var", "targets"})


def leaves(call: Call) -> Iterator[tuple[Path, Any]]:
    """Every leaf of the arguments with its path, in order."""
    yield from _leaves((call.args, dict(call.kwargs)), ())


def lists_of_tensors(call: Call) -> Iterator[tuple[Path, list[Ref]]]:
    """The arguments that are lists of two or more tensors, with their paths."""
    arguments = [((0, place), value) for place, value in enumerate(call.args)]
    keywords = [((1, name), value) for name, value in call.kwargs.items()]
    for path, value in (*arguments, *keywords):
        if isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(item, Ref) for item in value):
            yield path, list(value)


def with_leaf(call: Call, path: Path, value: Any) -> Call:
    """The call with what is at ``path`` (a leaf or more) exchanged."""
    args, kwargs = _exchanged((call.args, dict(call.kwargs)), path, value)
    return replace(call, args=args, kwargs=kwargs)


def with_changed_indexes(call: Call, changed: range, numbers: torch.Tensor) -> Call:
    """The call with every index in a range exchanged for the number at its place in a tensor: an exponent stays."""
    for path, leaf in leaves(call) if call.name in _INDEXES else ():
        is_integer = isinstance(leaf, int) and not isinstance(leaf, bool)
        if path[:2] in _INDEXES[call.name] and is_integer and leaf in changed:
            call = with_leaf(call, path, int(numbers[leaf]))
    return call


def without_defaults(call: Call) -> Call:
    """The call without keyword arguments that say what the function would do anyway."""
    parameters = exact_signature_of(call.target)
    return replace(call, kwargs={n: v for n, v in call.kwargs.items() if not is_default(v, parameters.get(n))})


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, Slice):
        for part in _PARTS:
            yield from _leaves(getattr(value, part), (*path, part))
    else:
        yield path, value


def _exchanged(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {key: _exchanged(item, rest, new) if key == first else item for key, item in value.items()}
    if isinstance(value, Slice):
        return Slice(*(_exchanged(getattr(value, p), rest, new) if p == first else getattr(value, p) for p in _PARTS))
    items = [_exchanged(item, rest, new) if index == first else item for index, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def unique_name(call: Call | None, value: int, taken: Sequence[Input]) -> str:
    """A name for the value that ``call`` reads, other than those of the inputs that are there."""
    used = {item.name for item in taken}
    parameter = parameter_of(call, value) if call is not None else None
    names = (parameter, *_OPERANDS) if parameter in _TELLING else _OPERANDS
    free = next((name for name in names if name is not None and name not in used), None)
    return free if free is not None else f"x{value}"


def parameter_of(call: Call, value: int) -> str | None:
    """What the function calls the argument that a value is in; ``None`` if it does not say."""
    for name, argument in call.kwargs.items():
        if any(ref.value == value for ref in iter_refs(argument)):
            return name
    for place, argument in enumerate(call.args):
        if any(ref.value == value for ref in iter_refs(argument)):
            parameters = list(signature_of(call.target))
            return parameters[place] if place < len(parameters) else None
    return None
