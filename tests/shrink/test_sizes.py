"""Sizes that lengths, indexes, heads and groups depend on shrink with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink.problem import Class, InputAxis, shrink_to
from reprokit.snapshot.format import Snapshot
from tests.shrink import failing
from tests.shrink.failing import ending_of, minimum_of, record, seeded
from tests.shrink.test_reducer import key_of

HALF = torch.float16


def unreachable_alignment() -> Snapshot:
    """More labels than time steps."""
    targets = torch.arange(36).reshape(4, 9) % 6 + 1
    targets[1] = 3
    lengths = {"inputs": torch.tensor([12, 12, 10, 12]), "labels": torch.tensor([5, 9, 4, 5])}
    return record(
        lambda x, targets, inputs, labels: F.ctc_loss(x, targets, inputs, labels, reduction="sum"),
        x=seeded(12, 4, 7).log_softmax(-1),
        targets=targets,
        **lengths,
    )


def class_out_of_range() -> Snapshot:
    """A label that no class has."""
    target = torch.tensor([1, 2, 3, 4, 11, 5, 6, 7])
    return record(lambda x, target: F.cross_entropy(x, target), x=seeded(8, 11), target=target)


def row_out_of_range() -> Snapshot:
    """An index beyond the table."""
    index = torch.tensor([[1, 2, 3, 4], [11, 50, 6, 7]])
    return record(lambda index, table: F.embedding(index, table).sum(), index=index, table=seeded(50, 11))


def added_rows() -> Snapshot:
    """Rows that are added into too few places for half precision."""
    index = torch.arange(40) % 3
    rows = torch.full((40, 5), 6000.0, dtype=HALF)
    return record(
        lambda rows, index: torch.zeros(6, 5, dtype=HALF).index_add(0, index, rows).exp(), rows=rows, index=index
    )


def grouped_normalisation() -> Snapshot:
    """A constant group of channels without eps."""
    x = seeded(4, 12, 6, 6)
    x[2, 3:6] = 0.25
    return record(lambda x, w: F.group_norm(x, 4, w, eps=0.0).sum(), x=x, w=torch.ones(12))


def heads_written_in_place() -> Snapshot:
    """Attention weights are written after they were used: heads and widths stand in `view` and `reshape`."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        query = F.linear(x, weight).view(3, 6, 4, 5).transpose(1, 2)
        weights = torch.softmax(query @ query.transpose(-1, -2), -1)
        out = (weights @ query).transpose(1, 2).reshape(3, 6, 20)
        weights += 1
        out.sum().backward()

    return record(step, x=seeded(3, 6, 20, grad=True), weight=seeded(20, 20, grad=True))


def pooled_sum() -> Snapshot:
    """A kernel that has to stay larger than one."""
    return record(lambda x: F.avg_pool2d(x, 3).sum(), x=torch.full((2, 2, 9, 9), 2e38))


def normalised_batch() -> Snapshot:
    """An exception, whose equal sizes need not belong together."""
    return record(lambda x: F.batch_norm(x, None, None, training=True, eps=0).sum(), x=torch.ones(4, 3, 5, 5))


# calls, elements, checks at most
SIZES: dict[Callable[[], Snapshot], tuple[int, int, int]] = {
    unreachable_alignment: (1, 16, 130),
    class_out_of_range: (1, 2, 35),
    row_out_of_range: (1, 3, 35),
    added_rows: (1, 3, 30),
    grouped_normalisation: (1, 2, 50),
    heads_written_in_place: (3, 2, 80),
    pooled_sum: (1, 9, 50),
    normalised_batch: (1, 2, 35),
    failing.labels_in_one_row: (1, 4, 50),
}
by_name = pytest.mark.parametrize("step", SIZES, ids=lambda step: step.__name__)


@by_name
def test_sizes_shrink_to_the_least_that_fails(step: Callable[[], Snapshot]) -> None:
    snapshot = step()
    reduction = minimum_of(snapshot)
    summary = reduction.summary()
    calls, elements, checks = SIZES[step]
    assert key_of(reduction) == key_of(snapshot)
    assert (summary["calls"], summary["elements"], summary["one_minimal"]) == (calls, elements, True)
    assert summary["checks"] <= checks
    wanted = snapshot.failure.exception[0] if snapshot.failure.exception else "AssertionError"
    assert ending_of(reduction) == wanted


def shrunk(size: int, axis: InputAxis, kept: list[int], tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    program = Program((Call("torch.Tensor.exp", (Ref(0),), {}, Ref(9)),), tuple(Input(n, "") for n in tensors))
    return dict(shrink_to(Step(program, tensors), {Class(size, (axis,)): kept}).tensors)


def test_indexes_lengths_and_parts_follow_their_size() -> None:
    labels = shrunk(5, InputAxis(0, 1), [2, 4], {0: torch.zeros(3, 5), 1: torch.tensor([4, -100, 2])})
    assert labels[1].tolist() == [1, -100, 0]
    lengths = shrunk(6, InputAxis(0, 0), [0, 4, 5], {0: torch.zeros(6, 2), 1: torch.tensor([6, 2])})
    assert lengths[1].tolist() == [3, 2]
    parts = shrunk(3, InputAxis(1, 0), [0, 2], {0: torch.arange(6.0), 1: torch.tensor([2, 1, 3])})
    assert (parts[0].tolist(), parts[1].tolist()) == ([0, 1, 3, 4, 5], [2, 2])
