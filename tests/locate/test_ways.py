"""In which ways a tensor is not finite."""

from __future__ import annotations

import torch

from reprokit.locate.ways import examine, ways_of


def test_a_value_that_is_repeated_without_being_stored_is_looked_at_once() -> None:
    repeated = torch.tensor([[1.0], [float("nan")]]).expand(2, 1 << 48)
    found = examine(repeated)
    assert ways_of(repeated) == found.ways == {"nan"}
    assert found.first == {"nan": (1, 0)} and found.count == {"nan": 1 << 48}
    assert ways_of(torch.zeros(1).expand(1 << 50)) == frozenset()
