"""Tensors as source: exact to the bit, and as short as a person would write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.render.literals import as_given, is_same, literal
from reprokit.render.sources import is_plain

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def build(text: str) -> torch.Tensor:
    tensor = eval(text, {"torch": torch})
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3), "torch.zeros(2, 3)"),
        (torch.ones(1), "torch.ones(1)"),
        (torch.tensor(0.0), "torch.tensor(0.0)"),
        (torch.tensor([-INF]), 'torch.tensor([float("-inf")])'),
        (torch.full((4, 4), -INF), 'torch.full((4, 4), float("-inf"))'),
        (torch.full((2,), 300.0).half(), "torch.full((2,), 300.0, dtype=torch.float16)"),
        (torch.full((9,), 0.1), "torch.full((9,), 0.1)"),
        (torch.full((3,), 7), "torch.full((3,), 7)"),
        (torch.eye(3), "torch.eye(3)"),
        (torch.arange(5), "torch.arange(5)"),
        (torch.arange(2, 30, 3), "torch.arange(2, 32, 3)"),
        (torch.arange(12.0).reshape(3, 4), "torch.arange(12.0).reshape(3, 4)"),
        (torch.tensor([1, 5]), "torch.tensor([1, 5])"),
        (torch.tensor([True]), "torch.tensor([True])"),
        (torch.tensor([0.1, -0.0, NAN]), 'torch.tensor([0.1, -0.0, float("nan")])'),
        (torch.tensor([0.1]).half(), "torch.tensor([0.1], dtype=torch.float16)"),
        (torch.tensor([1 + 2j]), "torch.tensor([complex(1.0, 2.0)])"),
        (torch.ones(5, 5, dtype=torch.bool).tril(), "torch.ones(5, 5, dtype=torch.bool).tril()"),
        (torch.full((5, 5), -INF).triu(1), 'torch.full((5, 5), float("-inf")).triu(1)'),
        (torch.empty(0, 3), "torch.empty(0, 3)"),
        (torch.arange(6.0).reshape(2, 3).t(), "torch.arange(6.0).reshape(2, 3).t()"),
        (torch.zeros(2, 3, 4).transpose(0, 2), "torch.zeros(2, 3, 4).transpose(0, 2)"),
        (torch.zeros(1, 3).expand(4, 3), "torch.zeros(4, 3)"),
    ],
)
def test_shortest(tensor: torch.Tensor, text: str) -> None:
    found = literal(tensor)
    assert found is not None
    assert found.text == text
    assert is_same(build(found.text), as_given(tensor))


@pytest.mark.parametrize("tensor", [torch.zeros(2), torch.zeros(2, 3).t(), torch.arange(4.0).reshape(2, 2)])
def test_leaf_that_needs_a_gradient(tensor: torch.Tensor) -> None:
    found = literal(tensor)
    assert found is not None
    made = build(found.requiring_grad())
    assert made.requires_grad and made.is_leaf and is_same(made.detach(), tensor)


def test_many_numbers_have_no_expression() -> None:
    assert literal(torch.randn(65)) is None
    assert literal(torch.randn(64)) is not None
    assert literal(torch.randn(400, 400)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_dtypes_that_can_do_little(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = literal(tensor)
    assert found is not None
    assert is_same(build(found.text), tensor)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 4), max_size=3)
    values = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, 300.0, 1e-8]))

    @st.composite
    def draw_tensor(draw: Any) -> torch.Tensor:
        shape = draw(shapes)
        count = int(torch.Size(shape).numel())
        dtype = draw(st.sampled_from([*FLOATS, *INTS, torch.bool, torch.complex64]))
        if dtype in INTS:
            flat = torch.tensor(draw(st.lists(st.integers(0, 100), min_size=count, max_size=count)), dtype=dtype)
        else:
            numbers = draw(st.lists(values, min_size=count, max_size=count))
            flat = torch.tensor(numbers, dtype=torch.float64).to(dtype)
        tensor = flat.reshape(shape)
        order = draw(st.permutations(range(len(shape))))
        return tensor.permute(order)

    return draw_tensor()


@settings(deadline=None, max_examples=300)
@given(tensors())
def test_every_small_tensor_comes_back_exactly(tensor: torch.Tensor) -> None:
    if tensor.numel() > 64:
        return
    found = literal(tensor)
    assert found is not None
    made = build(found.text)
    assert is_same(made, as_given(tensor)), found.text


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_the_scale_of_a_quantized_tensor_tells_something() -> None:
    assert is_plain(torch.ones(3)) and is_plain(torch.full((2,), 100)) and not is_plain(torch.full((2,), 0.3))
    assert not is_plain(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
