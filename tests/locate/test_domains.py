"""The table of domains is true of torch's functions."""

from __future__ import annotations

import pytest
import torch

from reprokit.locate.domains import DOMAINS, number_named
from reprokit.locate.ways import ways_of


@pytest.mark.parametrize("name", [name for name, domain in DOMAINS.items() if domain.operand == "x"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_of_domains_says_what_torch_does(name: str, dtype: torch.dtype) -> None:
    def ways(x: torch.Tensor) -> tuple[frozenset[str], frozenset[str]]:
        result = getattr(torch, name)(x.requires_grad_())
        result.sum().backward()
        assert x.grad is not None
        return ways_of(result.detach()), ways_of(x.grad)

    domain = DOMAINS[name]
    assert not bool(domain.places(torch.tensor([domain.harmless], dtype=dtype)).any())
    assert ways(torch.tensor([domain.harmless], dtype=dtype)) == (frozenset(), frozenset())
    for point in domain.points:
        bound = number_named(point.bound, dtype)
        beyond = {"at_most": [bound, bound - 0.5], "at_least": [bound, bound + 0.5], "above": [bound + 0.5]}
        for number in beyond.get(point.test, [bound]):
            x = torch.tensor([number], dtype=dtype)
            assert bool(point.places(x).all()) and bool(domain.places(x).all())
            assert any(ways(x))
