"""The grammar of files: dataclasses whose field types say what a field may hold, as strangers may have written it.

`read` makes a dataclass of plain data, `plain_of` plain data of a dataclass. A *kind* is a function that returns the
value it was given, texts made `visible`, or raises `ValueError`; ``Annotated[str, line]`` names the kind of a field.
Programs have a grammar of their own (`reprokit.program.plain`), but their fields have the same types.

Privacy is a part of the type: a text is of one of `TEXTS`, which says whether it may hold the user's code. `mapped`
walks a value by its types, so a new field is private by its type, and `text_fields` raises for one that has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache, partial, singledispatch
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from reprokit.words import escaped, escaped_line, marked, row_ranges, unmarked, visible_line, visible_name

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
Kind = Callable[[Any], Any]


class Row:
    """Marks a dataclass that is written as the list of its fields."""

    __slots__ = ()


LEFT_OUT = object()  # in the type of a field that is not written while it is ``None``, so older files lack it
Later = Annotated[T | None, LEFT_OUT]


@singledispatch
def plain_of(value: Any) -> Any:
    """Nested data with exact built-in types, because a restricted unpickler refuses subclasses such as version
    strings."""
    if is_dataclass(value):
        known = known_fields(cast(Any, type(value)))
        found = ((key, getattr(value, one.name), one.is_left_out) for key, one in known.items())
        plain = {key: plain_of(part) for key, part, is_left_out in found if not (part is None and is_left_out)}
        return list(map(_listed, plain.values())) if isinstance(value, Row) else plain
    if isinstance(value, Mapping):
        return {plain_of(key): plain_of(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain_of(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [plain_of(item) for item in value]
    if isinstance(value, str):
        return str(marked(value))
    exact = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return value if value is None else exact(value)


def values_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass. `dataclasses.asdict` calls `copy.deepcopy`, which a script may have replaced."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def read(cls: type[T], plain: Any, *, is_whole: bool = False) -> T:
    """The dataclass that `plain_of` described; raises `ValueError` where a field is missing, unknown or not of its
    kind. ``is_whole``: fields with a default may not be missing, but for those that are left out while ``None``."""
    known = known_fields(cast(Any, cls))
    given = dict(zip(known, _list(plain), strict=False)) if issubclass(cls, Row) else _dict(plain)
    unknown = [key for key in given if key not in known]
    if unknown or len(plain) > len(known):
        raise ValueError(f"it has an unknown field `{shown(unknown[0] if unknown else len(known))}`")
    needed = (key for key, one in known.items() if one.is_needed or (is_whole and not one.is_left_out))
    lacking = [key for key in needed if key not in given]
    if lacking:
        raise ValueError(f"`{lacking[0]}` is missing")
    return cls(**{known[key].name: _conform(key, known[key].kind, value) for key, value in given.items()})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def key_of(item: Field[Any]) -> str:
    """The name of a field in files; ``from_`` is written as ``from``."""
    return item.name.removesuffix("_")


class Known:
    """What is known of a field by its type."""

    __slots__ = ("_kind", "hint", "is_left_out", "is_needed", "name")

    def __init__(self, item: Field[Any], hint: Any) -> None:
        self.name, self.hint = item.name, hint
        self.is_left_out = get_origin(hint) is Annotated and LEFT_OUT in hint.__metadata__
        self.is_needed = item.default is MISSING and item.default_factory is MISSING
        self._kind: Kind | None = None

    @property
    def kind(self) -> Kind:
        """What a file may hold there; made when a file is read, as a type may be one that no file holds."""
        if self._kind is None:
            self._kind = kind_of(self.hint)
        return self._kind


@cache
def known_fields(cls: Any) -> dict[str, Known]:
    hints = get_type_hints(cls, include_extras=True)
    return {key_of(item): Known(item, hints[item.name]) for item in fields(cls)}


def kind_of(hint: Any) -> Kind:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(filter(callable, hint.__metadata__), None) or kind_of(args[0])
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


# The kinds of texts, each with what it may hold. A field of a file is of one of them, or one of a few words.


def text(value: Any) -> str:
    """Sentences, which may quote the user's code between the marks of `quoted`."""
    return unmarked(escaped(_string(value)))


def line(value: Any) -> str:
    """The same in one line."""
    return unmarked(escaped_line(_string(value)))


def code(value: Any) -> str:
    """A line of the user's source, as a traceback shows it."""
    return escaped_line(_string(value))


def statement(value: Any) -> str:
    """A statement of the user's source over several lines, as it is or with a change."""
    return escaped(_string(value))


def listing(value: Any) -> str:
    """The source of a class or a function, or changes of it: more than a traceback shows."""
    return escaped(_string(value))


def name(value: Any) -> str:
    """The name of something, or a word for it, that may stand in inline code: no expression."""
    return visible_name(_string(value))


def path(value: Any) -> str:
    """The path of a file."""
    return visible_line(_string(value))


def digest(value: Any) -> str:
    """A hash; it looks like a key and is none."""
    if not re.fullmatch(r"(?:0x)?[0-9a-fA-F]{0,128}", found := visible_line(_string(value))):
        raise ValueError("it is no hash")
    return found


def rows(value: Any) -> str:
    """Rows of a batch in words: ``rows 0-3, 6``."""
    row_ranges(found := visible_line(_string(value)))
    return found


def link(value: Any) -> str:
    """The address of a page."""
    if not re.fullmatch(r"https://[a-z0-9.-]+/[\w./#=-]*", found := visible_line(_string(value)), re.ASCII):
        raise ValueError("it is no address of a page")
    return found


class one_of:  # a kind, as the functions are
    """One of these words."""

    def __init__(self, *words: str) -> None:
        self.words = frozenset(words)
        self._shown = ", ".join(words)

    def __call__(self, value: Any) -> Any:
        if type(value) is not str or value not in self.words:
            raise ValueError(f"`{shown(value)}` is none of {self._shown}")
        return value


def member_of(words: type[E]) -> Callable[[Any], E]:
    """The member of an enum that one of its words names."""
    word = one_of(*words)
    return lambda value: words(word(value))


def constants(value: Any) -> Any:
    """Arguments of a call, of any type that a program knows. `reprokit.program.plain` reads them."""
    raise ValueError("it is a part of a program")


Text = Annotated[str, text]
Line = Annotated[str, line]
Code = Annotated[str, code]
Statement = Annotated[str, statement]
Listing = Annotated[str, listing]
Name = Annotated[str, name]
Path = Annotated[str, path]
Digest = Annotated[str, digest]
Rows = Annotated[str, rows]
Constants = Annotated[Any, constants]
Count = Annotated[int, count]
Positive = Annotated[int, positive]
Scalar = float | bool | Line | None
TEXTS = frozenset({text, line, code, statement, listing, name, path, digest, rows, link})
_KINDS: Mapping[Any, Kind] = {bool: of(bool), NoneType: of(NoneType), int: integer, float: number}


# -- walking a value by its types --------------------------------------------------------------------------------------

Change = Callable[[Kind, str], str]  # a text by its kind
Finish = Callable[[Any, Any], Any]  # a dataclass as it was, and with its texts changed


def mapped(hint: Any, value: Any, change: Change, finish: Finish) -> Any:
    """A value of a type with every text in it changed by its kind; an unchanged part is the same object.

    ``finish`` is given each dataclass afterwards, for what one text of it says about another.
    """
    if value is None or isinstance(value, (bool, int, float, StrEnum)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _mapped_fields(value, change, finish)
    kind, hint = text_kind(hint), _bare(hint)
    if kind is constants:
        return _mapped_constants(value, change, finish)
    if isinstance(value, str):
        found = kind or next((one for arm in _arms(hint) if (one := text_kind(arm)) is not None), None)
        if found is None:  # a fault of ours, which `text_fields` finds in the tests: no reason to lose a capture
            found = code
        return value if isinstance(found, one_of) else _changed(change, found, value)
    if isinstance(value, Mapping):
        key, item = next(get_args(arm) for arm in _arms(hint) if _is_mapping(arm))
        made = {mapped(key, k, change, finish): mapped(item, v, change, finish) for k, v in value.items()}
        return value if _is_same(value, made) else made
    if isinstance(value, (list, tuple)):
        parts = next(get_args(arm) for arm in _arms(hint) if get_origin(arm) in (list, tuple))
        is_fixed = isinstance(value, tuple) and Ellipsis not in parts
        hints = parts if is_fixed else parts[:1] * len(value)
        changed = [mapped(part, item, change, finish) for part, item in zip(hints, value, strict=True)]
        is_same = all(a is b for a, b in zip(value, changed, strict=True))
        return value if is_same else type(value)(changed)
    return value  # a tensor


def _changed(change: Change, kind: Kind, value: str) -> str:
    after = unmarked(change(kind, marked(value)))
    return value if after == value and marked(after) == marked(value) and type(after) is type(value) else after


def _is_same(value: Mapping[Any, Any], made: Mapping[Any, Any]) -> bool:
    return value.keys() == made.keys() and all(value[key] is made[key] for key in value)


def _mapped_fields(value: Any, change: Change, finish: Finish) -> Any:
    parts = ((one.name, one.hint, getattr(value, one.name)) for one in known_fields(cast(Any, type(value))).values())
    made = {name: (part, mapped(hint, part, change, finish)) for name, hint, part in parts}
    changed = {name: new for name, (part, new) in made.items() if new is not part}
    return finish(value, replace(value, **changed) if changed else value)


def _mapped_constants(value: Any, change: Change, finish: Finish) -> Any:
    """Nested arguments, whose texts are such as the mode of a call."""
    if isinstance(value, str):
        return _changed(change, constants, value)
    if isinstance(value, Mapping):
        made = {key: _mapped_constants(item, change, finish) for key, item in value.items()}
        return value if _is_same(value, made) else made
    if isinstance(value, (list, tuple)):
        parts = [_mapped_constants(item, change, finish) for item in value]
        return value if all(a is b for a, b in zip(value, parts, strict=True)) else type(value)(parts)
    return value if not is_dataclass(value) or isinstance(value, type) else _mapped_fields(value, change, finish)


@cache
def text_kind(hint: Any) -> Kind | None:
    """The kind of a text, a choice of words among them; ``None`` for a type that is no single text."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return one_of(*hint)
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    metadata = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return next((one for one in metadata if one in TEXTS or one is constants or isinstance(one, one_of)), None)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


@cache
def _arms(hint: Any) -> tuple[Any, ...]:
    """The types of a union, also of one inside of another."""
    hint = _bare(hint) if text_kind(hint) is None else hint
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(arm for part in get_args(hint) for arm in _arms(part))


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def text_fields(cls: Any) -> dict[tuple[type, str], frozenset[Kind]]:
    """Every field that may hold a text, of a dataclass and those in it, with the kinds of its texts.

    Raises `TypeError` for a text without a kind.
    """
    found: dict[tuple[type, str], frozenset[Kind]] = {}
    waiting, seen = [cls], set[type]()
    while waiting:
        owner = waiting.pop()
        if owner in seen:
            continue
        seen.add(owner)
        for one in known_fields(owner).values():
            kinds, inner = _inside(f"{owner.__name__}.{one.name}", one.hint)
            found |= {(owner, one.name): frozenset(kinds)} if kinds else {}
            waiting += inner
    return found


def _inside(place: str, hint: Any) -> tuple[set[Kind], list[type]]:
    """The kinds of texts and the dataclasses that a type is made of."""
    kind = text_kind(hint)
    if kind is not None:
        return {kind}, []
    hint = _bare(hint)
    if hint is str or hint is Any:
        raise TypeError(f"`{place}` is a text of no kind: name one of `reprokit.grammar`")
    if is_dataclass(hint):
        return set(), [cast(type, hint)]
    kinds, inner = set[Kind](), list[type]()
    for part in get_args(hint):
        more = _inside(place, part) if part is not Ellipsis else (set(), [])
        kinds |= more[0]
        inner += more[1]
    return kinds, inner
