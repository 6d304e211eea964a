"""The grammar of files: dataclasses whose field types say what a field may hold, as strangers may have written it.

`read` makes a dataclass of plain data, `plain_of` plain data of a dataclass. A *kind* is a function that returns the
value it was given, texts made `visible`, or raises `ValueError`; ``Annotated[str, line]`` names the kind of a field.
Programs have a grammar of their own (`reprokit.program.plain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial, singledispatch
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from reprokit.words import visible, visible_line, visible_name

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
Kind = Callable[[Any], Any]


class Row:
    """Marks a dataclass that is written as the list of its fields."""

    __slots__ = ()


def left_out() -> Any:
    """A field that is not written while it is ``None``."""
    return field(default=None, metadata={"is_left_out": True})


@singledispatch
def plain_of(value: Any) -> Any:
    """Nested data with exact built-in types, because a restricted unpickler refuses subclasses such as version
    strings."""
    if is_dataclass(value):
        found = ((item, getattr(value, item.name)) for item in fields(value))
        plain = {key_of(item): plain_of(part) for item, part in found if not (part is None and item.metadata)}
        return list(map(_listed, plain.values())) if isinstance(value, Row) else plain
    if isinstance(value, Mapping):
        return {plain_of(key): plain_of(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain_of(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [plain_of(item) for item in value]
    exact = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return value if value is None else exact(value)


def read(cls: type[T], plain: Any, *, is_whole: bool = False) -> T:
    """The dataclass that `plain_of` described; raises `ValueError` where a field is missing, unknown or not of its
    kind. ``is_whole``: fields with a default may not be missing, but for those that are left out while ``None``."""
    known = _fields(cast(Any, cls))
    given = dict(zip(known, _list(plain), strict=False)) if issubclass(cls, Row) else _dict(plain)
    unknown = [key for key in given if key not in known]
    if unknown or len(plain) > len(known):
        raise ValueError(f"it has an unknown field `{shown(unknown[0] if unknown else len(known))}`")
    needed = (
        key
        for key, (item, _) in known.items()
        if (item.default is MISSING and item.default_factory is MISSING) or (is_whole and not item.metadata)
    )
    lacking = [key for key in needed if key not in given]
    if lacking:
        raise ValueError(f"`{lacking[0]}` is missing")
    return cls(**{known[key][0].name: _conform(key, known[key][1], value) for key, value in given.items()})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def key_of(item: Field[Any]) -> str:
    """The name of a field in files; ``from_`` is written as ``from``."""
    return item.name.removesuffix("_")


@cache
def _fields(cls: Any) -> dict[str, tuple[Field[Any], Kind]]:
    hints = get_type_hints(cls, include_extras=True)
    return {key_of(item): (item, kind_of(hints[item.name])) for item in fields(cls)}


def kind_of(hint: Any) -> Kind:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(filter(callable, hint.__metadata__))
    if origin in (Union, UnionType):
        return _any_of(*map(kind_of, sorted(args, key=lambda arg: arg is not NoneType)))
    if origin is tuple and args[-1] is not Ellipsis:
        return _parts(*map(kind_of, args))
    if origin in (tuple, list):
        item = kind_of(args[0])
        return lambda value: origin(item(part) for part in _list(value))
    if origin is not None and issubclass(origin, Mapping):
        key, item = map(kind_of, args)
        return lambda value: {key(name): item(part) for name, part in _dict(value).items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return member_of(hint)
    return _KINDS[hint] if hint in _KINDS else partial(read, hint)


def _conform(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


def shown(value: Any) -> str:
    """A value in a message: only texts and small numbers, because the text of nested data may take for ever."""
    is_short = value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
    return f"{visible_name(value):.60}" if isinstance(value, str) else str(value) if is_short else type(value).__name__


def _any_of(*kinds: Kind) -> Kind:
    """The first of several kinds that fits; the error is that of the last."""

    def check(value: Any) -> Any:
        for kind in kinds[:-1]:
            try:
                return kind(value)
            except ValueError:
                continue
        return kinds[-1](value)

    return check


def _parts(*kinds: Kind) -> Kind:
    """One value of each kind, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if len(_list(value)) != len(kinds):
            raise ValueError(f"it has {len(value)} parts instead of {len(kinds)}")
        return tuple(kind(item) for kind, item in zip(kinds, value, strict=True))

    return check


def of(*types: type) -> Kind:
    """A value of exactly one of these types."""

    def check(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"it is a `{type(value).__name__}`, not a `{types[0].__name__}`")
        return value

    return check


_list, _dict, _string = of(list, tuple), of(dict), of(str)


def number(value: Any) -> float:
    """A number that a float can hold, or none that it can: nan and inf."""
    found: float = of(float, int)(value)
    return found if type(found) is float else integer(found)


def integer(value: Any) -> int:
    """A count, a place or a version."""
    found: int = of(int)(value)
    if abs(found) > 2**63:
        raise ValueError("the number is too large")
    return found


def count(value: Any) -> int:
    """A whole number from 0 up."""
    if integer(value) < 0:
        raise ValueError(f"it is {value}")
    return int(value)


def positive(value: Any) -> int:
    """A whole number from 1 up to a million."""
    if not 1 <= integer(value) <= 10**6:
        raise ValueError(f"it is {value}")
    return int(value)


def text(value: Any) -> str:
    """Several lines."""
    return visible(_string(value))


def line(value: Any) -> str:
    """One line."""
    return visible_line(_string(value))


def name(value: Any) -> str:
    """One line that may stand in inline code."""
    return visible_name(_string(value))


def link(value: Any) -> str:
    """The address of a page."""
    if not re.fullmatch(r"https://[a-z0-9.-]+/[\w./#=-]*", found := line(value), re.ASCII):
        raise ValueError("it is no address of a page")
    return found


def one_of(*words: str) -> Kind:
    """One of these words."""

    def check(value: Any) -> Any:
        if type(value) is not str or value not in words:
            raise ValueError(f"`{shown(value)}` is none of {', '.join(words)}")
        return value

    return check


def member_of(words: type[E]) -> Callable[[Any], E]:
    """The member of an enum that one of its words names."""
    word = one_of(*words)
    return lambda value: words(word(value))


Text = Annotated[str, text]
Line = Annotated[str, line]
Name = Annotated[str, name]
Count = Annotated[int, count]
Positive = Annotated[int, positive]
Scalar = float | bool | Line | None
_KINDS: Mapping[Any, Kind] = {bool: of(bool), NoneType: of(NoneType), int: integer, float: number}
