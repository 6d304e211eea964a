"""The numbers and words that two calls of one function are given and that differ: ``eps: 1e-05 -> 1e-06``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reprokit.program.ir import Call, Ref

ABSENT: Any = object()  # in place of an option that only the other version of torch has


def changed_settings(first: Call, second: Call) -> dict[str, tuple[Any, Any]]:
    """The numbers and words that two calls are given and that differ, by name; `ABSENT` where a call has none."""
    one, other = dict(_settings(first)), dict(_settings(second))
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return {name: (one.get(name, ABSENT), other.get(name, ABSENT)) for name in names}


def settings_words(first: Call, second: Call) -> str:
    """The same in words; empty if none differ."""
    changed = changed_settings(first, second)
    found = {name: ["default" if one is ABSENT else one for one in pair] for name, pair in changed.items()}
    return ", ".join(f"{name}: {one} -> {other}" for name, (one, other) in found.items())


def _settings(call: Call) -> Iterator[tuple[str, Any]]:
    """All numbers and words that a call is given, and its modes."""
    yield from _leaves("", call.args)
    yield from _leaves("", call.kwargs)
    yield "autocast", call.mode.autocast or "off"
    yield "gradients", "on" if call.mode.grad else "off"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and words in nested arguments, with the names or places that lead to them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(str(key), item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}.{number}".lstrip("."), item)
    elif not isinstance(value, Ref):
        yield name, value
