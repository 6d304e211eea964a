"""Keys that their own shape gives away.

``shapes.toml`` has the formats of services, taken from a maintained set of rules (`tests/snapshot/key_shapes.py` writes
it). A key of any other service is a long run in which small letters, capitals and digits take turns as in no word or
identifier.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable
from importlib import resources

_LONG = re.compile(r"[A-Za-z0-9_+/=.-]{14}")  # the shortest shape, a Slack token, has 15
_REST = re.compile(r"[A-Za-z0-9_-]*={0,2}")
_CANDIDATE = re.compile(r"[A-Za-z0-9_+/-]{20,}={0,2}")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_TURN = re.compile(r"(?=[a-z][A-Z0-9]|[A-Z][a-z0-9]|[0-9][A-Za-z])")
_ALONE = re.compile(r"(?<![a-z0-9])[a-z](?![a-z])")
_LONG_RUN = 32  # with / and + inside, as in paths
_WORD = (  # atomic: without it, a long text that is none would take exponential time
    r"(?>[A-Z]?[a-z]+(?:[A-Z]{1,4}[a-z]{2,})*[0-9]{0,4}[A-Za-z]?|[A-Z]{1,12}[0-9]{0,4}[a-z]?|v?[0-9]{1,8}[A-Za-z]{0,2})"
)
_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_WORDS = re.compile(rf"{_WORD}(?:[-_./:+ ]{_WORD})*")


def hide_keys(text: str, hidden: str) -> str:
    """Text with ``hidden`` in the place of each key."""
    if not _LONG.search(text):
        return text
    patterns = dict.fromkeys([pattern for part, pattern in _shapes() if part in text])
    for pattern in patterns:
        text = _replaced(text, pattern, "value", lambda key: not (is_words(key) and key.islower()), hidden)
    return _replaced(text, _CANDIDATE, 0, _is_random, hidden)


def is_words(text: str, readable: float = 0.5) -> bool:
    """True if ``text`` consists of words, numbers and names as models have: `bert-base-uncased`, `Llama-2-7b`.

    With capitals in it, at least ``readable`` of the letters are in words of four and more.
    """
    if not _WORDS.fullmatch(text):
        return False
    words = [len(word) for word in _LETTERS.findall(text)]
    return text == text.lower() or sum(length for length in words if length >= 4) >= readable * sum(words)


@functools.cache
def _shapes() -> list[tuple[str, re.Pattern[str]]]:
    """Texts, one of which is in every key of a shape, and its pattern."""
    text = resources.files(__name__).joinpath("shapes.toml").read_text(encoding="utf-8")
    shapes = [(shape["contains"], re.compile(shape["pattern"])) for shape in tomllib.loads(text)["shape"]]
    return [(part, pattern) for contains, pattern in shapes for part in contains]


def _replaced(text: str, pattern: re.Pattern[str], group: str | int, is_key: Callable[[str], bool], hidden: str) -> str:
    pieces, end = [], 0
    for match in pattern.finditer(text):
        start, stop = match.span(group)
        if start >= end and is_key(match[group]):
            pieces += [text[end:start], hidden]
            end = _REST.match(text, stop).end()  # type: ignore[union-attr]  # it matches the empty text
    return "".join((*pieces, text[end:]))


def _is_random(text: str) -> bool:
    if text.startswith("_Z"):  # a C++ symbol
        return False
    runs = _RUN.findall(text)
    return any(map(_is_mixed, [*runs, text] if len(text) >= _LONG_RUN else runs))


def _is_mixed(run: str) -> bool:
    """True if kinds of characters change at least every second time or small letters stand alone: no CamelCase."""
    kinds = all(re.search(kind, run) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return kinds and (len(_ALONE.findall(run)) >= 2 or len(_TURN.findall(run)) >= 0.55 * len(run))
