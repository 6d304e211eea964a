"""What is read from a file is a program or refused, whatever the file holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from reprokit.program.ir import OPAQUE, Call, Device, Input, Mode, ModuleNote, Program, Ref, Scope, Site, Slice, Symbol
from reprokit.program.plain import from_plain, to_plain

JUNK: list[Any] = [
    None, 3, 1.5, True, "text", [], {}, [1], {"ref": "x"}, {"ref": 5}, {"tuple": []}, {"dict": [[1, 2]]}, {"dict": [1]},
]  # fmt: skip


def everything() -> Program:
    """A program with something of every kind."""
    call = Call(
        "torch.exp",
        (Ref(0), Slice(1, None, Ref(0)), Symbol("torch.float16"), Device("cpu"), 2 + 1j, Ellipsis),
        {"size": [1, (2,)], "options": {"lr": 0.1}},
        (Ref(1), None),
        (Scope("layer", "Linear", 0),),
        Site("train.py", 1, "x.exp()", "main", ("library.py", 2), "y = (\n  x.exp()\n)", (2, 2, 2, 9)),
        Mode(rng=Ref(0), autocast=(("cpu", "torch.float16"),)),
    )
    notes = {"layer": ModuleNote("Linear", True, {"bias": True}, "train.py", 1, "class Net: ...")}
    described = {"name": "vmap(f)", "source": "", "is_transform": True}
    opaque = Call(OPAQUE, (Ref(0),), described, Ref(2))
    return Program((call, opaque), (Input(0, "x"), Input(2, "f_output", "opaque")), (Ref(1),), notes)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in nested plain data."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def test_there_and_back() -> None:
    assert from_plain(to_plain(everything())) == everything()


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_anywhere_is_refused_or_harmless(junk: Any) -> None:
    plain = to_plain(everything())
    num_refused = 0
    for *path, last in places(plain):
        changed = copy.deepcopy(plain)
        node = changed
        for key in path:
            node = node[key]
        node[last] = junk
        try:
            program = from_plain(changed)
        except ValueError:
            num_refused += 1
        else:
            assert from_plain(to_plain(program)) == program
    assert num_refused > 10
