"""Sizes that lengths, indexes, heads, groups and layers depend on shrink with them, and no check is spent on candidates
that a rule or a probe can refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Class, InputAxis, shrink_to
from reprokit.shrink.indexes import fits
from reprokit.shrink.probe import Prober
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot
from tests.shrink import failing
from tests.shrink.executed import ending_of
from tests.shrink.failing import record, seeded
from tests.shrink.test_minimal import fails_alike, single_edits
from tests.shrink.test_reducer import signature_of

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


def unreachable_alignment_gradient() -> Snapshot:
    """The gradient of a loss that is infinite for one sequence and left out there."""
    targets = torch.arange(36).reshape(4, 9) % 6 + 1
    targets[1] = 3

    def step(x: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.ctc_loss(x.log_softmax(-1), targets, inputs, labels, reduction="none")
        torch.where(loss.isinf(), torch.zeros_like(loss), loss).mean().backward()

    inputs, labels = torch.tensor([12, 12, 10, 12]), torch.tensor([5, 9, 4, 5])
    return record(step, x=seeded(12, 4, 7, grad=True), targets=targets, inputs=inputs, labels=labels)


def packed_recurrence() -> Snapshot:
    """Packed sequences through two layers in two directions."""
    torch.manual_seed(0)
    layer = nn.RNN(5, 6, num_layers=2, nonlinearity="relu", bidirectional=True, batch_first=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.rand_like(weight) * 1e10)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0].sum()

    return record(step, x=torch.rand(4, 7, 5), lengths=torch.tensor([7, 5, 3, 2]))


def upper_layer() -> Snapshot:
    """A weight of the backward direction of the last layer."""
    torch.manual_seed(0)
    layer = nn.RNN(5, 6, num_layers=3, nonlinearity="relu", bidirectional=True)
    with torch.no_grad():
        layer.weight_ih_l2_reverse[2].fill_(3e38)
        layer.weight_hh_l2_reverse.zero_()
    return record(lambda x: layer(x)[0].sum(), x=torch.rand(7, 4, 5) + 1)


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


def grouped_transposed_convolution() -> Snapshot:
    """Stride, padding and groups that go, and with them sizes that they asked for."""
    x, weight = seeded(3, 8, 5, 5).abs() * 1e19, seeded(8, 4, 4, 4).abs() * 3e19

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, weight, None, stride=2, padding=1, output_padding=1, groups=2).sum()

    return record(step, x=x, weight=weight)


def grouped_normalisation() -> Snapshot:
    """A constant group of channels without eps."""
    x = seeded(4, 12, 6, 6)
    x[2, 3:6] = 0.25
    return record(lambda x, w: F.group_norm(x, 4, w, eps=0.0).sum(), x=x, w=torch.ones(12))


def transposed_view() -> Snapshot:
    """A view of what does not lie in one piece: the strides matter."""
    return record(lambda x: torch.relu(x).transpose(1, 2).view(8, 72), x=seeded(8, 12, 6))


def heads_written_in_place() -> Snapshot:
    """Attention weights are written after they were used: heads and widths stand in `view` and `reshape`."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        query = F.linear(x, weight).view(3, 6, 4, 5).transpose(1, 2)
        weights = torch.softmax(query @ query.transpose(-1, -2), -1)
        out = (weights @ query).transpose(1, 2).reshape(3, 6, 20)
        weights += 1
        out.sum().backward()

    return record(step, x=seeded(3, 6, 20, grad=True), weight=seeded(20, 20, grad=True))


def shuffled_written_in_place() -> Snapshot:
    """Channels that are a multiple of a square."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        gate = F.pixel_shuffle(F.conv2d(x, weight, padding=1), 2).sigmoid()
        out = gate * gate
        gate.mul_(2)
        out.mean().backward()

    return record(step, x=seeded(2, 3, 5, 5, grad=True), weight=seeded(12, 3, 3, 3, grad=True))


def overlapping_blocks() -> Snapshot:
    """Blocks that are added up where they overlap: the image, the kernel and two dimensions depend on each other."""
    return record(lambda x: F.fold(x, (5, 5), (2, 2), stride=1).sum(), x=torch.full((2, 12, 16), 2e38))


def kernel_as_large_as_its_image() -> Snapshot:
    """Neither can grow alone, and the image can shrink only with the kernel."""
    x, weight = torch.full((2, 4, 20), 1e20), torch.full((6, 2, 5), 1e20)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, weight, stride=2, padding=3, dilation=2, groups=2).sum()

    return record(step, x=x, weight=weight)


def pooled_sum() -> Snapshot:
    """A kernel that has to stay larger than one."""
    return record(lambda x: F.avg_pool2d(x, 3).sum(), x=torch.full((2, 2, 9, 9), 2e38))


def normalised_batch() -> Snapshot:
    """An exception, whose equal sizes need not belong together."""
    return record(lambda x: F.batch_norm(x, None, None, training=True, eps=0).sum(), x=torch.ones(4, 3, 5, 5))


# calls, elements, checks at most
SIZES: dict[Callable[[], Snapshot], tuple[int, int, int]] = {
    unreachable_alignment: (1, 6, 20),
    unreachable_alignment_gradient: (1, 7, 20),
    packed_recurrence: (1, 4, 35),
    upper_layer: (1, 4, 40),
    class_out_of_range: (1, 2, 8),
    row_out_of_range: (1, 2, 8),
    added_rows: (1, 3, 15),
    grouped_transposed_convolution: (1, 2, 15),
    grouped_normalisation: (1, 2, 15),
    transposed_view: (1, 4, 35),
    heads_written_in_place: (3, 2, 50),
    shuffled_written_in_place: (3, 1, 45),
    overlapping_blocks: (1, 4, 25),
    kernel_as_large_as_its_image: (1, 2, 30),
    pooled_sum: (1, 4, 30),
    normalised_batch: (1, 2, 35),
}
by_name = pytest.mark.parametrize("step", SIZES, ids=lambda step: step.__name__)


@by_name
def test_sizes_shrink_to_the_least_that_fails(step: Callable[[], Snapshot]) -> None:
    snapshot = step()
    reduction = shrink(snapshot)
    summary = reduction.summary()
    calls, elements, checks = SIZES[step]
    assert signature_of(reduction) == signature_of(snapshot)
    assert (summary["calls"], summary["elements"], summary["one_minimal"]) == (calls, elements, True)
    assert summary["checks"] <= checks
    wanted = snapshot.failure.exception[0] if snapshot.failure.exception else "AssertionError"
    assert ending_of(reduction) == wanted
    best = Candidate(reduction.program, reduction.tensors)
    for edit, candidate in single_edits(best):
        is_smaller = candidate.is_smaller_than(best) and candidate.num_calls
        if fits(best.program.calls, best.tensors) and not fits(candidate.program.calls, candidate.tensors):
            continue  # a label without a class reads foreign memory
        assert not (is_smaller and fails_alike(candidate, best)), edit


@pytest.mark.parametrize(
    "step", [unreachable_alignment, unreachable_alignment_gradient, added_rows, grouped_transposed_convolution]
)
def test_no_check_is_spent_on_what_is_ill_formed(step: Callable[[], Snapshot]) -> None:
    assert shrink(step()).verdicts["invalid"] == 0


def alignment(targets: torch.Tensor, inputs: list[int], labels: list[int]) -> Candidate:
    call = Call("torch.nn.functional.ctc_loss", tuple(map(Ref, range(4))), {}, Ref(4))
    tensors = [torch.zeros(6, len(inputs), 5), targets, torch.tensor(inputs), torch.tensor(labels)]
    program = Program((call,), tuple(Input(number, f"x{number}") for number in range(4)), (Ref(4),))
    return Candidate(program, dict(enumerate(tensors)))


def test_lengths_and_labels_follow_their_sizes() -> None:
    whole = alignment(torch.tensor([[1, 4, 2], [3, 3, 1]]), [6, 4], [3, 2])
    shorter = shrink_to(whole, {Class(6, (InputAxis(0, 0),)): [0, 4, 5]})
    assert shorter.tensors[2].tolist() == [3, 1]
    fewer = shrink_to(whole, {Class(3, (InputAxis(1, 1),)): [0, 2]})
    assert fewer.tensors[3].tolist() == [2, 1]
    classes = shrink_to(whole, {Class(5, (InputAxis(0, 2),)): [3, 4]})
    assert classes.tensors[1].tolist() == [[1, 1, 1], [1, 1, 1]]  # never the blank


@pytest.mark.parametrize(
    ("targets", "inputs", "labels", "expected"),
    [
        ([[1, 4, 2]], [6], [3], True),
        ([[1, 5, 2]], [6], [3], False),  # no such class
        ([[1, 0, 2]], [6], [3], False),  # the blank
        ([[1, 4, 2]], [7], [3], False),
        ([[1, 4, 2]], [6], [4], False),
        ([[1, 4, 2]], [-1], [3], False),
    ],
)
def test_lengths_and_labels_are_checked_by_rule(
    targets: list[list[int]], inputs: list[int], labels: list[int], expected: bool
) -> None:
    candidate = alignment(torch.tensor(targets), inputs, labels)
    assert fits(candidate.program.calls, candidate.tensors) is expected
    good = alignment(torch.tensor([[1, 4, 2]]), [6], [3])
    assert Prober().refuses(candidate, good) is not expected


def test_ignored_labels_stay_and_need_no_class() -> None:
    call = Call("torch.nn.functional.cross_entropy", (Ref(0), Ref(1)), {"ignore_index": 255}, Ref(2))
    program = Program((call,), (Input(0, "x"), Input(1, "target")), (Ref(2),))
    whole = Candidate(program, {0: torch.zeros(3, 5), 1: torch.tensor([4, 255, 2])})
    assert fits(whole.program.calls, whole.tensors)
    fewer = shrink_to(whole, {Class(5, (InputAxis(0, 1),)): [2, 4]})
    assert fewer.tensors[1].tolist() == [1, 255, 0]
    other = replace(whole, program=replace(program, calls=(replace(call, kwargs={}),)))
    assert not fits(other.program.calls, other.tensors)


def test_slices_keep_the_order_in_memory() -> None:
    program = Program((Call("torch.Tensor.exp", (Ref(0),), {}, Ref(1)),), (Input(0, "x"),), (Ref(1),))
    whole = Candidate(program, {0: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)})
    smaller = shrink_to(whole, {Class(4, (InputAxis(0, 0),)): [1, 3]}).tensors[0]
    assert torch.equal(smaller, whole.tensors[0][[1, 3]])
    assert smaller.stride() == (1, 6, 2)


@pytest.mark.parametrize(
    ("step", "elements", "checks"),
    [
        (lambda: failing.labels_in_one_row(10, 2), 6, 35),
        (lambda: failing.labels_in_one_row(0, 0), 6, 35),
        (lambda: failing.labels_in_one_row(10, 3), 6, 35),
        (lambda: failing.labels_in_one_row(0, 1, grad=True), 6, 35),
        (failing.overflowing_bag, 4, 20),
        (lambda: failing.overflowing_bag(has_end=True), 4, 20),
        (lambda: failing.overflowing_bag(is_weighted=True), 4, 20),
        (failing.overflowing_segment, 3, 15),
    ],
)
def test_parts_of_a_flat_tensor_go_with_their_lengths(step: Callable[[], Snapshot], elements: int, checks: int) -> None:
    reduction = shrink(step())
    assert (reduction.program.num_calls, reduction.one_minimal) == (1, True)
    assert sum(tensor.numel() for tensor in reduction.tensors.values()) == elements
    assert reduction.checks <= checks


def test_parts_that_do_not_fill_their_tensor_cost_no_check() -> None:
    snapshot = failing.labels_in_one_row(0, 0)
    (labels,) = (item.value for item in snapshot.program.inputs if item.name == "labels")
    assert fits(snapshot.program.calls, snapshot.tensors)
    assert not fits(snapshot.program.calls, {**snapshot.tensors, labels: snapshot.tensors[labels][:-1]})
