"""The story: which layer left its own course first, since when and how fast."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprokit.story import LayerNumbers, by_layer, chapters, paragraph

STEPS = range(20)


def rows(module: str, quantity: str, values: dict[int, float], usual: float = 0.3) -> list[LayerNumbers]:
    """A layer that has the usual value but in the steps given."""
    return [LayerNumbers(step, module, **{quantity: values.get(step, usual)}) for step in STEPS]


@pytest.mark.parametrize(
    ("quantity", "values", "step", "words"),
    [
        ("gradient", {s: 0.3 * 1.8 ** (s - 9) for s in range(10, 20)}, 10, "grows 1.8 times a step from step 10 on"),
        ("gradient", dict.fromkeys(range(15, 20), 3e5), 15, "jumps from about 0.3 to 3e+05 at step 15"),
        ("activation", {19: math.inf}, 19, "is inf at step 19; before it was about 0.3"),
        ("update", {18: math.nan, 19: math.nan}, 18, "is nan at step 18"),
        ("zeros", dict.fromkeys(range(12, 20), 1.0), 12, "the output of `a` is zero from step 12 on"),
        ("zeros", dict.fromkeys(STEPS, 1.0), 0, "the output of `a` is zero in all of the 20 played steps"),
        ("gradient", dict.fromkeys(STEPS, 0.0), 0, "the gradient of `a` is zero in all of the 20 played steps"),
    ],
)
def test_a_layer_that_leaves_its_course(quantity: str, values: dict[int, float], step: int, words: str) -> None:
    (found,) = chapters([*rows("a", quantity, values), *rows("b", quantity, {})])
    assert (found.step, found.module) == (step, "a") and words in found.text


@pytest.mark.parametrize(
    ("quantity", "values"),
    [
        ("gradient", {10: 3e5}),  # one bad batch, and the layer is back on its course
        ("gradient", {s: 0.3 * 1.05**s for s in STEPS}),
        ("gradient", {s: 0.3 * 0.5**s for s in STEPS}),
        ("zeros", {s: 0.6 + 0.02 * (s % 5) for s in STEPS}),
        ("zeros", {18: 1.0, 19: 1.0}),
        ("activation", {s: (0.1, 0.9)[s % 2] for s in STEPS}),
    ],
)
def test_a_layer_that_does_not(quantity: str, values: dict[int, float]) -> None:
    assert chapters(rows("a", quantity, values)) == []


def test_order_of_time_and_then_of_distance() -> None:
    late, far = rows("late", "gradient", {18: 1e3, 19: 1e3}), rows("far", "gradient", {17: 1e9, 18: 1e9, 19: 1e9})
    near = rows("near", "gradient", {17: 1e3, 18: 1e3, 19: 1e3})
    found = chapters([*late, *near, *far])
    assert [chapter.module for chapter in found] == ["far", "near", "late"]
    assert paragraph(found, most=2).count("`") == 4 and paragraph([]) == ""


def test_by_layer_keeps_those_that_left_their_course() -> None:
    many = [row for n in range(50) for row in rows(f"h.{n}", "gradient", {19: 1e6} if n == 40 else {})]
    shown = [series.module for series in by_layer(many, "gradient", 5)]
    assert len(shown) == 5 and "h.40" in shown
    assert by_layer(many, "zeros", 5) == []


@given(st.lists(st.floats() | st.none(), max_size=30), st.sampled_from(["gradient", "update", "activation", "zeros"]))
def test_any_numbers(values: list[float | None], quantity: str) -> None:
    given_rows = [LayerNumbers(step, "a", **{quantity: value}) for step, value in enumerate(values)]
    found = chapters(given_rows)
    assert all(chapter.step in range(len(values)) and chapter.text for chapter in found)
