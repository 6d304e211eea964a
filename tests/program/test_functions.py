"""The list of functions a program may name is a security boundary."""

from __future__ import annotations

import pytest
import torch

from reprokit.program.functions import (
    UnknownFunction,
    _by_name,
    allowed_names,
    display_name,
    function_named,
    name_of,
)
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Program, Ref, Symbol


@pytest.mark.parametrize(
    "name",
    ["os.system", "torch.load", "torch.save", "torch.from_file", "torch.Tensor.apply_", "torch.Tensor.map_",
    "torch.Tensor.register_hook", "torch.hub.load",
     "torch.Tensor.__reduce_ex__", "torch.Tensor.numpy", "torch.Tensor.share_memory_",
     "torch.Tensor.untyped_storage", "torch.ops.load_library", "builtins.eval"],
)  # fmt: skip
def test_dangerous_names_are_refused(name: str) -> None:
    with pytest.raises(UnknownFunction):
        function_named(name)
    named_by_symbol = Call("torch.Tensor.to", (Ref(0), Symbol(name)), outputs=Ref(1))
    for call in (Call(name, (Ref(0),), outputs=Ref(1)), named_by_symbol):
        with pytest.raises(UnknownFunction):
            run(Program((call,), (Input(0, "x"),)), {0: torch.zeros(1)})


def test_names_and_functions_are_inverse() -> None:
    names = _by_name()
    assert len(names) > 1000
    assert all(function_named(name_of(function) or "") == function for function in names.values())


def test_a_function_with_several_names_has_its_documented_one() -> None:
    names: dict[object, list[str]] = {}
    for name, function in _by_name().items():
        names.setdefault(function, []).append(name)
    aliases = [several for several in names.values() if len(several) > 1]
    assert {"torch.mm", "torch.dsmm", "torch.spmm"} in map(set, aliases)
    for several in aliases:
        (chosen,) = {name_of(function_named(name)) for name in several}
        documented = [name for name in several if function_named(name).__doc__]
        assert chosen in (documented or several)
        functional = [name for name in documented if name.startswith("torch.nn.functional.")]
        assert not functional or chosen in functional


def test_operators_are_displayed_by_their_function() -> None:
    assert display_name("torch.Tensor.__rtruediv__") == "torch.Tensor.div"
    assert display_name("torch.nn.functional.softmax") == "torch.nn.functional.softmax"


def test_every_function_of_this_torch_has_been_decided_about() -> None:
    """A new torch has new functions; `python tests/program/allow_list.py` prints them and files what you decide."""
    from tests.program.allow_list import REFUSED, undecided

    assert not undecided()
    assert not allowed_names().intersection(REFUSED.read_text().split())


def test_the_lists_are_sorted_and_name_what_this_torch_has() -> None:
    from tests.program.allow_list import LISTS, is_here

    for file in LISTS.iterdir():
        names = file.read_text().splitlines()
        assert names == sorted(set(names))
    assert all(map(is_here, (LISTS / "torch-2.13.txt").read_text().split()))
