"""In which ways a tensor is not finite."""

from __future__ import annotations

import pytest
import torch

from reprokit.locate.ways import examine, largest_finite, ways_of


def test_a_value_that_is_repeated_without_being_stored_is_looked_at_once() -> None:
    repeated = torch.tensor([[1.0], [float("nan")]]).expand(2, 1 << 48)
    found = examine(repeated)
    assert ways_of(repeated) == found.ways == {"nan"}
    assert found.first == {"nan": (1, 0)} and found.count == {"nan": 1 << 48}
    assert ways_of(torch.zeros(1).expand(1 << 50)) == frozenset()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_largest_finite_number_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, float("nan")], [0.0, -3.0]])
    assert largest_finite(values.to(dtype)) == 3.0
    for sparse in (values.to_sparse(), values.to_sparse_csr()):
        assert largest_finite(sparse) == 3.0
    assert largest_finite(torch.zeros(2, 2).to_sparse()) == largest_finite(torch.full((2,), float("nan"))) == 0.0
