"""Which sizes belong together, and what slicing them does to the rest of a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Device, Input, Program, Ref, Slice
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Class, Constant, InputAxis, Length, find_classes, shrink_to
from reprokit.shrink.probe import Ground, Prober, is_safe


def one_call(target: str, *args: Any, tensors: list[torch.Tensor], **kwargs: Any) -> Candidate:
    outputs = tuple(map(Ref, range(99, 102))) if target == "torch.lstm" else (Ref(99), Ref(98))
    is_single = target not in ("torch.lstm", "torch.gru", "torch.linalg.eigh")
    call = Call(target, args, kwargs, Ref(99) if is_single else outputs)
    inputs = tuple(Input(number, f"x{number}") for number in range(len(tensors)))
    return Candidate(Program((call,), inputs, (Ref(99),)), dict(enumerate(tensors)))


def members(candidate: Candidate) -> list[set[tuple[Any, ...]]]:
    def place(member: InputAxis | Constant | Length) -> tuple[Any, ...]:
        at = (member.value, member.axis) if isinstance(member, InputAxis) else (type(member).__name__, member.path)
        return at if member.factor == 1 else (*at, member.factor)

    return [{place(member) for member in group.members} for group in find_classes(candidate, Prober())]


def zeros(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (one_call("torch.add", Ref(0), Ref(1), tensors=zeros((4, 6), (6,))), [{(0, 0)}, {(0, 1), (1, 0)}]),
        (
            one_call("torch.nn.functional.linear", Ref(0), Ref(1), Ref(2), tensors=zeros((5, 5), (5, 5), (5,))),
            [{(0, 0)}, {(0, 1), (1, 1)}, {(1, 0), (2, 0)}],
        ),
        (
            one_call("torch.Tensor.view", Ref(0), 3, 8, tensors=zeros((24,))),
            [{("Constant", (0, 1)), (0, 0, 8)}],
        ),
        (
            one_call("torch.conv2d", Ref(0), Ref(1), tensors=zeros((2, 3, 9, 9), (4, 3, 3, 3))),
            [{(0, 0)}, {(0, 1), (1, 1)}, {(0, 2)}, {(0, 3)}, {(1, 0)}, {(1, 2)}, {(1, 3)}],
        ),
        (one_call("torch.linalg.eigh", Ref(0), tensors=[torch.eye(4)]), [{(0, 0), (0, 1)}]),
        (one_call("torch.cat", [Ref(0), Ref(1)], 1, tensors=zeros((2, 3), (2, 4))), [{(0, 0), (1, 0)}, {(0, 1)}]),
    ],
)
def test_sizes_that_belong_together(candidate: Candidate, expected: list[set[tuple[Any, ...]]]) -> None:
    found = members(candidate)
    assert [group for group in expected if group not in found] == []


def test_gates_and_layers_are_multiples() -> None:
    layer = torch.nn.LSTM(5, 7, num_layers=2)
    weights = [parameter.detach() for parameter in layer.parameters()]
    refs = [Ref(number) for number in range(3, 3 + len(weights))]
    tensors = [torch.zeros(4, 3, 5), torch.zeros(2, 3, 7), torch.zeros(2, 3, 7), *weights]
    args = (Ref(0), (Ref(1), Ref(2)), refs, True, 2, 0.0, False, False, False)
    found = members(one_call("torch.lstm", *args, tensors=tensors))
    hidden = next(group for group in found if (1, 2) in group)
    assert {(3, 0, 4), (4, 0, 4), (4, 1), (7, 1)} <= hidden
    layers = next(group for group in found if (1, 0) in group)
    assert layers == {(1, 0), (2, 0), ("Constant", (0, 4)), ("Length", (0, 2), 4)}


def test_slicing_keeps_indexes_integers_and_index_tensors_in_step() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    candidate = one_call("torch.embedding", Ref(0), Ref(1), tensors=[rows, torch.tensor([3, 1, 3])])
    group = Class(4, (InputAxis(0, 0),))
    smaller = shrink_to(candidate, {group: [1, 3]})
    assert smaller.tensors[0].tolist() == [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]
    assert smaller.tensors[1].tolist() == [1, 0, 1]


def test_integers_in_arguments_are_renumbered_on_request() -> None:
    index = (Slice(None, None, None), 7)
    candidate = one_call("torch.Tensor.__getitem__", Ref(0), index, tensors=[torch.arange(9.0).expand(2, 9)])
    group = Class(9, (InputAxis(0, 1),))
    assert Prober().refuses(shrink_to(candidate, {group: [7]}), candidate)
    smaller = shrink_to(candidate, {group: [7]}, renumber=lambda call: True)
    assert smaller.program.calls[0].args[1] == (Slice(None, None, None), 0)
    assert smaller.tensors[0].tolist() == [[7.0], [7.0]]


def test_what_programs_are_probed_on() -> None:
    assert Prober().ground(one_call("torch.exp", Ref(0), tensors=zeros((3,)))) is Ground.ZEROS
    assert Prober().ground(one_call("torch.linalg.inv", Ref(0), tensors=[torch.eye(2)])) is Ground.META
    large = one_call("torch.exp", Ref(0), tensors=[torch.zeros(1).expand(1 << 24)])
    assert Prober().ground(large) is Ground.META
    sparse = one_call("torch.Tensor.to_dense", Ref(0), tensors=[torch.eye(2).to_sparse()])
    assert Prober().ground(sparse) is None
    assert not Prober().refuses(sparse, sparse)


def test_a_new_warning_is_refused() -> None:
    plain = one_call("torch.nn.functional.softmax", Ref(0), tensors=zeros((3,)), dim=0)
    implicit = one_call("torch.nn.functional.softmax", Ref(0), tensors=zeros((3,)))
    assert Prober().refuses(implicit, plain)


@pytest.mark.parametrize(
    ("num_weights", "num_layers", "states", "safe"),
    [(4, 1, 1, True), (8, 2, 2, True), (4, 2, 2, False), (4, 1, 2, False), (3, 1, 1, False), (8, 1, 1, False)],
)
def test_recurrent_layers_with_parts_missing_are_not_run(
    num_weights: int, num_layers: int, states: int, safe: bool
) -> None:
    weights = zeros(*[(6, 2), (6, 2), (6,), (6,)] * 2)[:num_weights]
    refs = [Ref(number + 2) for number in range(num_weights)]
    args = (Ref(0), Ref(1), refs, True, num_layers, 0.0, False, False, False)
    candidate = one_call("torch.gru", *args, tensors=[*zeros((3, 1, 2), (states, 1, 2)), *weights])
    assert is_safe(candidate.program, candidate.shapes) == safe
    assert (locate(candidate.program, candidate.tensors) is None) if safe else Prober().ground(candidate) is None


@pytest.mark.parametrize("width", [2, 1 << 21])  # probed on zeros, and on the meta device
@pytest.mark.parametrize(("cells", "batch"), [(1, 1), (2, 1), (1, 3), (0, 1)])
def test_a_state_that_the_program_makes_is_compared_before_a_probe(cells: int, batch: int, width: int) -> None:
    state = Call("torch.zeros", (cells, batch, 2), {"device": Device("cpu")}, Ref(9))
    args = (Ref(0), Ref(9), [Ref(1), Ref(2)], False, 1, 0.0, False, False, False)
    layer = Call("torch.gru", args, {}, (Ref(3), Ref(4)))
    tensors = {0: torch.zeros(()).expand(1, 1, width), 1: torch.zeros(()).expand(6, width), 2: torch.zeros(6, 2)}
    inputs = tuple(Input(value, f"x{value}") for value in tensors)
    candidate = Candidate(Program((state, layer), inputs, (Ref(3),)), tensors)
    fits = {2: Ground.ZEROS, 1 << 21: Ground.META}[width] if (cells, batch) == (1, 1) else None
    assert Prober().ground(candidate) is fits


def test_gates_must_be_complete() -> None:
    args = (Ref(0), Ref(1), [Ref(2), Ref(3)], False, 1, 0.0, False, False, False)
    candidate = one_call("torch.gru", *args, tensors=zeros((3, 1, 2), (1, 1, 2), (5, 2), (6, 2)))
    assert not is_safe(candidate.program, candidate.shapes)
