"""Names of modules and optimizers in the user's code: variables, attributes, items of containers, submodules.

A name is looked for only where there are several and a reader has to tell them apart.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from reprokit.arrivals import ignored_errors
from reprokit.program.sites import kind_of_file

_MAX_FRAMES = 30
_MAX_ITEMS = 64

Named = tuple[str, Any]


def root_names(roots: Sequence[torch.nn.Module], frame: FrameType | None) -> dict[int, str]:
    """Names by ``id`` of those root modules that paths or classes alone would mix up.

    That is so for those with parameters if there are several, and for those that share a class.
    """
    own = [root for root in roots if next(root.parameters(), None) is not None]
    classes = [type(root).__name__ for root in roots]
    alike = [root for root in roots if classes.count(type(root).__name__) > 1]
    wanted = {id(root): root for root in (*(own if len(own) > 1 else ()), *alike)}
    return names_of(list(wanted.values()), frame)


def names_of(owners: Sequence[object], frame: FrameType | None) -> dict[int, str]:
    """A name for each, by ``id``; no two have the same. Without a variable it is the class, numbered if need be."""
    wanted = {id(owner) for owner in owners}
    found: dict[int, str] = {}
    taken: set[str] = set()
    for name, value in _as_far_as_it_goes(_named(frame)) if owners else ():
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


def _as_far_as_it_goes(named: Iterator[Named]) -> Iterator[Named]:
    """The items up to the first error that an object of the user's raises: a missing name loses no snapshot."""
    with ignored_errors():
        yield from named


def _named(frame: FrameType | None) -> Iterator[Named]:
    """The objects that the user's running functions reach by a name, best name first: those at the script's level.

    Those are there also when the script has ended.
    """
    script = vars(sys.modules["__main__"])
    spaces = [script, *(running.f_locals for running in reversed(_user_frames(frame)))]
    variables = [item for space in spaces for item in list(space.items())]
    attributes = [item for _, value in variables for item in _attributes(value)]
    direct = [(name, value) for name, value in (*variables, *attributes) if name != "self" and not name.startswith("_")]
    yield from direct
    for name, value in direct:
        yield from _items(name, value)
    for name, value in (*variables, *attributes):
        if isinstance(value, torch.nn.Module):
            prefix = "" if name == "self" else f"{name}."
            yield from ((f"{prefix}{path}", part) for path, part in value.named_modules() if path)


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if kind_of_file(frame.f_code.co_filename) == "user":
            found.append(frame)
        frame = frame.f_back
    return found


def _attributes(value: Any) -> list[Named]:
    """The attributes of an object such as a trainer; the parts of a module are found by their paths."""
    is_plain = not isinstance(value, (type, ModuleType, torch.nn.Module)) and type(value).__dictoffset__ != 0
    return list(vars(value).items()) if is_plain and not callable(value) else []


def _items(name: str, value: Any) -> list[Named]:
    """The entries of a list or a dict; a class of the user's would run code of the user's."""
    if type(value) is dict:
        return [(key, item) for key, item in itertools.islice(value.items(), _MAX_ITEMS) if isinstance(key, str)]
    if type(value) in (list, tuple):
        return [(f"{name}[{place}]", item) for place, item in enumerate(itertools.islice(value, _MAX_ITEMS))]
    return []
