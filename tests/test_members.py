"""Parts, parameters and buffers of modules are found as torch finds them, without code of the module's own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from reprokit import members


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.nothing = nn.Linear(3, 3), None
        self.rows = nn.ModuleList([self.first, nn.BatchNorm1d(3), nn.Sequential(self.first, nn.PReLU())])
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_module("absent", None)
        self.register_buffer("absent_too", None)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.mask


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.ones(2, 3))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


MODULES = {
    "tied": Tied,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU()),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "compiled": lambda: torch.compile(Tied()),
    "scripted": scripted,
    "traced": traced,
    "empty": nn.Identity,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_members_are_those_of_torch(name: str, remove_duplicate: bool) -> None:
    module = MODULES[name]()
    given = {"remove_duplicate": remove_duplicate}
    assert members.named_modules(module, **given) == list(module.named_modules(**given))
    of_torch = [(path, tensor.data_ptr()) for path, tensor in _made(module.named_parameters(**given))]
    assert [(path, tensor.data_ptr()) for path, tensor in _made(members.named_parameters(module, **given))] == of_torch
    of_torch = [(path, tensor.data_ptr()) for path, tensor in module.named_buffers(**given)]
    assert [(path, tensor.data_ptr()) for path, tensor in members.named_buffers(module, **given)] == of_torch
    assert len(members.own_parameters(module)) == len(list(module.parameters(recurse=False)))
    assert len(members.own_buffers(module)) == len(list(module.buffers(recurse=False)))


def _made(named):
    return [(path, tensor) for path, tensor in named if not nn.parameter.is_lazy(tensor)]


def test_parts_of_several_roots_count_once() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.ReLU())
    assert members.parts([inner, outer]) == [inner, outer, outer[1]]
    assert members.children_names(outer) == ["0", "1"]
