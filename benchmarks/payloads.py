"""Files as a stranger could send them: texts that try to leave their place, in every field, and damage of every kind.

`fields` walks the types of the files itself (`reprokit.grammar`), so that a field which is added there is
attacked without anybody thinking of it. A payload that is run as code writes the file `marker` and does nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

from reprokit.grammar import key_of, one_of

WORD = "hostile0"  # in every payload; where it appears decides whether a text stayed in its place
Path_ = tuple[Any, ...]  # keys and positions that lead into nested data


def contexts(marker: Path) -> dict[str, str]:
    """Texts by what they try to leave or to be."""
    code = "exec(bytes([" + ",".join(str(byte) for byte in f"open({str(marker)!r},'w').close()".encode()) + "]))"
    script = f"<script>{WORD}</script>"
    return {
        "expression": f"{WORD}) if 0 else {code}, (0",
        "statement": f"{WORD}\n{code}\n#",
        "comment": f"{WORD}\r{code}\r#\x0c\n{code}\n#\x85{code}\u2028{code}\n",
        "string": f"{WORD}' + str({code}) + '\" + str({code}) + \"\\",
        "docstring": f"{WORD}\"\"\"\n{code}\n\"\"\"'''\n{code}\n'''",
        "dunder": f"__import__('pathlib').Path({str(marker)!r}).touch() or {WORD}",
        "inline code": f"{WORD}` <b>{WORD}</b> ``<i>{WORD}</i>`` ![x](https://{WORD}/x.png) [a](javascript:{WORD})",
        "block": f"{WORD}\n\n# {WORD}\n\n```\n</details>\n\n<h1>{WORD}</h1>\n\n~~~\n***{WORD}***\n\n- [x] {WORD}\n",
        "table": f"{WORD} | <b>{WORD}</b> |\n| --- | --- |\n| [{WORD}](https://{WORD}) | *{WORD}* |",
        "html comment": f"{WORD} --> {script} --!> <img src=x onerror={WORD}> ]]> <!--",
        "html": f"</code></pre></style></textarea>{script}\"' onmouseover={WORD} <a href='javascript:{WORD}'>&lt;b&gt;",
        "terminal": f"\x1b]0;{WORD}\x1b\\\x1b[2J\x9b31m{WORD}\x07\b\b\x7f\u202e{WORD}\u2066\ud800\x00",
        "shell": f"{WORD}'; touch {marker} #`touch {marker}`$(touch {marker})\" | touch {marker}",
        "jinja": f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}{{% include '/etc/passwd' %}}",
        "path": f"../../../../../../etc/passwd\x00{WORD}",
        "long": WORD + "a@" * 20_000,
    }


# -- what the grammar allows ------------------------------------------------------------------------------------------


def sample(hint: Any) -> Any:
    """A value of a field's type, with as much in it as the type allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind = hint.__metadata__[0]
        if not callable(kind):  # a field that older files lack
            return sample(args[0])
        if isinstance(kind, one_of):
            return min(filter(None, kind.words))
        plain = {
            "link": "https://github.com/x/y",
            "digest": "0f",
            "rows": "row 0",
            "_plain_tensor": torch.zeros(16, dtype=torch.uint8),
        }
        return plain.get(kind.__name__, 1 if args[0] is int else "words")
    if origin in (Union, UnionType):
        return sample([arg for arg in args if arg is not NoneType][-1])
    if origin in (tuple, list):
        return [sample(arg) for arg in args if arg is not Ellipsis]
    if origin is not None:
        return {sample(args[0]): sample(args[1])}
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return {key_of(item): sample(hints[item.name]) for item in dataclasses.fields(hint)}
    return hint is bool or 1


def filled(content: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """A file with a sample in every field that it leaves empty; what belongs to its program stays."""
    found = copy.deepcopy(dict(content))
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if name not in _OF_PROGRAM and not (isinstance(found.get(name), (int, str)) and found[name]):
            found[name] = _merged(found.get(name), sample(hint))
    return found


_OF_PROGRAM = ("program", "tensors", "failure", "signature", "context")


def _merged(value: Any, full: Any) -> Any:
    if isinstance(value, dict) and isinstance(full, dict):
        return {**full, **{name: _merged(item, full.get(name)) for name, item in value.items()}}
    return full if value in (None, "") or value == [] or value == {} else value


def texts(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The places of all texts in nested data; the end of a path is ``"key"`` in brackets for a key of a dict."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):
                yield (*path, (name,))
            yield from texts(item, (*path, name))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from texts(item, (*path, place))


def with_text(value: Any, path: Path_, text: str) -> Any:
    """The data with another text in one place."""
    if not path:
        return text
    first, *rest = path
    if isinstance(first, tuple):
        return {text if name == first[0] else name: item for name, item in value.items()}
    if isinstance(value, dict):
        return {name: with_text(item, tuple(rest), text) if name == first else item for name, item in value.items()}
    items = [with_text(item, tuple(rest), text) if place == first else item for place, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def fields(content: Mapping[str, Any]) -> dict[str, Path_]:
    """Every text field of a file by its name, with the place of its first text; digests as keys are one field."""
    found: dict[str, Path_] = {}
    for path in texts(content):
        words = [f"[{part[0]}]" if isinstance(part, tuple) else str(part) for part in path]
        name = ".".join("*" if isinstance(part, int) or len(word) > _LONGEST else word
                        for part, word in zip(path, words, strict=True))  # fmt: skip
        found.setdefault(name, path)
    return found


_LONGEST = 40  # characters of a field's name


def crafted(content: Mapping[str, Any], paths: Iterable[Path_], text: str) -> Any:
    """The file with a text in these places; keys of dicts last, because they lead to other places."""
    for path in sorted(paths, key=lambda path: isinstance(path[-1], tuple)):
        content = with_text(content, path, text)
    return content


# -- damage -----------------------------------------------------------------------------------------------------------


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """A file with bytes changed, cut off at either end, put in at the front, or doubled."""
    first, last = sorted(draw.randrange(len(raw)) for _ in range(2))
    kind = draw.randrange(6)
    if kind == 0:
        return raw[:last]
    if kind == 1:
        return raw[first:]
    if kind == 2:
        return draw.randbytes(draw.randrange(1, 64)) + raw
    if kind == 3:
        return raw[:last] + raw[first:]
    changed = bytearray(raw)
    for _ in range(draw.randrange(1, 32)):
        changed[draw.randrange(len(raw) if kind == 4 else min(len(raw), 4096))] = draw.randrange(256)
    return bytes(changed)


def junk(draw: random.Random) -> Any:
    """A value that nobody expects."""
    nested: Any = []
    for _ in range(draw.choice((3, 30, 90))):
        nested = [nested, nested]
    odd = torch.ones(2)
    odd.numel = odd.dim = torch.Size  # type: ignore[method-assign, assignment]
    makers: list[Callable[[], Any]] = [
        lambda: draw.choice((None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 2**127, 10**5000)),
        lambda: draw.choice((0.0, -0.0, 1e308, float("nan"), float("inf"), 5e-324)),
        lambda: draw.choice(("", "x", "\x1b[2J", "a`b", "\ud800", "x" * 100_000, "torch.save", "__class__")),
        lambda: draw.choice(([], [1], [None], {}, {"ref": 0}, {"ref": -1}, {"ref": 10**9}, {"tuple": [[]]}, (), ((),))),
        lambda: draw.choice(({"symbol": "torch.hub"}, {"device": "cpu:x"}, {"slice": [1, 2, 3, 4]}, {"dict": [[1]]})),
        lambda: draw.choice(({float("nan"): 1}, {1: 2}, {None: None}, {(1,): 2}, {"complex": [1.0]}, {True: 1})),
        lambda: draw.choice((torch.zeros(0), torch.zeros(2, 2), torch.ones(2, device="meta"), torch.ones(1).expand(9))),
        lambda: torch.zeros(1).expand(2**20, 2**20),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (2**40,), check_invariants=False),
        lambda: torch.sparse_csr_tensor(torch.tensor([0, 9]), torch.tensor([9**9]), torch.ones(1), (1, 1),
                                        check_invariants=False),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: draw.choice((torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.float8_e4m3fn))),
        lambda: draw.choice((torch.float32, torch.Size([1]), torch.device("cpu"), {1, 2}, b"x", 1j)),
        lambda: odd,
        lambda: nested,
    ]  # fmt: skip
    return draw.choice(makers)()


def _places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for name, item in items:
        yield from _places(item, (*path, name))


def mangled(content: Mapping[str, Any], draw: random.Random) -> Any:
    """A file with junk in a field, a field left out or doubled, or two fields exchanged."""
    found = copy.deepcopy(dict(content))
    places = list(_places(found))
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        path, other = draw.choice(places), draw.choice(places)
        try:
            _change(found, path, _at(found, other), draw)
        except (KeyError, IndexError, TypeError):
            continue  # what an earlier change took away
    return found


def _at(value: Any, path: Path_) -> Any:
    for part in path:
        value = value[part]
    return value


def _change(content: Any, path: Path_, other: Any, draw: random.Random) -> None:
    parent, last = _at(content, path[:-1]), path[-1]
    kind = draw.randrange(8)
    if isinstance(parent, tuple):
        return
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, list):
        parent *= draw.choice((2, 50))
    elif kind == 1:
        parent[junk(draw) if draw.random() < 0.5 else "more"] = parent[last]
    elif kind == 2:
        parent[last] = other
    elif kind == 3:
        parent[last] = [parent[last], parent[last]]
    else:
        parent[last] = junk(draw)
