"""Walks over the arguments of a call read what containers store, without a method of the user's."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprokit.capture.structure import iter_tensors, map_leaves
from tests.conftest import Run

CALLS: Counter[str] = Counter()
NAMES = """__getitem__ __setitem__ __iter__ __len__ __contains__ __eq__ __hash__ __bool__ __copy__ __deepcopy__
    __repr__ __reduce__ __reduce_ex__ __getattr__ __getattribute__ __setattr__ __instancecheck__ __getstate__
    keys values items get copy update extend append"""
METHODS = NAMES.split()


def counted(name: str, base: type, **fields: Any) -> type:
    """A class of which every method counts its calls, and whose ``__class__`` and ``__dict__`` do."""

    def method(of: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS[f"{name}.{of}"] += 1
            return getattr(base, of)(self, *args, **kwargs)

        return call

    def asked(self: Any) -> Any:
        CALLS[f"{name}.__class__"] += 1
        return cls

    methods = {of: method(of) for of in METHODS if hasattr(base, of) or of == "__getattr__"}
    cls: Any = type(name, (base,), {**methods, "__class__": property(asked), **fields})
    return cls  # type: ignore[no-any-return]


@dataclass
class Batch:
    x: Any
    y: int = 1


@dataclass(slots=True, frozen=True)
class Slots:
    x: Any
    y: int = 1


class Mapped(Mapping[str, Any]):
    def __init__(self, x: Any) -> None:
        self.store = {"x": x}

    def __getitem__(self, key: str) -> Any:
        CALLS["Mapped"] += 1
        return self.store[key]

    def __iter__(self) -> Iterator[str]:
        CALLS["Mapped"] += 1
        return iter(self.store)

    def __len__(self) -> int:
        CALLS["Mapped"] += 1
        return len(self.store)


class Outputs(OrderedDict):  # type: ignore[type-arg]
    """Stores each field as an item and as an attribute."""

    def __init__(self, x: Any) -> None:
        super().__init__(x=x)
        self.x = x


Pair = namedtuple("Pair", "x y")
MADE = [
    lambda x: counted("Dict", dict)(x=x),
    lambda x: counted("List", list)([x, 1]),
    lambda x: counted("Tuple", tuple)((x, 1)),
    lambda x: counted("Named", Pair)(x, 1),
    lambda x: counted("Data", Batch)(x),
    lambda x: counted("Order", OrderedDict)(x=x),
    lambda x: counted("User", UserDict)(x=x),
    lambda x: counted("Inner", dict)(x=counted("Outer", list)([{"x": x}])),
    Mapped,
    Slots,
    Outputs,
    lambda x: SimpleNamespace(x=[x]),
]


@pytest.mark.parametrize("make", MADE)
def test_no_method_of_a_container_is_called(make: Any) -> None:
    x = torch.ones(3)
    value = make(x)
    CALLS.clear()
    found = list(iter_tensors(value))
    doubled = map_leaves(value, torch.Tensor, lambda tensor: tensor * 2)
    assert not CALLS
    assert [one is x for one in found] == [True]
    assert type(doubled) is type(value) and doubled is not value
    assert [one.tolist() for one in iter_tensors(doubled)] == [[2.0] * 3]
    assert [one is x for one in iter_tensors(value)] == [True]


def test_fields_of_a_copy_are_the_changed_ones() -> None:
    x = torch.ones(3)
    outputs, slots, pair = map_leaves((Outputs(x), Slots(x), Pair(x, 2)), torch.Tensor, lambda tensor: 5)
    assert (outputs["x"], outputs.x, slots.x, slots.y, pair.x, pair.y) == (5, 5, 5, 1, 5, 2)


class Key:
    def __hash__(self) -> int:
        CALLS["hash"] += 1
        return 1


def test_keys_with_a_hash_of_their_own_are_not_hashed() -> None:
    value = {(Key(), 1): torch.ones(3)}
    CALLS.clear()
    assert map_leaves(value, torch.Tensor, lambda tensor: 5) is value
    assert len(list(iter_tensors(value))) == 1 and not CALLS


SCRIPT = """
import random

import torch
from torch import nn

class Batch(dict):
    def __getitem__(self, key):
        return dict.__getitem__(self, key) + random.random()

    def values(self):
        return [self[key] for key in self]

    def __iter__(self):
        random.random()
        return super().__iter__()

class Net(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])

torch.manual_seed(0)
random.seed(0)
model = Net(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(Batch(x=torch.randn(4, 3))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), random.random())
"""


def test_a_batch_that_draws_when_it_is_read(run_python: Run, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(SCRIPT)
    bare, watched = run_python("train.py"), run_reprokit("capture", "--history", "2", "train.py")
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert watched.stdout == bare.stdout
